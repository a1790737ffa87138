// Linear attention. State: s [C, V] and z [C] of each head. The learned map is relu(x W + b) + offset, with buffers W
// [K, C] and b [C]. Integers: C, the feature map, and whether each head has its own W and b. Reals: the offset.
#pragma once

#include <cmath>
#include <cstdint>

#include "../maths.h"
#include "../program.h"
#include "features.h"
#include "sums.h"

namespace {

// Features of one vector x [K], for every map except the learned one.
inline void fixed_features(int64_t K, int64_t map, const float* x, float* out) {
    if (map == ELU_MAP) {
        for (int64_t i = 0; i < K; i++) out[i] = feature(x[i], ELU_MAP);
    } else if (map == RELU_MAP) {
        for (int64_t i = 0; i < K; i++) out[i] = feature(x[i], RELU_MAP);
    } else {
        const bool taylor = map == LINTX_MAP_TAYLOR2;
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
}

void mix_linear(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width, C = mix.integer(0), map = mix.integer(1);
    const float offset = static_cast<float>(op.real[0]);
    const Part parts[] = {{0, C * V}, {1, C}};
    for_heads(mix, parts, C * V, [&](int64_t row, int64_t head, float** state) {
        float *query = workspace<Mix>(2 * C), *key = query + C, *y = mix.output(row, head);
        const float *q = mix.query(row, head), *k = mix.key(row, head);
        if (map == LINTX_MAP_LEARNED) {
            const int64_t own = mix.integer(2) ? head : 0;
            const float* bias = mix.own<float>(3, row, own, C);
            multiply_both(K, C, mix.own<float>(2, row, own, K * C), q, k, query, key);
            for (int64_t i = 0; i < C; i++) query[i] = feature(query[i] + bias[i], RELU_MAP) + offset;
            for (int64_t i = 0; i < C; i++) key[i] = feature(key[i] + bias[i], RELU_MAP) + offset;
        } else {
            fixed_features(K, map, q, query);
            fixed_features(K, map, k, key);
        }
        divide(V, update_and_read<KEEP>(C, V, query, key, mix.value(row, head), nullptr, state[0], state[1], y), y);
    });
}

}  // namespace
