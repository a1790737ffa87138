// Weighted sums of rows of a matrix, in one pass over the matrix.
#pragma once

#include <cstdint>

#include "lanes.h"

namespace {

// out [V] <- out + the sum of weights[n] * rows[n] for N rows, which are `stride` apart.
template <int64_t N, class Number>
inline void add_few_rows(int64_t V, const float* weights, const Number* rows, int64_t stride, float* out) {
    int64_t j = 0;
    for (; j + LANES <= V; j += LANES) {
        floats sum = load(out + j);
        for (int64_t n = 0; n < N; n++) {
            const Number* row = rows + n * stride + j;
            __builtin_prefetch(row + N * stride);
            sum += weights[n] * load(row);
        }
        store(out + j, sum);
    }
    for (; j < V; j++) {
        float sum = out[j];
        for (int64_t n = 0; n < N; n++) sum += weights[n] * rows[n * stride + j];
        out[j] = sum;
    }
}

// Does the same for `count` rows. Rows are added one by one, in order, so the result does not depend on how rows are
// divided among calls.
template <class Number>
inline void add_rows(int64_t count, int64_t V, const float* weights, const Number* rows, int64_t stride, float* out) {
    int64_t n = 0;
    for (; n + 8 <= count; n += 8) add_few_rows<8>(V, weights + n, rows + n * stride, stride, out);
    for (; n < count; n++) add_few_rows<1>(V, weights + n, rows + n * stride, stride, out);
}

}  // namespace
