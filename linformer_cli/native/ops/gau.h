// The gated attention unit. One head attends to all positions so far, with weights that are not normalised. Positions
// beyond the end of a cache are not read, so TRY may write there and COMMIT has nothing to do.
#pragma once

#include <cstdint>
#include <cstring>

#include "../operation.h"
#include "parts/gated_attention.h"
#include "parts/rows.h"

namespace {

struct Gau : CachedMix {
    // Scale and offset of keys, then of queries. Those of queries include the factor of the scores.
    const int64_t constants = buffer();
    const int64_t bias = buffer();  // by distance, in reverse
    const int64_t query = buffer(), weights = buffer();
    const int64_t capacity = integer();
    const bool bounded = integer();  // whether the activation is the Laplace function
    const int64_t format = integer();
    const float weight_scale = real();

    void check(Rules& rules) const {
        rules.need(H == 1 && capacity >= rules.T);
        check_cache(rules, capacity, format);
        rules.constant(constants, {4, K});
        rules.constant(bias, {capacity});
        rules.scratch(query, {K});
        rules.scratch(weights, {capacity});
    }

    void run() const { is_bfloat16(format) ? run_in<bfloat16>() : run_in<float>(); }

    template <class Number>
    void run_in() const {
        const auto k = [&](int64_t row) { return own<Number>(keys, row, 0, 0); };
        const auto v = [&](int64_t row) { return own<Number>(values, row, 0, 0); };
        pass.for_each(pass.rows, pass.rows * (4 * K + V), [&](int64_t row) {
            const int64_t position = pass.position_of(row);
            const float* scales = own<float>(constants, row, 0, 0);
            scale_and_offset(K, k_at(row, 0), scales, k(row) + position * K);
            scale_and_offset(K, k_at(row, 0), scales + 2 * K, own<float>(query, row, 0, 0));
            copy_numbers(V, v_at(row, 0), v(row) + position * V);
        });
        const int64_t length = pass.position + (pass.mode == STEP ? 1 : pass.rows),
                      blocks = (length + COLUMNS - 1) / COLUMNS;
        pass.for_each(pass.rows * blocks, pass.rows * length * K, [&](int64_t index) {
            const int64_t row = index / blocks, first = index % blocks * COLUMNS, end = pass.position_of(row) + 1;
            const int64_t count = end - first < COLUMNS ? end - first : COLUMNS;
            const float* biases = own<float>(bias, row, 0, 0) + capacity - end;
            weigh_keys(count, K, own<float>(query, row, 0, 0), k(row) + first * K, K, 0, biases + first, bounded,
                       weight_scale, own<float>(weights, row, 0, 0) + first);
        });
        for_columns(pass, V, length * V, [&](int64_t row, int64_t first, int64_t width) {
            float* y = y_at(row, 0) + first;
            std::memset(y, 0, width * sizeof(float));
            add_rows(pass.position_of(row) + 1, width, own<float>(weights, row, 0, 0), v(row) + first, V, y);
        });
    }
};
OPERATION("mix.gau", Gau, STATELESS);

}  // namespace
