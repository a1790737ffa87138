// The gated attention unit. One head attends to all positions so far, with weights that are not normalised.
//
// State: keys [capacity, K] and values [capacity, V]. Constants: scale and offset of keys, then of queries, each [K]
// (those of queries include the factor of the scores); the bias by distance [capacity] in reverse. Scratch: query [K],
// weights [capacity]. Integers: capacity, whether the activation is the Laplace function, the format of the cache.
// Reals: the factor of the weights. Positions beyond the end of a cache are not read, so TRY may write there and COMMIT
// has nothing to do.
#pragma once

#include <cstdint>
#include <cstring>

#include "../program.h"
#include "gated.h"
#include "rows.h"

namespace {

template <class Number>
void mix_gau(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width, capacity = mix.integer(0);
    const auto keys = [&](int64_t row) { return mix.own<Number>(0, row, 0, 0); };
    const auto values = [&](int64_t row) { return mix.own<Number>(1, row, 0, 0); };
    pass.for_each(pass.rows, pass.rows * (4 * K + V), [&](int64_t row) {
        const int64_t position = pass.position_of(row);
        const float* constants = mix.own<float>(2, row, 0, 0);
        scale_and_offset(K, mix.key(row, 0), constants, keys(row) + position * K);
        scale_and_offset(K, mix.key(row, 0), constants + 2 * K, mix.own<float>(4, row, 0, 0));
        copy_numbers(V, mix.value(row, 0), values(row) + position * V);
    });
    const int64_t length = pass.position + (pass.mode == STEP ? 1 : pass.rows), blocks = (length + BLOCK - 1) / BLOCK;
    pass.for_each(pass.rows * blocks, pass.rows * length * K, [&](int64_t index) {
        const int64_t row = index / blocks, first = index % blocks * BLOCK, end = pass.position_of(row) + 1;
        const int64_t count = end - first < BLOCK ? end - first : BLOCK;
        const float* bias = mix.own<float>(3, row, 0, 0) + capacity - end;
        weigh_keys(count, K, mix.own<float>(4, row, 0, 0), keys(row) + first * K, K, 0, bias + first,
                   mix.integer(1) != 0, static_cast<float>(op.real[0]), mix.own<float>(5, row, 0, 0) + first);
    });
    for_columns(pass, V, length * V, [&](int64_t row, int64_t first, int64_t width) {
        float* y = mix.output(row, 0) + first;
        std::memset(y, 0, width * sizeof(float));
        add_rows(pass.position_of(row) + 1, width, mix.own<float>(5, row, 0, 0), values(row) + first, V, y);
    });
}

}  // namespace
