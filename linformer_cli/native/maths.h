// Elementary functions in plain arithmetic that the compiler can vectorise, so that no fast-math flag is needed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "constants.h"

// A loop that calls a function is not vectorised, and compilers inline less in a large file. demo/wasm.cpp saves space.
#ifndef LINTX_INLINE
#define LINTX_INLINE [[gnu::always_inline]] inline
#endif

namespace {  // local to the library that includes it: the compiler may inline all of it

// exp(x) within 2 units in the last place; 0 below the smallest normal number. NaN stays NaN.
LINTX_INLINE float exponential(float x) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which is then in the lowest bits
    // Comparisons with NaN are false, so NaN passes both bounds.
    x = x > 88.8f ? 88.8f : x;
    const float bounded = x < -87.3f ? -87.3f : x;
    const float turned = bounded * 1.44269504f + shift;
    const float power = turned - shift;
    const float rest = (bounded - power * 0.693359375f) + power * 2.12194440e-4f;
    // The coefficients of Cephes' expf (Moshier).
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * (rest * rest) + rest + 1.0f;
    uint32_t bits;
    std::memcpy(&bits, &turned, 4);
    // Multiply by two powers of two, because 2^128 is not a float. NaN gives any powers: unsigned integers may
    // overflow.
    const uint32_t whole = bits - 0x4b400000, half = static_cast<uint32_t>(static_cast<int32_t>(whole) >> 1);
    const uint32_t first = (half + 127) << 23, second = (whole - half + 127) << 23;
    float scale, other;
    std::memcpy(&scale, &first, 4);
    std::memcpy(&other, &second, 4);
    const float value = sum * scale * other;
    return x < -87.3f ? 0.0f : value;
}

// exp(x) within 1 unit in the last place; 0 below -708, and exp(709) above 709. NaN stays NaN.
LINTX_INLINE double exponential(double x) {
    const double shift = 6755399441055744.0;  // 1.5 * 2^52
    x = x > 709 ? 709 : x;
    const double bounded = x < -708 ? -708 : x;
    const double turned = bounded * 1.4426950408889634 + shift;
    const double power = turned - shift;
    // ln 2 is split into two parts. The first part has so few bits that its product is exact.
    const double rest = (bounded - power * 0.693145751953125) - power * 1.4286068203094172e-6;
    // The power series. The first omitted term is below 1e-17.
    double sum = 1.0 / 6227020800;
    sum = sum * rest + 1.0 / 479001600;
    sum = sum * rest + 1.0 / 39916800;
    sum = sum * rest + 1.0 / 3628800;
    sum = sum * rest + 1.0 / 362880;
    sum = sum * rest + 1.0 / 40320;
    sum = sum * rest + 1.0 / 5040;
    sum = sum * rest + 1.0 / 720;
    sum = sum * rest + 1.0 / 120;
    sum = sum * rest + 1.0 / 24;
    sum = sum * rest + 1.0 / 6;
    sum = sum * rest + 0.5;
    sum = sum * (rest * rest) + rest + 1.0;
    uint64_t bits;
    std::memcpy(&bits, &turned, 8);
    bits = (bits + 1023) << 52;
    double scale;
    std::memcpy(&scale, &bits, 8);
    const double value = sum * scale;
    return x < -708 ? 0.0 : value;
}

// log(x) within 1 unit in the last place, for x of at least the smallest normal number. NaN stays NaN.
LINTX_INLINE double logarithm(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, 8);
    // x = 2^(raised - 1024) * y, with y from sqrt(1 / 2) to sqrt(2). Few processors shift or convert signed integers of
    // 64 bits in lanes, so `raised` is positive, and becomes a double as the lowest bits of 2^52 + raised.
    const uint64_t raised = (bits - 0x3fe6a09e667f3bcd + (1024ull << 52)) >> 52, counted = raised + (1075ull << 52);
    bits -= (raised << 52) - (1024ull << 52);
    double near, power;
    std::memcpy(&near, &bits, 8);
    std::memcpy(&power, &counted, 8);
    power -= 4503599627371520;  // 2^52 + 1024
    // The formula and the coefficients of fdlibm's log (Sun Microsystems).
    const double f = near - 1, s = f / (2 + f), square = s * s, half = 0.5 * f * f;
    double sum = 1.479819860511658591e-1;
    sum = sum * square + 1.531383769920937332e-1;
    sum = sum * square + 1.818357216161805012e-1;
    sum = sum * square + 2.222219843214978396e-1;
    sum = sum * square + 2.857142874366239149e-1;
    sum = sum * square + 3.999999999940941908e-1;
    sum = sum * square + 6.666666666666735130e-1;
    const double upper = power * 6.93147180369123816490e-1, lower = power * 1.90821492927058770002e-10;
    const double value = upper - ((half - (s * (half + sum * square) + lower)) - f);
    return x == x ? value : x;
}

