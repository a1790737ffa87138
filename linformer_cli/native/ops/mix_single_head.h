// Single-head attention. Keys are also the values: the vectors m of all positions so far.
//
// State: m [capacity, K]. Constants: gain and shift [K] of the LayerNorm of queries, with the gates of queries and
// keys; the gate of values [K]. Integers: capacity, the format of the cache. Positions beyond the end of a cache are
// not read, so TRY may write there and COMMIT has nothing to do.
#pragma once

#include <cstdint>

#include "../program.h"
#include "cache.h"
#include "join.h"

namespace {

template <class Number>
void mix_single_head(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width;
    const auto memory = [&](int64_t row) { return mix.own<Number>(0, row, 0, 0); };
    for (int64_t row = 0; row < pass.rows; row++)
        copy_numbers(K, mix.key(row, 0), memory(row) + pass.position_of(row) * K);
    pass.for_each(pass.rows, pass.rows * 2 * K * (pass.position + 1), [&](int64_t row) {
        float *query = workspace<Mix>(K), *y = mix.output(row, 0);
        const float* gate = mix.own<float>(3, row, 0, 0);
        layer_norm(K, mix.query(row, 0), mix.own<float>(1, row, 0, 0), mix.own<float>(2, row, 0, 0), query);
        const Span all{0, 1, static_cast<int32_t>(pass.position_of(row) + 1)};
        attend_spans(K, K, query, memory(row), memory(row), &all, 1, y);
        for (int64_t i = 0; i < K; i++) y[i] *= gate[i];
    });
}

}  // namespace
