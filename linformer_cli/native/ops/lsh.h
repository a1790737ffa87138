// LSH attention: softmax over the last `window` positions with the same hash in any round. If there are no such
// positions, the output is the position's own value. Keys are queries scaled to length 1 / sqrt(K).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../operation.h"
#include "parts/cache.h"
#include "parts/lanes.h"
#include "parts/scaling.h"

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

struct Lsh : CachedMix {
    const int64_t rings = buffer();  // of positions, -1 where unused
    const int64_t rotations = buffer();
    const int64_t products = buffer();
    const int64_t marks = buffer();  // 0 between calls
    const int64_t capacity = integer(), rounds = integer(), buckets = integer(), window = integer();
    const int64_t format = integer();

    void check(Rules& rules) const {
        rules.need(capacity >= rules.T && rounds >= 1 && buckets >= 2 && window >= 1);
        check_cache(rules, capacity, format);
        rules.state(rings, {H, rounds, buckets, window}, Type::INT32);
        rules.need(rules.kept && rules.file.buffers[rings].initial == -1);
        rules.constant(rotations, {H, K, rounds, buckets / 2});
        rules.scratch(products, {H, rounds, buckets / 2}, Type::FLOAT64);
        rules.scratch(marks, {H, capacity}, Type::INT32);
    }

    void run() const { is_bfloat16(format) ? run_in<bfloat16>() : run_in<float>(); }

    template <class Number>
    void run_in() const {
        const int64_t half = buckets / 2;
        const float root = std::sqrt(static_cast<float>(K));
        const Part parts[] = {{rings, rounds * buckets * window}};
        for_heads(parts, rounds * (buckets * K + window * (K + V)), [&](int64_t row, int64_t head, float** held) {
            const int64_t position = pass.position_of(row);
            int32_t *cells = reinterpret_cast<int32_t*>(held[0]), *marked = own<int32_t>(marks, row, head, capacity);
            Number *keys = cached_keys<Number>(row, head, capacity),
                   *values = cached_values<Number>(row, head, capacity);
            float *query = workspace<Mix>(K), *y = y_at(row, head);
            const float *q = k_at(row, head), *value = v_at(row, head), factor = shrink_factor(K, q);
            for (int64_t i = 0; i < K; i++) query[i] = q[i] * factor;

            double* sums = own<double>(products, row, head, rounds * half);
            const float* factors = own<float>(rotations, row, head, K * rounds * half);
            for (int64_t n = 0; n < rounds * half; n++) sums[n] = 0;
            for (int64_t i = 0; i < K; i++)
                for (int64_t n = 0; n < rounds * half; n++)
                    sums[n] += static_cast<double>(query[i]) * factors[i * rounds * half + n];

            // Several rounds may find the same position; it is listed once. `average_rows` needs room for three more.
            int32_t* found = workspace<int32_t, int32_t>(rounds * window + 3);
            int64_t count = 0;
            for (int64_t round = 0; round < rounds; round++) {
                int32_t* ring = cells + (round * buckets + find_bucket(half, sums + round * half)) * window;
                for (int64_t n = 0; n < window; n++) {
                    // Only a file that lets two operations share a ring has positions above the capacity.
                    if (ring[n] < 0 || ring[n] >= capacity || marked[ring[n]]) continue;
                    marked[ring[n]] = 1;
                    found[count++] = ring[n];
                    __builtin_prefetch(keys + ring[n] * K);
                }
                *find_oldest(window, ring) = static_cast<int32_t>(position);
            }
            for (int64_t n = 0; n < count; n++) marked[found[n]] = 0;
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
};
OPERATION("mix.lsh", Lsh, STATEFUL);

}  // namespace
