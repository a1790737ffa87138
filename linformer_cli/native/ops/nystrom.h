// Nystrom attention without its convolution: y = softmax(q k~^T) Z b. b_i is the average of the values, weighted by
// exp(q~_i . k). The landmarks k~ and q~ include the factor of the scores.
#pragma once

#include <cstdint>
#include <cstring>

#include "../maths.h"
#include "../operation.h"
#include "parts/rows.h"
#include "parts/sums.h"

namespace {

// out [m] <- x [K] times a matrix [K, m].
inline void multiply_row(int64_t K, int64_t m, const float* x, const float* matrix, float* out) {
    std::memset(out, 0, m * sizeof(float));
    add_rows(K, m, x, matrix, m, out);
}

struct Nystrom : Mix {
    const int64_t averages = buffer();                  // b
    const int64_t largest = buffer();                   // the largest score so far
    const int64_t weights = buffer();                   // the total weight relative to this score
    const int64_t keys = buffer(), queries = buffer();  // the landmarks
    const int64_t inverse = buffer();                   // Z
    const int64_t m = integer();                        // the number of landmarks

    void check(Rules& rules) const {
        rules.need(m >= 1);
        rules.state(averages, {H, m, V});
        rules.state(largest, {H, m});
        rules.state(weights, {H, m});
        rules.constant(keys, {H, K, m});
        rules.constant(queries, {H, K, m});
        rules.constant(inverse, {H, m, m});
    }

    void run() const {
        const Part parts[] = {{averages, m * V}, {largest, m}, {weights, m}};
        for_heads(parts, m * (2 * K + m + V), [&](int64_t row, int64_t head, float** held) {
            float *scores = workspace<Mix>(4 * m), *shares = scores + m, *gates = shares + m, *mixed = gates + m;
            float *most = held[1], *total = held[2], *y = y_at(row, head);
            multiply_row(K, m, q_at(row, head), own<float>(keys, row, head, K * m), mixed);
            float top = mixed[0];
            for (int64_t i = 1; i < m; i++) top = mixed[i] > top ? mixed[i] : top;
            for (int64_t i = 0; i < m; i++) mixed[i] = exponential(mixed[i] - top);
            const float share = 1 / sum_of(m, [&](int64_t i) { return mixed[i]; });
            for (int64_t i = 0; i < m; i++) mixed[i] *= share;
            multiply_row(m, m, mixed, own<float>(inverse, row, head, m * m), gates);
            multiply_row(K, m, k_at(row, head), own<float>(queries, row, head, K * m), scores);
            // There are several loops, because compilers do not vectorise a loop over so many arrays that may overlap.
            float *tops = shares, *before = mixed, *now = scores;
            for (int64_t i = 0; i < m; i++) tops[i] = scores[i] > most[i] ? scores[i] : most[i];
            for (int64_t i = 0; i < m; i++) before[i] = total[i] * exponential(most[i] - tops[i]);
            for (int64_t i = 0; i < m; i++) now[i] = exponential(scores[i] - tops[i]);
            for (int64_t i = 0; i < m; i++) most[i] = tops[i];
            for (int64_t i = 0; i < m; i++) total[i] = before[i] + now[i];
            for (int64_t i = 0; i < m; i++) shares[i] = now[i] / total[i];
            for (int64_t i = 0; i < m; i++) mixed[i] = before[i] / total[i];
            update_and_read<ROWS>(m, V, gates, shares, v_at(row, head), mixed, held[0], y);
        });
    }
};
OPERATION("mix.nystrom", Nystrom, STATEFUL);

}  // namespace
