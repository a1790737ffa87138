// Elementary functions in plain arithmetic that the compiler can vectorise, so that no fast-math flag is needed.
// They are always inlined: a loop that calls a function is not vectorised, and compilers inline less in a large file.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {  // local to the library that includes it: the compiler may inline all of it

// exp(x) within 2 units in the last place; 0 below the smallest normal number. NaN stays NaN.
[[gnu::always_inline]] inline float exponential(float x) {
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
    int32_t bits;
    std::memcpy(&bits, &turned, 4);
    // In two steps, because 2^128 is not a float.
    const int32_t whole = bits - 0x4b400000, half = whole >> 1;
    const int32_t first = (half + 127) << 23, second = (whole - half + 127) << 23;
    float scale, other;
    std::memcpy(&scale, &first, 4);
    std::memcpy(&other, &second, 4);
    const float value = sum * scale * other;
    return x < -87.3f ? 0.0f : value;
}

[[gnu::always_inline]] inline double exponential(double x) { return std::exp(x); }

// The error function within 1.5e-7 (Abramowitz and Stegun 7.1.26).
[[gnu::always_inline]] inline float error_function(float x) {
    const float magnitude = std::fabs(x);
    const float t = 1 / (1 + 0.3275911f * magnitude);
    const float polynomial =
        t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    const float value = 1 - polynomial * exponential(-magnitude * magnitude);
    return x < 0 ? -value : value;
}

[[gnu::always_inline]] inline float sigmoid(float x) { return 1 / (1 + exponential(-x)); }

enum Activation { RELU = LINTX_ACTIVATION_RELU, GELU = LINTX_ACTIVATION_GELU, SILU = LINTX_ACTIVATION_SILU };

[[gnu::always_inline]] inline float activate(float x, int64_t activation) {
    switch (activation) {
        case RELU: return x < 0 ? 0 : x;  // NaN stays NaN
        case GELU: return 0.5f * x * (1 + error_function(x * 0.70710678f));
        case SILU: return x * sigmoid(x);
        default: return x;
    }
}

// tanh(x) within a few units in the last place. Near 0 by the polynomial of Cephes' tanhf, because 1 - 2 / (exp(2x) + 1)
// cancels there.
[[gnu::always_inline]] inline float hyperbolic_tangent(float x) {
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
