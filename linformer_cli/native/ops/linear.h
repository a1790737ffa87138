// Linear attention, and Performer attention with its relu map.
#pragma once

#include <cmath>
#include <cstdint>

#include "../maths.h"
#include "../operation.h"
#include "parts/features.h"
#include "parts/sums.h"

namespace {

// Features of one vector x [K], for every map except the learned one.
inline void fixed_features(int64_t K, int64_t map, const float* x, float* out) {
    if (map == ELU_MAP) {
        for (int64_t i = 0; i < K; i++) out[i] = feature(x[i], ELU_MAP);
    } else if (map == RELU_MAP) {
        for (int64_t i = 0; i < K; i++) out[i] = feature(x[i], RELU_MAP);
    } else {
        pair_features(K, map == TAYLOR2_MAP, x, out);
    }
}

struct LinearAttention : Mix {
    const int64_t s = buffer(), z = buffer();
    // The learned map is relu(x W + b) + offset.
    const int64_t weight = buffer_or_none(), bias = buffer_or_none();
    const int64_t C = integer(), map = integer();
    const bool own_weights = integer();  // whether each head has its own W and b
    const float offset = real_or_none();

    void check(Rules& rules) const {
        rules.state(s, {H, C, V});
        rules.state(z, {H, C});
        if (map == LEARNED_MAP) {
            rules.constant(weight, {own_weights ? H : 1, K, C});
            rules.constant(bias, {own_weights ? H : 1, C});
        } else {
            const bool plain = map == ELU_MAP || map == RELU_MAP;
            const int64_t pairs = K * (K + 1) / 2;
            rules.need(C == (plain ? K : map == TAYLOR2_MAP ? 1 + K + pairs : pairs));
        }
    }

    void run() const {
        const Part parts[] = {{s, C * V}, {z, C}};
        for_heads(parts, C * V, [&](int64_t row, int64_t head, float** held) {
            float *query = workspace<Mix>(2 * C), *key = query + C, *y = y_at(row, head);
            const float *q = q_at(row, head), *k = k_at(row, head);
            if (map == LEARNED_MAP) {
                const int64_t matrix = own_weights ? head : 0;
                const float* b = own<float>(bias, row, matrix, C);
                multiply_both(K, C, own<float>(weight, row, matrix, K * C), q, k, query, key);
                bend(C, b, offset, query);
                bend(C, b, offset, key);
            } else {
                fixed_features(K, map, q, query);
                fixed_features(K, map, k, key);
            }
            divide(V, update_and_read<KEEP>(C, V, query, key, v_at(row, head), nullptr, held[0], held[1], y), y);
        });
    }
};
OPERATION("mix.linear", LinearAttention, STATEFUL);

}  // namespace
