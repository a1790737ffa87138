// ProbSparse attention: a query whose measure reaches the threshold of its block attends to all positions so far. The
// output of any other query is the mean of the values so far. Positions beyond the end of a cache are not read, so TRY
// may write there.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>

#include "../operation.h"
#include "parts/cache.h"

namespace {

// The largest product of the query with the keys of sampled positions and of its own position, minus their mean.
template <class Number>
inline float measure_query(int64_t K, const float* query, const Number* keys, int64_t position, const int32_t* sampled,
                           int64_t samples) {
    float most = dot(K, query, keys + position * K), total = most;
    int64_t count = 1;
    for (int64_t n = 0; n < samples; n++) {
        if (sampled[n] >= position) continue;
        const float score = dot(K, query, keys + sampled[n] * K);
        most = score > most ? score : most;
        total += score;
        count++;
    }
    const float measure = most - total / static_cast<float>(count);
    return measure == measure ? measure : INFINITY;  // a query with NaN attends, so its output is NaN too
}

// The u-th largest of `count` numbers, none of which is NaN.
inline float find_threshold(int64_t count, int64_t u, const float* measures) {
    float* sorted = workspace<Average>(count);
    std::copy(measures, measures + count, sorted);
    std::nth_element(sorted, sorted + u - 1, sorted + count, std::greater<float>());
    return sorted[u - 1];
}

struct Probsparse : CachedMix {
    const int64_t total = buffer();     // of all values
    const int64_t measures = buffer();  // of the current block
    const int64_t threshold = buffer();
    const int64_t sampled = buffer();  // positions
    const int64_t capacity = integer(), block = integer();
    const int64_t active = integer();  // a threshold is the measure of this rank in a block
    const int64_t samples = integer(), format = integer();

    void check(Rules& rules) const {
        if (!rules.need(capacity >= rules.T && active >= 1 && active <= block)) return;
        check_cache(rules, capacity, format);
        rules.state(total, {H, V});
        rules.state(measures, {H, block});
        rules.state(threshold, {H});
        const int64_t blocks = (rules.T + block - 1) / block;
        rules.constant(sampled, {blocks, samples}, Type::INT32);
        // Only sampled positions before the query's are read.
        for (int64_t n = 0; rules.kept && n < blocks * samples; n++) rules.need(rules.integers(sampled)[n] >= 0);
    }

    void run() const { is_bfloat16(format) ? run_in<bfloat16>() : run_in<float>(); }

    template <class Number>
    void run_in() const {
        const Part parts[] = {{total, V}, {measures, block}, {threshold, 1}};
        for_heads(parts, (K + V) * (pass.position + 1) / 2, [&](int64_t row, int64_t head, float** held) {
            const int64_t position = pass.position_of(row);
            float *sum = held[0], *found = held[1], *least = held[2], *y = y_at(row, head);
            Number *k = cached_keys<Number>(row, head, capacity), *v = cached_values<Number>(row, head, capacity);
            const float *query = q_at(row, head), *value = v_at(row, head);
            const int32_t* listed = own<int32_t>(sampled, row, 0, 0) + position / block * samples;
            copy_numbers(K, k_at(row, head), k + position * K);
            copy_numbers(V, value, v + position * V);
            for (int64_t j = 0; j < V; j++) sum[j] += value[j];
            const float measure = measure_query(K, query, k, position, listed, samples);
            if (pass.mode != COMMIT) {
                const Span all{0, 1, static_cast<int32_t>(position + 1)};
                if (measure >= *least) attend_spans(K, V, query, k, v, &all, 1, y);
                else
                    for (int64_t j = 0; j < V; j++) y[j] = sum[j] / static_cast<float>(position + 1);
            }
            found[position % block] = measure;
            if ((position + 1) % block == 0) *least = find_threshold(block, active, found);
        });
    }
};
OPERATION("mix.probsparse", Probsparse, STATEFUL);

}  // namespace
