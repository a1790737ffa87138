// LSH attention: softmax over the last `window` positions with the same hash in any round. If there are no such
// positions, the output is the position's own value.
//
// State of each head: keys [capacity, K], which are queries scaled to length 1 / sqrt(K); values [capacity, V]; rings
// of positions, int32 [rounds, buckets, window], -1 where unused.
// Constants of each head: rotations [K, rounds, buckets / 2].
// Scratch of each head: products, float64 [rounds, buckets / 2]; marks, int32 [capacity], which are 0 between calls.
// Integers: capacity, rounds, buckets, window, the format of the cache.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../program.h"
#include "cache.h"
#include "lanes.h"
#include "scaling.h"

namespace {

// The index of the largest number in the list of `count` products followed by their negatives.
inline int64_t find_bucket(int64_t count, const double* products) {
    int64_t most = 0, least = 0;
    for (int64_t n = 1; n < count; n++) {
        if (products[n] > products[most]) most = n;
        if (products[n] < products[least]) least = n;
    }
    return products[most] >= -products[least] ? most : least + count;
}

// The smallest position in a ring: the oldest one, or -1 in an unused place.
inline int32_t* find_oldest(int64_t window, int32_t* ring) {
    int32_t* oldest = ring;
    for (int64_t n = 1; n < window; n++)
        if (ring[n] < *oldest) oldest = ring + n;
    return oldest;
}

template <class Number>
void mix_lsh(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width, capacity = mix.integer(0);
    const int64_t rounds = mix.integer(1), buckets = mix.integer(2), window = mix.integer(3), half = buckets / 2;
    const float root = std::sqrt(static_cast<float>(K));
    const Part parts[] = {{2, rounds * buckets * window}};
    for_heads(mix, parts, rounds * (buckets * K + window * (K + V)), [&](int64_t row, int64_t head, float** state) {
        const int64_t position = pass.position_of(row);
        int32_t *rings = reinterpret_cast<int32_t*>(state[0]), *marks = mix.own<int32_t>(5, row, head, capacity);
        Number* keys = mix.own<Number>(0, row, head, capacity * K);
        Number* values = mix.own<Number>(1, row, head, capacity * V);
        float *query = workspace<Mix>(K), *y = mix.output(row, head);
        const float *q = mix.key(row, head), *value = mix.value(row, head), factor = shrink_factor(K, q);
        for (int64_t i = 0; i < K; i++) query[i] = q[i] * factor;

        double* products = mix.own<double>(4, row, head, rounds * half);
        const float* rotations = mix.own<float>(3, row, head, K * rounds * half);
        for (int64_t n = 0; n < rounds * half; n++) products[n] = 0;
        for (int64_t i = 0; i < K; i++)
            for (int64_t n = 0; n < rounds * half; n++)
                products[n] += static_cast<double>(query[i]) * rotations[i * rounds * half + n];

        // Several rounds may find the same position; it is listed once. `average_rows` needs room for three more.
        int32_t* found = reinterpret_cast<int32_t*>(workspace<int32_t>(rounds * window + 3));
        int64_t count = 0;
        for (int64_t round = 0; round < rounds; round++) {
            int32_t* ring = rings + (round * buckets + find_bucket(half, products + round * half)) * window;
            for (int64_t n = 0; n < window; n++) {
                // Only a file that lets two operations share a ring has positions above the capacity.
                if (ring[n] < 0 || ring[n] >= capacity || marks[ring[n]]) continue;
                marks[ring[n]] = 1;
                found[count++] = ring[n];
                __builtin_prefetch(keys + ring[n] * K);
            }
            *find_oldest(window, ring) = static_cast<int32_t>(position);
        }
        for (int64_t n = 0; n < count; n++) marks[found[n]] = 0;
        if (pass.mode == COMMIT) return;

        const float norm = std::sqrt(dot(K, query, query)) * root, scale = 1 / (norm < 1e-12f ? 1e-12f : norm);
        for (int64_t i = 0; i < K; i++) keys[position * K + i] = Number(query[i] * scale);
        copy_numbers(V, value, values + position * V);
        if (!count) {
            std::memcpy(y, value, V * sizeof(float));
            return;
        }
        std::memset(y, 0, V * sizeof(float));
        Average average{-3.0e38f, 0, y};
        for (int64_t n = 0; n < count; n += CACHE_ROWS) {
            const int64_t rows = count - n < CACHE_ROWS ? count - n : CACHE_ROWS;
            average_rows(average, K, V, query, keys, values, found + n, rows);
        }
        const float inverse = 1 / average.total;
        for (int64_t j = 0; j < V; j++) y[j] *= inverse;
    });
}

}  // namespace
