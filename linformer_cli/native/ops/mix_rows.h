// Softmax attention over some rows of a cache. State: keys [capacity, K] and values [capacity, V] of each head.
//
// Position p is written to row p if p < fixed, else to row fixed + p % ring. It sees the rows of its spans in a shared
// table [T, H or 1, spans]; without a table it sees rows 0 .. p. Integers: capacity, fixed, ring, the number of heads
// in the table (0: no table), the number of spans, the format of the cache.
#pragma once

#include <cstdint>

#include "../program.h"
#include "cache.h"

namespace {

template <class Number>
void mix_rows(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width, capacity = mix.integer(0), fixed = mix.integer(1);
    const int64_t ring = mix.integer(2), table_heads = mix.integer(3), spans = mix.integer(4);
    struct Row {
        Number *key, *value;
    };
    const auto find = [&](int64_t row, int64_t head) {
        const int64_t position = pass.position_of(row), slot = position < fixed ? position : fixed + position % ring;
        return Row{mix.own<Number>(0, row, head, capacity * K) + slot * K,
                   mix.own<Number>(1, row, head, capacity * V) + slot * V};
    };
    const auto copy = [&](Row to, const auto* key, const auto* value) {
        copy_numbers(K, key, to.key);
        copy_numbers(V, value, to.value);
    };
    const auto find_spans = [&](int64_t position, int64_t head) {
        return pass.at<Span>(mix.buffer(2), 0) + (position * table_heads + head) * spans;
    };
    const auto attend = [&](int64_t row, int64_t head) {
        copy(find(row, head), mix.key(row, head), mix.value(row, head));
        const Number* keys = mix.own<Number>(0, row, head, capacity * K);
        const Number* values = mix.own<Number>(1, row, head, capacity * V);
        const int64_t position = pass.position_of(row);
        const Span all{0, 1, static_cast<int32_t>(position + 1)};
        const Span* seen = table_heads ? find_spans(position, table_heads > 1 ? head : 0) : &all;
        attend_spans(K, V, mix.query(row, head), keys, values, seen, table_heads ? spans : 1, mix.output(row, head));
    };
    int64_t seen = table_heads ? 0 : pass.position + 1;
    for (int64_t n = 0; n < spans; n++) seen += find_spans(pass.position, 0)[n].count;
    const int64_t work = pass.rows * mix.heads * (K + V) * seen;
    if (pass.mode == STEP)
        return pass.for_each(pass.rows * mix.heads, work,
                             [&](int64_t index) { attend(index / mix.heads, index % mix.heads); });
    pass.for_each(mix.heads, work, [&](int64_t head) {
        if (pass.mode == COMMIT) {
            for (int64_t row = 0; row < pass.rows; row++)
                copy(find(row, head), mix.key(row, head), mix.value(row, head));
            return;
        }
        // If the guesses are wrong, the old rows of the ring are still needed. All overwritten rows are restored.
        Number* kept = reinterpret_cast<Number*>(workspace<Row>(pass.rows * (K + V)));
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

}  // namespace
