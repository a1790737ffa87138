// Linformer: softmax attention over the projected rows of finished blocks and the exact positions of the unfinished
// block. A finished block is replaced by its projection.
// State of each head: a stack of keys [capacity, K] and values [capacity, V]. Shared: the projections [H or 1, rank,
// block] of keys and of values. Integers: capacity, rank, block, the number of projections, the format of the stack.
#pragma once

#include <cstdint>

#include "../program.h"
#include "cache.h"

namespace {

// Replaces x [block, width] by projection [rank, block] x.
template <class Number>
inline void project_block(int64_t rank, int64_t block, int64_t width, const float* projection, Number* x) {
    float* rows = workspace<Mix>(rank * width);
    for (int64_t r = 0; r < rank; r++) {
        float* y = rows + r * width;
        for (int64_t i = 0; i < width; i++) y[i] = 0;
        for (int64_t j = 0; j < block; j++) {
            const float weight = projection[r * block + j];
            for (int64_t i = 0; i < width; i++) y[i] += weight * x[j * width + i];
        }
    }
    copy_numbers(rank * width, rows, x);
}

template <class Number>
void mix_linformer(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width, capacity = mix.integer(0), rank = mix.integer(1);
    const int64_t block = mix.integer(2), projections = mix.integer(3);
    const auto advance = [&](int64_t row, int64_t head) {
        Number* keys = mix.own<Number>(0, row, head, capacity * K);
        Number* values = mix.own<Number>(1, row, head, capacity * V);
        const int64_t inside = pass.position_of(row) % block, first = pass.position_of(row) / block * rank;
        const int64_t last = first + inside, projection = projections > 1 ? head : 0;
        copy_numbers(K, mix.key(row, head), keys + last * K);
        copy_numbers(V, mix.value(row, head), values + last * V);
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
        Number* keys = mix.own<Number>(0, 0, head, capacity * K) + first * K;
        Number* values = mix.own<Number>(1, 0, head, capacity * V) + first * V;
        Number* kept = reinterpret_cast<Number*>(workspace<Pass>(inside * (K + V)));
        const bool restore = pass.mode == TRY && inside + pass.rows >= block;
        if (restore) {
            copy_numbers(inside * K, keys, kept);
            copy_numbers(inside * V, values, kept + inside * K);
        }
        for (int64_t row = 0; row < pass.rows; row++) advance(row, head);
        if (restore) {
            copy_numbers(inside * K, kept, keys);
            copy_numbers(inside * V, kept + inside * K, values);
        }
    });
}

}  // namespace