// The error function within 1.5e-7 (Abramowitz and Stegun 7.1.26).
LINTX_INLINE float error_function(float x) {
    const float magnitude = std::fabs(x);
    const float t = 1 / (1 + 0.3275911f * magnitude);
    const float polynomial =
        t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    const float value = 1 - polynomial * exponential(-magnitude * magnitude);
    return x < 0 ? -value : value;
}

LINTX_INLINE float sigmoid(float x) { return 1 / (1 + exponential(-x)); }

// log(1 + x) within 2 units in the last place, for x from 0 to 1. NaN stays NaN.
LINTX_INLINE float log_one_plus(float x) {
    // The power series of 2 artanh(r), where r is at most 1/3.
    const float r = x / (2 + x), square = r * r;
    float sum = 1.0f / 13;
    sum = sum * square + 1.0f / 11;
    sum = sum * square + 1.0f / 9;
    sum = sum * square + 1.0f / 7;
    sum = sum * square + 1.0f / 5;
    sum = sum * square + 1.0f / 3;
    return 2 * (sum * square * r + r);
}

LINTX_INLINE float log_sigmoid(float x) { return (x < 0 ? x : 0) - log_one_plus(exponential(-std::fabs(x))); }

LINTX_INLINE float softplus(float x) { return -log_sigmoid(-x); }

// The sine and cosine of x within 2 units in the last place up to 10^5, and within 10^-7 up to 10^8. For larger
// numbers, whose angle is lost to rounding, both are still between -1 and 1. NaN stays NaN.
LINTX_INLINE void sine_cosine(float x, float& sine, float& cosine) {
    const double shift = 6755399441055744.0;  // 1.5 * 2^52; see `exponential`
    // Doubles keep enough digits of the remainder of x after whole quarter turns.
    const double turned = x * 0.63661977236758134 + shift;
    const double quarters = turned - shift;
    const double exact = (x - quarters * 1.5707963267341256) - quarters * 6.0771005065061922e-11;
    uint64_t bits;
    std::memcpy(&bits, &turned, 8);
    const uint32_t turns = static_cast<uint32_t>(bits);
    // The remainder exceeds an eighth of a turn only if x is huge.
    float rest = static_cast<float>(exact);
    rest = rest > 0.8f ? 0.8f : rest;
    rest = rest < -0.8f ? -0.8f : rest;
    const float square = rest * rest;
    // The coefficients of Cephes' sinf and cosf (Moshier).
    float s = -1.9515295891e-4f;
    s = s * square + 8.3321608736e-3f;
    s = s * square - 1.6666654611e-1f;
    s = s * square * rest + rest;
    float c = 2.443315711809948e-5f;
    c = c * square - 1.388731625493765e-3f;
    c = c * square + 4.166664568298827e-2f;
    c = c * square * square - 0.5f * square + 1.0f;
    const float first = turns & 1 ? c : s, second = turns & 1 ? s : c;
    sine = turns & 2 ? -first : first;
    cosine = (turns + 1) & 2 ? -second : second;
}

LINTX_INLINE float activate(float x, int64_t activation) {
    switch (activation) {
        case RELU: return x < 0 ? 0 : x;  // NaN stays NaN
        case GELU: return 0.5f * x * (1 + error_function(x * 0.70710678f));
        case SILU: return x * sigmoid(x);
        default: return x;
    }
}

// tanh(x) within a few units in the last place. Near 0 it uses the polynomial of Cephes' tanhf, because
// 1 - 2 / (exp(2x) + 1) loses digits there.
LINTX_INLINE float hyperbolic_tangent(float x) {
    const float magnitude = std::fabs(x), square = x * x;
    const float tail = 1 - 2 / (exponential(2 * magnitude) + 1);
    float sum = -5.70498872745e-3f;
    sum = sum * square + 2.06390887954e-2f;
    sum = sum * square - 5.37397155531e-2f;
    sum = sum * square + 1.33314422036e-1f;
    sum = sum * square - 3.33332819422e-1f;
    const float near = sum * square * x + x;
    return magnitude < 0.625f ? near : x < 0 ? -tail : tail;
}

}  // namespace
