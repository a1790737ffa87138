// Softmax over rows of a cache, in one pass over the cache.
#pragma once

#include <cstdint>

#include "../maths.h"
#include "lanes.h"

namespace {

// A running softmax average: the largest score so far, and the total weight and weighted sum [V] relative to it.
struct Average {
    float most = -3.0e38f, total = 0;
    float* sum;
};

constexpr int64_t CACHE_ROWS = 32;

// Adds `count` rows to the average, from row `first` on, `step` rows apart; keys [., K] and values [., V]. `query` [K] is
// scaled already.
inline void average_rows(Average& average, int64_t K, int64_t V, const float* query, const float* keys, const float* values,
                         int64_t first, int64_t step, int64_t count) {
    for (int64_t start = 0; start < count; start += CACHE_ROWS) {
        const int64_t rows = count - start < CACHE_ROWS ? count - start : CACHE_ROWS, row = first + start * step;
        float weights[CACHE_ROWS], most = average.most;
        for (int64_t r = 0; r < rows; r++) weights[r] = dot(K, query, keys + (row + r * step) * K);
        for (int64_t r = 0; r < rows; r++) most = weights[r] > most ? weights[r] : most;
        const float kept = exponential(average.most - most);
        for (int64_t r = 0; r < rows; r++) weights[r] = exponential(weights[r] - most);
        float total = 0;
        for (int64_t r = 0; r < rows; r++) total += weights[r];
        average.total = average.total * kept + total;
        average.most = most;
        const float* value = values + row * V;
        int64_t j = 0;
        for (; j + LANES <= V; j += LANES) {
            floats sum = load(average.sum + j) * kept;
            for (int64_t r = 0; r < rows; r++) sum += weights[r] * load(value + r * step * V + j);
            store(average.sum + j, sum);
        }
        for (; j < V; j++) {
            float sum = average.sum[j] * kept;
            for (int64_t r = 0; r < rows; r++) sum += weights[r] * value[r * step * V + j];
            average.sum[j] = sum;
        }
    }
}

}  // namespace
