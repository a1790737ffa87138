// Linear attention. State: s [K, V] and z [K] of each head. Integers: the feature map.
#pragma once

#include <cstdint>

#include "../maths.h"
#include "../program.h"
#include "sums.h"

namespace {

inline float linear_feature(float x, int64_t map) {
    if (map == LINTX_MAP_RELU) return x < 0 ? 0 : x;  // NaN stays NaN
    return x < 0 ? exponential(x) : x + 1;
}

void mix_linear(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width, map = mix.integer(0);
    const Part parts[] = {{0, K * V}, {1, K}};
    for_heads(mix, parts, K * V, [&](int64_t row, int64_t head, float** state) {
        float *query = workspace<Mix>(2 * K), *key = query + K, *z = state[1], *y = mix.output(row, head);
        const float *q = mix.query(row, head), *k = mix.key(row, head);
        for (int64_t i = 0; i < K; i++) query[i] = linear_feature(q[i], map);
        for (int64_t i = 0; i < K; i++) key[i] = linear_feature(k[i], map);
        for (int64_t i = 0; i < K; i++) z[i] += key[i];
        update_and_read<false>(K, V, query, key, mix.value(row, head), nullptr, state[0], y);
        const double scale = reciprocal(dot(K, query, z));
        for (int64_t j = 0; j < V; j++) y[j] = static_cast<float>(y[j] * scale);
    });
}

}  // namespace
