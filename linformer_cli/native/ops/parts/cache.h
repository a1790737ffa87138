// Softmax over rows of a cache, in one pass over the cache. Numbers in the cache are float or bfloat16. Sums are float.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../../maths.h"
#include "lanes.h"

namespace {

// Rows `first`, `first + step` and so on.
struct Span {
    int32_t first, step, count;
};

// A running softmax average: the largest score so far, and the total weight and the weighted sum [V] relative to this
// score.
struct Average {
    float most, total;
    float* sum;
};

constexpr int64_t CACHE_ROWS = 64;

// scores[n] <- query . key of the rows place[n], for n below 4.
template <class Number>
inline void score_rows(int64_t K, const float* query, const Number* keys, const int32_t* place, float* scores) {
    const Number* key[4];
    for (int64_t n = 0; n < 4; n++) key[n] = keys + place[n] * K;
    floats sums[4] = {};
    int64_t i = 0;
    for (; i + LANES <= K; i += LANES) {
        const floats part = load(query + i);
        for (int64_t n = 0; n < 4; n++) sums[n] += part * load(key[n] + i);
    }
    four found = sum_lanes(sums[0], sums[1], sums[2], sums[3]);
    for (; i < K; i++) found += query[i] * four{key[0][i], key[1][i], key[2][i], key[3][i]};
    std::memcpy(scores, &found, sizeof found);
}

// Adds the rows with indices place[0 .. rows - 1], at most CACHE_ROWS, to the average. The cache is keys [., K] and
// values [., V].
template <class Number>
inline void average_rows(Average& average, int64_t K, int64_t V, const float* query, const Number* keys,
                         const Number* values, int32_t* place, int64_t rows) {
    // Rows of weight 0 fill the last group of four.
    const int64_t groups = (rows + 3) / 4;
    for (int64_t r = rows; r < groups * 4; r++) place[r] = place[rows - 1];
    float weights[CACHE_ROWS];
    for (int64_t group = 0; group < groups; group++) {
        // Values are read after all scores, so there is time to prefetch them.
        for (int64_t r = 4 * group; r < 4 * group + 4; r++) prefetch(V, values + place[r] * V);
        score_rows(K, query, keys, place + 4 * group, weights + 4 * group);
    }
    for (int64_t r = rows; r < CACHE_ROWS; r++) weights[r] = -3.0e38f;
    const float found = largest(CACHE_ROWS, weights), most = found > average.most ? found : average.most;
    const float kept = exponential(average.most - most);
    for (int64_t r = 0; r < CACHE_ROWS; r++) weights[r] = exponential(weights[r] - most);
    floats total = load(weights);
    for (int64_t r = LANES; r < CACHE_ROWS; r += LANES) total += load(weights + r);
    average.total = average.total * kept + sum_lanes(total);
    average.most = most;
    int64_t j = 0;
    for (; j + LANES <= V; j += LANES) {
        floats sums[4] = {load(average.sum + j) * kept};
        for (int64_t r = 0; r < groups * 4; r += 4)
            for (int64_t n = 0; n < 4; n++) sums[n] += weights[r + n] * load(values + place[r + n] * V + j);
        store(average.sum + j, (sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
    for (; j < V; j++) {
        float sum = average.sum[j] * kept;
        for (int64_t r = 0; r < rows; r++) sum += weights[r] * values[place[r] * V + j];
        average.sum[j] = sum;
    }
}

// y [V] <- the softmax average of the values [., V] in `count` spans, with scores query . key / sqrt(K).
template <class Number>
inline void attend_spans(int64_t K, int64_t V, const float* q, const Number* keys, const Number* values,
                         const Span* spans, int64_t count, float* y) {
    const float scale = 1 / std::sqrt(static_cast<float>(K));
    float* query = workspace<Span>(K);
    for (int64_t i = 0; i < K; i++) query[i] = q[i] * scale;
    for (int64_t j = 0; j < V; j++) y[j] = 0;
    Average average{-3.0e38f, 0, y};
    int32_t place[CACHE_ROWS];
    int64_t rows = 0;
    for (const Span* span = spans; span < spans + count; span++)
        for (int32_t i = 0; i < span->count; i++) {
            place[rows] = span->first + i * span->step;
            if (span->step > 1) prefetch(K, keys + place[rows] * K);  // hardware only prefetches neighbouring rows
            rows++;
            if (rows < CACHE_ROWS) continue;
            average_rows(average, K, V, query, keys, values, place, rows);
            rows = 0;
        }
    if (rows) average_rows(average, K, V, query, keys, values, place, rows);
    const float inverse = 1 / average.total;
    for (int64_t j = 0; j < V; j++) y[j] *= inverse;
}

}  // namespace
