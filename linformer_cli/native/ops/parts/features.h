// Feature maps from a query and a key [K] to features [C].
#pragma once

#include <cmath>
#include <cstdint>

#include "../../maths.h"
#include "lanes.h"
#include "sums.h"

namespace {

// The products q W and k W [C] of a query and a key [K] with one matrix W [K, C]. W is read only once.
inline void multiply_both(int64_t K, int64_t C, const float* matrix, const float* q, const float* k, float* query,
                          float* key) {
    int64_t c = 0;
    for (; c + 2 * LANES <= C; c += 2 * LANES) {
        floats sums[2][2] = {};
        for (int64_t i = 0; i < K; i++) {
            const floats left = load(matrix + i * C + c), right = load(matrix + i * C + c + LANES);
            sums[0][0] += q[i] * left;
            sums[0][1] += q[i] * right;
            sums[1][0] += k[i] * left;
            sums[1][1] += k[i] * right;
        }
        for (int64_t half = 0; half < 2; half++) store(query + c + half * LANES, sums[0][half]);
        for (int64_t half = 0; half < 2; half++) store(key + c + half * LANES, sums[1][half]);
    }
    for (; c + LANES <= C; c += LANES) {
        floats sums[2] = {};
        for (int64_t i = 0; i < K; i++) {
            const floats row = load(matrix + i * C + c);
            sums[0] += q[i] * row;
            sums[1] += k[i] * row;
        }
        store(query + c, sums[0]);
        store(key + c, sums[1]);
    }
    for (; c < C; c++) {
        query[c] = key[c] = 0;
        for (int64_t i = 0; i < K; i++) {
            query[c] += q[i] * matrix[i * C + c];
            key[c] += k[i] * matrix[i * C + c];
        }
    }
}

// All K (K + 1) / 2 products of two coordinates, with one weight for squares and another for the other products.
inline void multiply_pairs(int64_t K, const float* x, float square, float other, float* out) {
    for (int64_t i = 0; i < K; i++) {
        *out++ = x[i] * x[i] * square;
        for (int64_t j = i + 1; j < K; j++) *out++ = x[i] * x[j] * other;
    }
}

// The features of the map of products of two coordinates, or of the Taylor series of second order. This function and
// `bend` are not inlined, because linear.h is compiled for speed, also where space is scarce.
[[gnu::noinline]] inline void pair_features(int64_t K, bool taylor, const float* x, float* out) {
    const float scale = taylor ? 1 / std::sqrt(std::sqrt(static_cast<float>(K))) : 1, half = std::sqrt(0.5f);
    const float limit = 5.0859e7f;  // the fifth root of the largest float; see `Poly2` in feature_maps.py
    struct Scaled;
    float* scaled = workspace<Scaled>(K);
    for (int64_t i = 0; i < K; i++) {
        const float y = x[i] * scale, above = y < -limit ? -limit : y;
        scaled[i] = above > limit ? limit : above;
    }
    if (!taylor) return multiply_pairs(K, scaled, 1, std::sqrt(2.0f), out);
    *out++ = 1;
    for (int64_t i = 0; i < K; i++) *out++ = scaled[i];
    multiply_pairs(K, scaled, half, 1, out);
}

// x [C] <- relu(x + b) + offset, the end of the learned map.
[[gnu::noinline]] inline void bend(int64_t C, const float* b, float offset, float* x) {
    for (int64_t i = 0; i < C; i++) x[i] = feature(x[i] + b[i], RELU_MAP) + offset;
}

// x [K] divided by its length, times `factor` [K].
inline void scale_to_length(int64_t K, const float* x, const float* factor, float* out) {
    const float length = std::sqrt(dot(K, x, x)), inverse = 1 / (length < 1e-12f ? 1e-12f : length);
    for (int64_t i = 0; i < K; i++) out[i] = x[i] * inverse * factor[i];
}

// |x|^2 / 2 of a vector x [K] times K^(-1/4). The result is kept finite, because infinity minus infinity is NaN.
inline float half_square(int64_t K, const float* x) {
    const float squares = dot(K, x, x), limit = 8.5e37f;
    return (squares > limit ? limit : squares) * 0.5f / std::sqrt(static_cast<float>(K));
}

// Replaces the phases in the first D places of `out` by [sin, cos] / sqrt(D) [2 D].
inline void sine_features(int64_t D, float* out) {
    const float scale = 1 / std::sqrt(static_cast<float>(D));
    for (int64_t i = 0; i < D; i++) {
        float sine, cosine;
        sine_cosine(out[i], sine, cosine);
        out[i] = sine * scale;
        out[D + i] = cosine * scale;
    }
}

// Average with sine features of x W / sqrt(D), for rfa and Performer's trig map. The denominator is bounded below by a
// tenth of the total weight n of the keys.
//
// s, z and n are multiplied by `kept`, and the new key is added with weight `added`. Then y [V] is the query's average.
inline void average_by_sines(int64_t C, int64_t V, float* query, float* key, const float* value, float kept,
                             float added, float* s, float* z, float& n, float* y) {
    sine_features(C / 2, query);
    sine_features(C / 2, key);
    for (int64_t i = 0; i < C; i++) key[i] *= added;
    n = n * kept + added;
    const float weight = update_and_read<ALL>(C, V, query, key, value, &kept, s, z, y), least = 0.1f * n;
    divide(V, weight < least ? least : weight, y);
}

}  // namespace
