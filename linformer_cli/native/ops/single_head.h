// Single-head attention. Keys are also the values: the vectors m of all positions so far. Positions beyond the end of a
// cache are not read, so TRY may write there and COMMIT has nothing to do.
#pragma once

#include <cstdint>

#include "../operation.h"
#include "join.h"
#include "parts/cache.h"

namespace {

struct SingleHead : Mix {
    const int64_t memory = buffer();                  // m
    const int64_t gain = buffer(), shift = buffer();  // of the LayerNorm of queries, with the gates of queries and keys
    const int64_t gate = buffer();                    // of values
    const int64_t capacity = integer(), format = integer();

    void check(Rules& rules) const {
        rules.need(H == 1 && K == V && capacity >= rules.T);
        rules.state(memory, {capacity, K}, type_of(format));
        for (const int64_t vector : {gain, shift, gate}) rules.constant(vector, {K});
    }

    void run() const { is_bfloat16(format) ? run_in<bfloat16>() : run_in<float>(); }

    template <class Number>
    void run_in() const {
        const auto cache = [&](int64_t row) { return own<Number>(memory, row, 0, 0); };
        for (int64_t row = 0; row < pass.rows; row++)
            copy_numbers(K, k_at(row, 0), cache(row) + pass.position_of(row) * K);
        pass.for_each(pass.rows, pass.rows * 2 * K * (pass.position + 1), [&](int64_t row) {
            float *query = workspace<Mix>(K), *y = y_at(row, 0);
            const float* factors = own<float>(gate, row, 0, 0);
            layer_norm(K, q_at(row, 0), own<float>(gain, row, 0, 0), own<float>(shift, row, 0, 0), query);
            const Span all{0, 1, static_cast<int32_t>(pass.position_of(row) + 1)};
            attend_spans(K, K, query, cache(row), cache(row), &all, 1, y);
            for (int64_t i = 0; i < K; i++) y[i] *= factors[i];
        });
    }
};
OPERATION("mix.single_head", SingleHead, STATELESS);

}  // namespace
