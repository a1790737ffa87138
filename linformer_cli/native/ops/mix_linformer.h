// Linformer: softmax attention over the projected rows of finished blocks and the exact positions of the unfinished
// block. A finished block is replaced by its projection.
// State of each head: a stack of keys [capacity, K] and values [capacity, V]. Shared: the projections [H or 1, rank,
// block] of keys and of values. Integers: capacity, rank, block, the number of projections.
#pragma once

#include <cstdint>
#include <cstring>

#include "../program.h"
#include "cache.h"

namespace {

// Replaces x [block, width] by projection [rank, block] x.
inline void project_block(int64_t rank, int64_t block, int64_t width, const float* projection, float* x) {
    float* rows = workspace<Mix>(rank * width);
    for (int64_t r = 0; r < rank; r++) {
        float* y = rows + r * width;
        for (int64_t i = 0; i < width; i++) y[i] = 0;
        for (int64_t j = 0; j < block; j++) {
            const float weight = projection[r * block + j];
            for (int64_t i = 0; i < width; i++) y[i] += weight * x[j * width + i];
        }
    }
    std::memcpy(x, rows, rank * width * sizeof(float));
}

void mix_linformer(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width, capacity = mix.integer(0), rank = mix.integer(1);
    const int64_t block = mix.integer(2), projections = mix.integer(3);
    const auto advance = [&](int64_t row, int64_t head) {
        float *keys = mix.own<float>(0, row, head, capacity * K), *values = mix.own<float>(1, row, head, capacity * V);
        const int64_t inside = pass.position_of(row) % block, first = pass.position_of(row) / block * rank;
        const int64_t last = first + inside, projection = projections > 1 ? head : 0;
        std::memcpy(keys + last * K, mix.key(row, head), K * sizeof(float));
        std::memcpy(values + last * V, mix.value(row, head), V * sizeof(float));
        const Span all{0, 1, static_cast<int32_t>(last + 1)};
        if (pass.mode != COMMIT) attend_spans(K, V, mix.query(row, head), keys, values, &all, 1, mix.output(row, head));
        if (inside + 1 < block) return;
        project_block(rank, block, K, mix.own<float>(2, 0, projection, rank * block), keys + first * K);
        project_block(rank, block, V, mix.own<float>(3, 0, projection, rank * block), values + first * V);
    };
    const int64_t inside = pass.position % block, first = pass.position / block * rank;
    const int64_t work = pass.rows * mix.heads * (K + V) * (first + inside);
    if (pass.mode == STEP)
        return pass.for_each(pass.rows * mix.heads, work,
                             [&](int64_t index) { advance(index / mix.heads, index % mix.heads); });
    pass.for_each(mix.heads, work, [&](int64_t head) {
        // If the guesses are wrong, the unfinished block is still needed. All rows that may be overwritten are
        // restored.
        float *keys = mix.own<float>(0, 0, head, capacity * K) + first * K;
        float *values = mix.own<float>(1, 0, head, capacity * V) + first * V, *kept = workspace<Pass>(inside * (K + V));
        const bool restore = pass.mode == TRY && inside + pass.rows >= block;
        if (restore) {
            std::memcpy(kept, keys, inside * K * sizeof(float));
            std::memcpy(kept + inside * K, values, inside * V * sizeof(float));
        }
        for (int64_t row = 0; row < pass.rows; row++) advance(row, head);
        if (restore) {
            std::memcpy(keys, kept, inside * K * sizeof(float));
            std::memcpy(values, kept + inside * K, inside * V * sizeof(float));
        }
    });
}

}  // namespace
