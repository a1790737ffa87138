// The feature maps of sums: query and key [K] to features [C].
#pragma once

#include <cmath>
#include <cstdint>

#include "../maths.h"
#include "lanes.h"

namespace {

// x W [C] of a matrix W [K, C] and of the two vectors x [K] of a query and a key, so that W is read once.
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

// All products of two coordinates, of which there are K (K + 1) / 2, with weights for squares and other products.
inline void multiply_pairs(int64_t K, const float* x, float square, float other, float* out) {
    for (int64_t i = 0; i < K; i++) {
        *out++ = x[i] * x[i] * square;
        for (int64_t j = i + 1; j < K; j++) *out++ = x[i] * x[j] * other;
    }
}

// [sin, cos] / sqrt(D) [2 D] of the phases that are in the first D places of `out`.
inline void sine_features(int64_t D, float* out) {
    const float scale = 1 / std::sqrt(static_cast<float>(D));
    for (int64_t i = 0; i < D; i++) {
        float sine, cosine;
        sine_cosine(out[i], sine, cosine);
        out[i] = sine * scale;
        out[D + i] = cosine * scale;
    }
}

}  // namespace
