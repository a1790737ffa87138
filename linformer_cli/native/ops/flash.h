// Mixed-chunk attention with one head: squared relu inside a chunk of positions, linear attention to earlier chunks.
//
// A position is written to the state only at the end of a pass. During the pass, its Z and values are read where they
// were computed, so that TRY changes nothing. If the state is bfloat16, they are first rounded there, so that positions
// of the same pass read the same numbers as later passes.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../operation.h"
#include "parts/gated_attention.h"
#include "parts/rows.h"

namespace {

struct Flash : CachedMix {           // the cache has Z and the values of the current chunk
    const int64_t state = buffer();  // s [K, V], the sum over finished chunks
    // Scale and offset of queries, keys, linear queries and linear keys. Those of queries include the factors of the
    // scores.
    const int64_t constants = buffer();
    const int64_t bias = buffer();  // by distance, in reverse
    const int64_t weights = buffer(), linear_query = buffer();
    const int64_t chunk = integer(), format = integer();
    const float weight_scale = real();

    void check(Rules& rules) const {
        rules.need(H == 1 && chunk >= 1);
        check_cache(rules, chunk, format);
        rules.state(state, {K, V});
        rules.constant(constants, {8, K});
        rules.constant(bias, {chunk});
        rules.scratch(weights, {chunk});
        rules.scratch(linear_query, {K});
    }

    void run() const { is_bfloat16(format) ? run_in<bfloat16>() : run_in<float>(); }

    template <class Number>
    void run_in() const {
        if (std::is_same<Number, bfloat16>::value && pass.mode != COMMIT)
            pass.for_each(pass.rows, pass.rows * (K + V), [&](int64_t row) {
                float* projected = pass.at<float>(inputs, row);
                float *z = projected + k_column, *value = projected + v_column;
                for (int64_t i = 0; i < K; i++) z[i] = Number(z[i]);
                for (int64_t i = 0; i < V; i++) value[i] = Number(value[i]);
            });
        if (pass.mode != COMMIT)
            pass.for_each(pass.rows, pass.rows * chunk * K / 2, [&](int64_t row) {
                const int64_t place = pass.position_of(row) % chunk;
                const float *z = k_at(row, 0), *scales = pass.at<float>(constants, row);
                float *query = workspace<Mix>(K), *weight = pass.at<float>(weights, row);
                scale_and_offset(K, z, scales, query);
                scale_and_offset(K, z, scales + 4 * K, pass.at<float>(linear_query, row));
                // Keys are z * scale + offset: q . (z * scale + offset) = (q * scale) . z + q . offset.
                const float start = dot(K, query, scales + 3 * K);
                for (int64_t i = 0; i < K; i++) query[i] *= scales[2 * K + i];
                const float* biases = pass.at<float>(bias, row) + chunk - 1 - place;
                for_parts<Number>(row, [&](int64_t index, int64_t count, const auto* z, int64_t stride, const auto*,
                                           int64_t) {
                    weigh_keys(count, K, query, z, stride, start, biases + index, false, weight_scale, weight + index);
                });
            });
        // Chunks that end in this pass change s. TRY changes a copy.
        const bool finishes = pass.position % chunk + (pass.mode == STEP ? 1 : pass.rows) >= chunk;
        const int64_t work = (finishes ? chunk : 1) * (K + chunk / 2) * V;
        if (finishes || pass.mode != COMMIT)
            for_columns(pass, V, work, [&](int64_t row, int64_t first, int64_t width) {
                float* s = pass.at<float>(state, row) + first;
                int64_t stride = V;
                if (pass.mode == TRY && finishes) {
                    float* copy = workspace<Pass>(K * width);
                    for (int64_t i = 0; i < K && row == 0; i++)
                        std::memcpy(copy + i * width, s + i * V, width * sizeof(float));
                    s = copy;
                    stride = width;
                }
                if (pass.mode != COMMIT) {
                    float *y = y_at(row, 0) + first, *weight = pass.at<float>(weights, row);
                    std::memset(y, 0, width * sizeof(float));
                    for_parts<Number>(
                        row, [&](int64_t index, int64_t count, const auto*, int64_t, const auto* v, int64_t v_stride) {
                            add_rows(count, width, weight + index, v + first, v_stride, y);
                        });
                    add_rows(K, width, pass.at<float>(linear_query, row), s, stride, y);
                }
                if ((pass.position_of(row) + 1) % chunk == 0) add_chunk<Number>(row, first, width, s, stride);
            });
        if (pass.mode == TRY) return;
        for (int64_t row = 0; row < pass.rows; row++) {
            const int64_t place = pass.position_of(row) % chunk;
            copy_numbers(K, k_at(row, 0), pass.at<Number>(keys, row) + place * K);
            copy_numbers(V, v_at(row, 0), pass.at<Number>(values, row) + place * V);
        }
    }

    // Calls body(index, count, Z, stride of Z, values, stride of values) twice for the chunk of a row, up to the row
    // itself: for the positions in the state, then for those of this pass.
    template <class Number, class Body>
    void for_parts(int64_t row, Body body) const {
        const int64_t position = pass.position_of(row);
        const int64_t start = position - position % chunk, known = start < pass.position ? pass.position - start : 0;
        const int64_t count = position + 1 - start - known, stride = pass.stride<float>(inputs);
        body(0, known, pass.at<Number>(keys, row), K, pass.at<Number>(values, row), V);
        body(known, count, k_at(row + 1 - count, 0), stride, v_at(row + 1 - count, 0), stride);
    }

    // Adds to s [K, width] the sum of k_j v_j^T over the chunk that ends at a row. Rows of s are `stride` apart; v_j
    // holds `width` columns of row j of the values, from `first` on.
    template <class Number>
    void add_chunk(int64_t row, int64_t first, int64_t width, float* s, int64_t stride) const {
        const float *scale = pass.at<float>(constants, row) + 6 * K, *offset = scale + K;
        float* k = workspace<Mix>(chunk);
        for (int64_t i = 0; i < K; i++)
            for_parts<Number>(
                row, [&](int64_t, int64_t count, const auto* z, int64_t z_stride, const auto* v, int64_t v_stride) {
                    for (int64_t n = 0; n < count; n++) k[n] = z[n * z_stride + i] * scale[i] + offset[i];
                    add_rows(count, width, k, v + first, v_stride, s + i * stride);
                });
    }
};
OPERATION("mix.flash", Flash, STATEFUL);

}  // namespace
