// Softmax attention over some rows of a cache, for the mechanisms softmax, sparse, logsparse, longformer, bigbird and
// long_short.
#pragma once

#include <cstdint>

#include "../operation.h"
#include "parts/cache.h"

namespace {

// Position p is written to row p if p < fixed, else to row fixed + p % ring. It sees the rows of its spans in a table;
// without a table it sees rows 0 .. p.
struct Softmax : CachedMix {
    const int64_t table = buffer_or_none();  // `Span`s
    const int64_t capacity = integer(), fixed = integer(), ring = integer();
    const int64_t table_heads = integer(), spans = integer();  // 0 heads: no table; 1: one for all heads
    const int64_t format = integer();

    void check(Rules& rules) const {
        const int64_t T = rules.T;
        rules.need(T <= fixed ? capacity >= T : ring >= 1 && capacity >= fixed + std::min(ring, T));
        check_cache(rules, capacity, format);
        if (!table_heads) {
            rules.need(capacity >= T && spans == 0);
            return;
        }
        const int64_t heads = table_heads > 1 ? std::max(table_heads, H) : 1;
        rules.constant(table, {T, heads, spans, 3}, Type::INT32);
        for (int64_t n = 0; rules.kept && n < T * heads * spans; n++) {
            const int32_t* span = rules.integers(table) + 3 * n;  // first, step, count
            const int64_t last = span[0] + (static_cast<int64_t>(span[2]) - 1) * span[1];
            const auto inside = [&](int64_t row) { return 0 <= row && row < capacity; };
            rules.need(span[2] == 0 || (span[2] > 0 && inside(span[0]) && inside(last)));
        }
    }

    void run() const { is_bfloat16(format) ? run_in<bfloat16>() : run_in<float>(); }

    template <class Number>
    void run_in() const {
        struct Row {
            Number *key, *value;
        };
        const auto find = [&](int64_t row, int64_t head) {
            const int64_t position = pass.position_of(row),
                          slot = position < fixed ? position : fixed + position % ring;
            return Row{cached_keys<Number>(row, head, capacity) + slot * K,
                       cached_values<Number>(row, head, capacity) + slot * V};
        };
        const auto copy = [&](Row to, const auto* key, const auto* value) {
            copy_numbers(K, key, to.key);
            copy_numbers(V, value, to.value);
        };
        const auto find_spans = [&](int64_t position, int64_t head) {
            return pass.at<Span>(table, 0) + (position * table_heads + head) * spans;
        };
        const auto attend = [&](int64_t row, int64_t head) {
            copy(find(row, head), k_at(row, head), v_at(row, head));
            const Number* k = cached_keys<Number>(row, head, capacity);
            const Number* v = cached_values<Number>(row, head, capacity);
            const int64_t position = pass.position_of(row);
            const Span all{0, 1, static_cast<int32_t>(position + 1)};
            const Span* seen = table_heads ? find_spans(position, table_heads > 1 ? head : 0) : &all;
            attend_spans(K, V, q_at(row, head), k, v, seen, table_heads ? spans : 1, y_at(row, head));
        };
        int64_t seen = table_heads ? 0 : pass.position + 1;
        for (int64_t n = 0; n < spans; n++) seen += find_spans(pass.position, 0)[n].count;
        const int64_t work = pass.rows * H * (K + V) * seen;
        if (pass.mode == STEP)
            return pass.for_each(pass.rows * H, work, [&](int64_t index) { attend(index / H, index % H); });
        pass.for_each(H, work, [&](int64_t head) {
            if (pass.mode == COMMIT) {
                for (int64_t row = 0; row < pass.rows; row++) copy(find(row, head), k_at(row, head), v_at(row, head));
                return;
            }
            // If the guesses are wrong, the old rows of the ring are still needed. All overwritten rows are restored.
            Number* kept = workspace<Row, Number>(pass.rows * (K + V));
            for (int64_t row = 0; row < pass.rows; row++, kept += K + V) {
                const Row old = find(row, head);
                copy(Row{kept, kept + K}, old.key, old.value);
                attend(row, head);
            }
            for (int64_t row = pass.rows - 1; row >= 0; row--) {
                kept -= K + V;
                copy(find(row, head), kept, kept + K);
            }
        });
    }
};
OPERATION("mix.rows", Softmax, STATEFUL);

}  // namespace
