// Softmax attention over all positions so far. State: keys [capacity, K] and values [capacity, V] of each head. Integers:
// the capacity. Positions behind the end of a cache are not read, so TRY may write there and COMMIT has nothing to do.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../program.h"
#include "cache.h"

namespace {

void mix_softmax(const Pass& pass, const Operation& op) {
    if (pass.mode == COMMIT) return;
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width, capacity = mix.integer(0);
    const float scale = 1 / std::sqrt(static_cast<float>(K));
    const auto attend = [&](int64_t row, int64_t head) {
        const int64_t position = pass.position_of(row);
        float *keys = mix.own<float>(0, row, head, capacity * K), *values = mix.own<float>(1, row, head, capacity * V);
        std::memcpy(keys + position * K, mix.key(row, head), K * sizeof(float));
        std::memcpy(values + position * V, mix.value(row, head), V * sizeof(float));
        float *query = workspace<Mix>(K), *y = mix.output(row, head);
        const float* q = mix.query(row, head);
        for (int64_t i = 0; i < K; i++) query[i] = q[i] * scale;
        Average average;
        average.sum = y;
        for (int64_t j = 0; j < V; j++) y[j] = 0;
        average_rows(average, K, V, query, keys, values, 0, 1, position + 1);
        const float inverse = 1 / average.total;
        for (int64_t j = 0; j < V; j++) y[j] *= inverse;
    };
    const int64_t work = pass.rows * mix.heads * (K + V) * (pass.position + 1);
    if (pass.mode == STEP)
        pass.for_each(pass.rows * mix.heads, work, [&](int64_t index) { attend(index / mix.heads, index % mix.heads); });
    else
        pass.for_each(mix.heads, work, [&](int64_t head) {
            for (int64_t row = 0; row < pass.rows; row++) attend(row, head);
        });
}

}  // namespace
