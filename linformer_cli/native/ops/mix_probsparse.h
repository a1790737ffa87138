// ProbSparse attention: a query whose measure reaches the threshold of its block attends to all positions so far. The
// output of any other query is the mean of the values so far.
//
// State of each head: keys [capacity, K] and values [capacity, V]; the sum of all values [V]; the measures of the
// current block [block]; the threshold. Table: sampled positions, int32 [blocks, samples]. Integers: capacity, block, u
// (a threshold is the u-th largest measure of a block), samples, the format of the cache. Positions beyond the end of a
// cache are not read, so TRY may write there.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>

#include "../program.h"
#include "cache.h"

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

template <class Number>
void mix_probsparse(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width, capacity = mix.integer(0), block = mix.integer(1);
    const int64_t u = mix.integer(2), samples = mix.integer(3);
    const Part parts[] = {{2, V}, {3, block}, {4, 1}};
    for_heads(mix, parts, (K + V) * (pass.position + 1) / 2, [&](int64_t row, int64_t head, float** state) {
        const int64_t position = pass.position_of(row);
        float *total = state[0], *measures = state[1], *threshold = state[2], *y = mix.output(row, head);
        Number* keys = mix.own<Number>(0, row, head, capacity * K);
        Number* values = mix.own<Number>(1, row, head, capacity * V);
        const float *query = mix.query(row, head), *value = mix.value(row, head);
        const int32_t* sampled = mix.own<int32_t>(5, row, 0, 0) + position / block * samples;
        copy_numbers(K, mix.key(row, head), keys + position * K);
        copy_numbers(V, value, values + position * V);
        for (int64_t j = 0; j < V; j++) total[j] += value[j];
        const float measure = measure_query(K, query, keys, position, sampled, samples);
        if (pass.mode != COMMIT) {
            const Span all{0, 1, static_cast<int32_t>(position + 1)};
            if (measure >= *threshold) attend_spans(K, V, query, keys, values, &all, 1, y);
            else
                for (int64_t j = 0; j < V; j++) y[j] = total[j] / static_cast<float>(position + 1);
        }
        measures[position % block] = measure;
        if ((position + 1) % block == 0) *threshold = find_threshold(block, u, measures);
    });
}

}  // namespace
