// The parts of a block that work on one vector: activations, and LayerNorm with the residual sum before it.
#pragma once

#include <cmath>
#include <cstdint>

namespace {  // local to the library that includes it: the compiler may inline all of it

// The error function within 1.5e-7 (Abramowitz and Stegun 7.1.26), in a form that the compiler can vectorise.
inline float error_function(float x) {
    float magnitude = std::fabs(x);
    float t = 1 / (1 + 0.3275911f * magnitude);
    float polynomial = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    float value = 1 - polynomial * std::exp(-magnitude * magnitude);
    return x < 0 ? -value : value;
}

inline float activation(float x, bool gelu) {
    return gelu ? 0.5f * x * (1 + error_function(x * 0.70710678f)) : (x > 0 ? x : 0);
}

// `pre`: x <- x + branch + bias and h <- LayerNorm(x); otherwise x <- LayerNorm(x + branch + bias) and h is x.
template <class T>
void join_row(int64_t D, float* x, const float* branch, const float* bias, const float* gain, const float* shift, T* h,
              bool pre) {
    if (branch)
        for (int64_t i = 0; i < D; i++) x[i] += branch[i] + bias[i];
    float total = 0, squares = 0;
    for (int64_t i = 0; i < D; i++) total += x[i];
    const float mean = total / D;
    for (int64_t i = 0; i < D; i++) squares += (x[i] - mean) * (x[i] - mean);
    const float inverse = 1 / std::sqrt(squares / D + 1e-5f);
    for (int64_t i = 0; i < D; i++) {
        const float normed = (x[i] - mean) * inverse * gain[i] + shift[i];
        h[i] = T(normed);
        if (!pre) x[i] = normed;
    }
}

}  // namespace
