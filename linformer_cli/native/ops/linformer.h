// Linformer: softmax attention over the projected rows of finished blocks and the exact positions of the unfinished
// block. A finished block is replaced by its projection, so the cache is a stack.
#pragma once

#include <cstdint>

#include "../operation.h"
#include "parts/cache.h"

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

struct Linformer : CachedMix {
    const int64_t key_projection = buffer(), value_projection = buffer();
    const int64_t capacity = integer(), rank = integer(), block = integer();
    const int64_t projections = integer();  // 1, or one for each head
    const int64_t format = integer();

    void check(Rules& rules) const {
        if (!rules.need(block >= 1)) return;
        const int64_t blocks = rules.T / block, rest = rules.T % block;
        // The exact positions of a block are in the cache before their projection replaces them.
        if (blocks) rules.need(capacity >= (blocks - 1) * rank + std::max(block, rank));
        rules.need(capacity >= blocks * rank + rest);
        check_cache(rules, capacity, format);
        for (const int64_t projection : {key_projection, value_projection})
            rules.constant(projection, {projections > 1 ? H : 1, rank, block});
    }

    void run() const { is_bfloat16(format) ? run_in<bfloat16>() : run_in<float>(); }

    template <class Number>
    void run_in() const {
        const auto advance = [&](int64_t row, int64_t head) {
            Number *key = cached_keys<Number>(row, head, capacity), *value = cached_values<Number>(row, head, capacity);
            const int64_t inside = pass.position_of(row) % block, first = pass.position_of(row) / block * rank;
            const int64_t last = first + inside, projection = projections > 1 ? head : 0;
            copy_numbers(K, k_at(row, head), key + last * K);
            copy_numbers(V, v_at(row, head), value + last * V);
            const Span all{0, 1, static_cast<int32_t>(last + 1)};
            if (pass.mode != COMMIT) attend_spans(K, V, q_at(row, head), key, value, &all, 1, y_at(row, head));
            if (inside + 1 < block) return;
            project_block(rank, block, K, own<float>(key_projection, 0, projection, rank * block), key + first * K);
            project_block(rank, block, V, own<float>(value_projection, 0, projection, rank * block), value + first * V);
        };
        const int64_t inside = pass.position % block, first = pass.position / block * rank;
        const int64_t work = pass.rows * H * (K + V) * (first + inside);
        if (pass.mode == STEP)
            return pass.for_each(pass.rows * H, work, [&](int64_t index) { advance(index / H, index % H); });
        pass.for_each(H, work, [&](int64_t head) {
            // If the guesses are wrong, the unfinished block is still needed. All rows that may be overwritten are
            // restored.
            Number* key = cached_keys<Number>(0, head, capacity) + first * K;
            Number* value = cached_values<Number>(0, head, capacity) + first * V;
            Number* kept = workspace<Pass, Number>(inside * (K + V));
            const bool restore = pass.mode == TRY && inside + pass.rows >= block;
            if (restore) {
                copy_numbers(inside * K, key, kept);
                copy_numbers(inside * V, value, kept + inside * K);
            }
            for (int64_t row = 0; row < pass.rows; row++) advance(row, head);
            if (restore) {
                copy_numbers(inside * K, kept, key);
                copy_numbers(inside * V, kept + inside * K, value);
            }
        });
    }
};
OPERATION("mix.linformer", Linformer, STATEFUL);

}  // namespace
