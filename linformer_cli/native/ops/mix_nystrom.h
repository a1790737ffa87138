// Nystrom attention without its convolution: y = softmax(q k~^T) Z b. b_i is the average of the values, weighted by
// exp(q~_i . k). The landmarks k~ and q~ include the factor of the scores.
//
// State of each head: averages [m, V]; the largest score so far, and the total weight relative to this score, each [m].
// Constants of each head: landmark keys [K, m], landmark queries [K, m] and Z [m, m]. Integers: m.
#pragma once

#include <cstdint>
#include <cstring>

#include "../maths.h"
#include "../program.h"
#include "rows.h"
#include "sums.h"

namespace {

// out [m] <- x [K] times a matrix [K, m].
inline void multiply_row(int64_t K, int64_t m, const float* x, const float* matrix, float* out) {
    std::memset(out, 0, m * sizeof(float));
    add_rows(K, m, x, matrix, m, out);
}

void mix_nystrom(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width, m = mix.integer(0);
    const Part parts[] = {{0, m * V}, {1, m}, {2, m}};
    for_heads(mix, parts, m * (2 * K + m + V), [&](int64_t row, int64_t head, float** state) {
        float *scores = workspace<Mix>(4 * m), *shares = scores + m, *gates = shares + m, *mixed = gates + m;
        float *most = state[1], *total = state[2], *y = mix.output(row, head);
        multiply_row(K, m, mix.query(row, head), mix.own<float>(3, row, head, K * m), mixed);
        float largest = mixed[0];
        for (int64_t i = 1; i < m; i++) largest = mixed[i] > largest ? mixed[i] : largest;
        for (int64_t i = 0; i < m; i++) mixed[i] = exponential(mixed[i] - largest);
        const float inverse = 1 / sum_of(m, [&](int64_t i) { return mixed[i]; });
        for (int64_t i = 0; i < m; i++) mixed[i] *= inverse;
        multiply_row(m, m, mixed, mix.own<float>(5, row, head, m * m), gates);
        multiply_row(K, m, mix.key(row, head), mix.own<float>(4, row, head, K * m), scores);
        // There are several loops, because compilers do not vectorise a loop over so many arrays that may overlap.
        float *tops = shares, *before = mixed, *now = scores;
        for (int64_t i = 0; i < m; i++) tops[i] = scores[i] > most[i] ? scores[i] : most[i];
        for (int64_t i = 0; i < m; i++) before[i] = total[i] * exponential(most[i] - tops[i]);
        for (int64_t i = 0; i < m; i++) now[i] = exponential(scores[i] - tops[i]);
        for (int64_t i = 0; i < m; i++) most[i] = tops[i];
        for (int64_t i = 0; i < m; i++) total[i] = before[i] + now[i];
        for (int64_t i = 0; i < m; i++) shares[i] = now[i] / total[i];
        for (int64_t i = 0; i < m; i++) mixed[i] = before[i] / total[i];
        update_and_read<ROWS>(m, V, gates, shares, mix.value(row, head), mixed, state[0], y);
    });
}

}  // namespace
