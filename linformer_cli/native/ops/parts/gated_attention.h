// Shared parts of the gated attentions. Their single head has wide values, so threads divide its columns.
#pragma once

#include <cmath>
#include <cstdint>

#include "../../maths.h"
#include "../../program.h"
#include "lanes.h"

namespace {

// to <- from * scale + offset, each [K]; scale [K] is followed by offset [K].
template <class Number>
inline void scale_and_offset(int64_t K, const float* from, const float* scale, Number* to) {
    for (int64_t i = 0; i < K; i++) to[i] = Number(from[i] * scale[i] + scale[K + i]);
}

inline float squared_relu(float x) { return x < 0 ? 0 : x * x; }  // NaN stays NaN

// (1 + erf((x - sqrt(1/2)) sqrt(2 pi))) / 2
inline float laplace(float x) { return 0.5f + 0.5f * error_function((x - 0.70710678f) * 2.50662827f); }

// weights[n] <- scale * activation(query . keys[n] + start + bias[n]) for `count` keys at intervals of `stride`.
template <class Number>
inline void weigh_keys(int64_t count, int64_t K, const float* query, const Number* keys, int64_t stride, float start,
                       const float* bias, bool bounded, float scale, float* weights) {
    for (int64_t n = 0; n < count; n++) {
        prefetch(K, keys + (n + 8) * stride);
        weights[n] = dot(K, query, keys + n * stride) + (start + bias[n]);
    }
    if (bounded)
        for (int64_t n = 0; n < count; n++) weights[n] = scale * laplace(weights[n]);
    else
        for (int64_t n = 0; n < count; n++) weights[n] = scale * squared_relu(weights[n]);
}

}  // namespace
