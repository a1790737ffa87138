// Mesa layer.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "../maths.h"
#include "../operation.h"
#include "parts/rows.h"
#include "parts/scaling.h"
#include "parts/sums.h"

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

struct Mesa : Mix {
    const int64_t s = buffer();  // [K, V] of each head
    const int64_t h = buffer();  // [K, K] of each head
    const int64_t gate_bias = buffer();
    const int64_t penalty = buffer();      // Lambda [K] of each head
    const int64_t iterations = integer();  // of conjugate gradients

    void check(Rules& rules) const {
        rules.need(iterations >= 1 && iterations <= K);
        check_extra(rules, 2);
        rules.state(s, {H, K, V});
        rules.state(h, {H, K, K});
        rules.constant(gate_bias, {H});
        rules.constant(penalty, {H, K});
    }

    void run() const {
        const Part parts[] = {{s, K * V}, {h, K * K}};
        for_heads(parts, K * (V + iterations * (K + iterations)), [&](int64_t row, int64_t head, float** held) {
            float *query = workspace<Mix>(5 * K), *key = query + K, *written = key + K, *product = written + K;
            float* x = product + K;
            const float* gates = extra_at(row, head, 2);
            const float beta = sigmoid(gates[0]), alpha = sigmoid(gates[1] + *own<float>(gate_bias, row, head, 1));
            find_direction(K, q_at(row, head), query);
            find_direction(K, k_at(row, head), key);
            for (int64_t i = 0; i < K; i++) written[i] = beta * key[i];
            update_and_read<ALL>(K, K, query, written, key, &alpha, held[1], product);
            solve(K, iterations, held[1], own<float>(penalty, row, head, K), query, product, x);
            update_and_read<ALL>(K, V, x, written, v_at(row, head), &alpha, held[0], y_at(row, head));
        });
    }
};
OPERATION("mix.mesa", Mesa, STATEFUL);

}  // namespace
