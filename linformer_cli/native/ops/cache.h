// Softmax over rows of a cache, in one pass over the cache.
#pragma once

#include <cmath>
#include <cstdint>

#include "../maths.h"
#include "lanes.h"

namespace {

// Rows `first`, `first + step` and so on.
struct Span {
    int32_t first, step, count;
};

// A running softmax average: the largest score so far, and the total weight and weighted sum [V] relative to it.
struct Average {
    float most, total;
    float* sum;
};

constexpr int64_t CACHE_ROWS = 32;

// Adds the rows number place[0 .. rows - 1], at most CACHE_ROWS, to the average; keys [., K] and values [., V].
inline void average_rows(Average& average, int64_t K, int64_t V, const float* query, const float* keys, const float* values,
                         const int32_t* place, int64_t rows) {
    float weights[CACHE_ROWS], most = average.most;
    for (int64_t r = 0; r < rows; r++) weights[r] = dot(K, query, keys + place[r] * K);
    for (int64_t r = 0; r < rows; r++) most = weights[r] > most ? weights[r] : most;
    const float kept = exponential(average.most - most);
    for (int64_t r = 0; r < rows; r++) weights[r] = exponential(weights[r] - most);
    float total = 0;
    for (int64_t r = 0; r < rows; r++) total += weights[r];
    average.total = average.total * kept + total;
    average.most = most;
    int64_t j = 0;
    for (; j + LANES <= V; j += LANES) {
        floats sum = load(average.sum + j) * kept;
        for (int64_t r = 0; r < rows; r++) sum += weights[r] * load(values + place[r] * V + j);
        store(average.sum + j, sum);
    }
    for (; j < V; j++) {
        float sum = average.sum[j] * kept;
        for (int64_t r = 0; r < rows; r++) sum += weights[r] * values[place[r] * V + j];
        average.sum[j] = sum;
    }
}

// y [V] <- the softmax average of the values [., V] in `count` spans, with scores query . key / sqrt(K).
inline void attend_spans(int64_t K, int64_t V, const float* q, const float* keys, const float* values, const Span* spans,
                         int64_t count, float* y) {
    const float scale = 1 / std::sqrt(static_cast<float>(K));
    float* query = workspace<Span>(K);
    for (int64_t i = 0; i < K; i++) query[i] = q[i] * scale;
    for (int64_t j = 0; j < V; j++) y[j] = 0;
    Average average{-3.0e38f, 0, y};
    int32_t place[CACHE_ROWS];
    int64_t rows = 0;
    for (const Span* span = spans; span < spans + count; span++)
        for (int32_t i = 0; i < span->count; i++) {
            place[rows++] = span->first + i * span->step;
            if (rows < CACHE_ROWS) continue;
            average_rows(average, K, V, query, keys, values, place, rows);
            rows = 0;
        }
    if (rows) average_rows(average, K, V, query, keys, values, place, rows);
    const float inverse = 1 / average.total;
    for (int64_t j = 0; j < V; j++) y[j] *= inverse;
}

}  // namespace
