// Mixed-chunk attention with one head: squared relu inside a chunk of C positions, linear attention to earlier chunks.
//
// State: Z [C, K] and values [C, V] of the current chunk, and s [K, V], the sum over finished chunks. Constants: scale
// and offset of queries, keys, linear queries and linear keys, each [K] (those of queries include the factors of the
// scores); the bias by distance [C] in reverse. Scratch: weights [C] and linear query [K]. Integers: C, the format of Z
// and the values. Reals: the factor of the weights.
//
// A position is written to the state only at the end of a pass. During the pass, its Z and values are read where they
// were computed, so that TRY changes nothing. If the state is bfloat16, they are first rounded there, so that positions
// of the same pass read the same numbers as later passes.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../program.h"
#include "gated.h"
#include "rows.h"

namespace {

// Calls body(index, count, Z, stride of Z, values, stride of values) twice for the chunk of a row, up to the row
// itself: for the positions in the state, then for those of this pass.
template <class Number, class Body>
void for_parts(const Mix& mix, int64_t row, int64_t chunk, Body body) {
    const Pass& pass = mix.pass;
    const int64_t K = mix.key_width, V = mix.value_width, position = pass.position_of(row);
    const int64_t start = position - position % chunk, known = start < pass.position ? pass.position - start : 0;
    const int64_t count = position + 1 - start - known, stride = pass.stride<float>(mix.op.buffer[0]);
    body(0, known, mix.own<Number>(0, row, 0, 0), K, mix.own<Number>(1, row, 0, 0), V);
    body(known, count, mix.key(row + 1 - count, 0), stride, mix.value(row + 1 - count, 0), stride);
}

// Adds to s [K, width] the sum of k_j v_j^T over the chunk that ends at a row. Rows of s are `stride` apart; v_j
// holds `width` columns of row j of the values, from `first` on.
template <class Number>
inline void add_chunk(const Mix& mix, int64_t row, int64_t chunk, int64_t first, int64_t width, float* s,
                      int64_t stride) {
    const int64_t K = mix.key_width;
    const float *scale = mix.own<float>(3, row, 0, 0) + 6 * K, *offset = scale + K;
    float* keys = workspace<Mix>(chunk);
    for (int64_t i = 0; i < K; i++)
        for_parts<Number>(
            mix, row, chunk,
            [&](int64_t, int64_t count, const auto* z, int64_t z_stride, const auto* values, int64_t value_stride) {
                for (int64_t n = 0; n < count; n++) keys[n] = z[n * z_stride + i] * scale[i] + offset[i];
                add_rows(count, width, keys, values + first, value_stride, s + i * stride);
            });
}

template <class Number>
void mix_flash(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width, chunk = mix.integer(0);
    if (std::is_same<Number, bfloat16>::value && pass.mode != COMMIT)
        pass.for_each(pass.rows, pass.rows * (K + V), [&](int64_t row) {
            float* projected = pass.at<float>(op.buffer[0], row);
            float *z = projected + op.integer[4], *value = projected + op.integer[5];
            for (int64_t i = 0; i < K; i++) z[i] = Number(z[i]);
            for (int64_t i = 0; i < V; i++) value[i] = Number(value[i]);
        });
    if (pass.mode != COMMIT)
        pass.for_each(pass.rows, pass.rows * chunk * K / 2, [&](int64_t row) {
            const int64_t place = pass.position_of(row) % chunk;
            const float *z = mix.key(row, 0), *constants = mix.own<float>(3, row, 0, 0);
            float *query = workspace<Mix>(K), *weights = mix.own<float>(5, row, 0, 0);
            scale_and_offset(K, z, constants, query);
            scale_and_offset(K, z, constants + 4 * K, mix.own<float>(6, row, 0, 0));
            // Keys are z * scale + offset: q . (z * scale + offset) = (q * scale) . z + q . offset.
            const float start = dot(K, query, constants + 3 * K);
            for (int64_t i = 0; i < K; i++) query[i] *= constants[2 * K + i];
            const float* bias = mix.own<float>(4, row, 0, 0) + chunk - 1 - place;
            for_parts<Number>(
                mix, row, chunk,
                [&](int64_t index, int64_t count, const auto* keys, int64_t stride, const auto*, int64_t) {
                    weigh_keys(count, K, query, keys, stride, start, bias + index, false,
                               static_cast<float>(op.real[0]), weights + index);
                });
        });
    // Chunks that end in this pass change s. TRY changes a copy.
    const bool finishes = pass.position % chunk + (pass.mode == STEP ? 1 : pass.rows) >= chunk;
    const int64_t work = (finishes ? chunk : 1) * (K + chunk / 2) * V;
    if (finishes || pass.mode != COMMIT)
        for_columns(pass, V, work, [&](int64_t row, int64_t first, int64_t width) {
            float* s = mix.own<float>(2, row, 0, 0) + first;
            int64_t stride = V;
            if (pass.mode == TRY && finishes) {
                float* copy = workspace<Pass>(K * width);
                for (int64_t i = 0; i < K && row == 0; i++)
                    std::memcpy(copy + i * width, s + i * V, width * sizeof(float));
                s = copy;
                stride = width;
            }
            if (pass.mode != COMMIT) {
                float *y = mix.output(row, 0) + first, *weights = mix.own<float>(5, row, 0, 0);
                std::memset(y, 0, width * sizeof(float));
                for_parts<Number>(
                    mix, row, chunk,
                    [&](int64_t index, int64_t count, const auto*, int64_t, const auto* values, int64_t value_stride) {
                        add_rows(count, width, weights + index, values + first, value_stride, y);
                    });
                add_rows(K, width, mix.own<float>(6, row, 0, 0), s, stride, y);
            }
            if ((pass.position_of(row) + 1) % chunk == 0) add_chunk<Number>(mix, row, chunk, first, width, s, stride);
        });
    if (pass.mode == TRY) return;
    for (int64_t row = 0; row < pass.rows; row++) {
        const int64_t place = pass.position_of(row) % chunk;
        copy_numbers(K, mix.key(row, 0), mix.own<Number>(0, row, 0, 0) + place * K);
        copy_numbers(V, mix.value(row, 0), mix.own<Number>(1, row, 0, 0) + place * V);
    }
}

}  // namespace
