// Mesa layer. State: s [K, V] and h [K, K] of each head. Buffers: the bias of each head's gate, and Lambda [K] of each
// head. Integers: the iterations of conjugate gradients.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "../maths.h"
#include "../program.h"
#include "rows.h"
#include "scaling.h"
#include "sums.h"

namespace {

// x [K], scaled to length 1.
inline void find_direction(int64_t K, const float* x, float* out) {
    const float factor = shrink_factor(K, x);
    for (int64_t i = 0; i < K; i++) out[i] = x[i] * factor;
    scale_to_direction(K, out);
}

inline float at_least_tiny(float x) { return x < FLT_MIN ? FLT_MIN : x; }  // NaN stays NaN

// x [K] <- near (h + Lambda)^-1 residual, for h [K, K]. `product` [K] holds h residual at first. `residual` is changed.
// Residuals are made orthogonal to all earlier ones; mesa.py says why.
inline void solve(int64_t K, int64_t iterations, const float* h, const float* penalty, float* residual, float* product,
                  float* x) {
    struct Units;
    float *units = workspace<Units>((iterations + 1) * K), *along = units + iterations * K;
    for (int64_t i = 0; i < K; i++) along[i] = residual[i];
    for (int64_t i = 0; i < K; i++) x[i] = 0;
    const float first = dot(K, residual, residual);
    float square = first;
    for (int64_t n = 0; n < iterations; n++) {
        if (n) {
            for (int64_t i = 0; i < K; i++) product[i] = 0;
            add_rows(K, K, along, h, K, product);
        }
        for (int64_t i = 0; i < K; i++) product[i] += penalty[i] * along[i];
        const float step = square / at_least_tiny(dot(K, along, product)), before = square;
        const float inverse = 1 / std::sqrt(at_least_tiny(square));
        for (int64_t i = 0; i < K; i++) x[i] += step * along[i];
        for (int64_t i = 0; i < K; i++) units[n * K + i] = residual[i] * inverse;
        for (int64_t i = 0; i < K; i++) residual[i] -= step * product[i];
        for (int64_t j = 0; j <= n; j++) {
            const float *unit = units + j * K, overlap = dot(K, unit, residual);
            for (int64_t i = 0; i < K; i++) residual[i] -= overlap * unit[i];
        }
        square = dot(K, residual, residual);
        if (square <= FLT_EPSILON * FLT_EPSILON * first) {
            square = 0;
            for (int64_t i = 0; i < K; i++) residual[i] = 0;
        }
        const float kept = square / at_least_tiny(before);
        for (int64_t i = 0; i < K; i++) along[i] = residual[i] + kept * along[i];
    }
}

void mix_mesa(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width, iterations = mix.integer(0);
    const Part parts[] = {{0, K * V}, {1, K * K}};
    for_heads(mix, parts, K * (V + iterations * (K + iterations)), [&](int64_t row, int64_t head, float** state) {
        float *query = workspace<Mix>(5 * K), *key = query + K, *written = key + K, *product = written + K;
        float* x = product + K;
        const float* gates = mix.extra(row, head, 2);
        const float beta = sigmoid(gates[0]), alpha = sigmoid(gates[1] + *mix.own<float>(2, row, head, 1));
        find_direction(K, mix.query(row, head), query);
        find_direction(K, mix.key(row, head), key);
        for (int64_t i = 0; i < K; i++) written[i] = beta * key[i];
        update_and_read<ALL>(K, K, query, written, key, &alpha, state[1], product);
        solve(K, iterations, state[1], mix.own<float>(3, row, head, K), query, product, x);
        update_and_read<ALL>(K, V, x, written, mix.value(row, head), &alpha, state[0], mix.output(row, head));
    });
}

}  // namespace
