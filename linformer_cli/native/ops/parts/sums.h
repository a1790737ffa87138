// One pass over a state s [K, V]. It updates each part of s and reads it while it is in the processor's registers.
#pragma once

#include <cstdint>

#include "../../feature_maps.h"
#include "lanes.h"

namespace {

// The factors of the rows of a state: none, one factor [1] for all rows, or one factor [K] for each row.
enum Decay { KEEP, ALL, ROWS };

// `old`, an element of row i, times the factor of the row. Factors of rows are `step` apart, which is 0 or 1.
template <bool DECAYS, class A>
inline A decayed(A old, const float* decay, int64_t step, int64_t i) {
    return DECAYS ? old * decay[i * step] : old;
}

// `update_and_read` for N vectors of columns. Later rows and the next head's state, which follows them, are prefetched,
// because hardware prefetching stops at the end of a page.
template <bool DECAYS, int N>
inline void update_and_read_columns(int64_t K, int64_t V, const float* query, const float* key, const float* value,
                                    const float* decay, int64_t step, float* s, float* out) {
    const int64_t ahead = (K < 32 ? K : 32) * V;
    floats added[N], even[N] = {}, odd[N] = {};
    for (int64_t n = 0; n < N; n++) added[n] = load(value + n * LANES);
    int64_t i = 0;
    for (; i + 2 <= K; i += 2)
        for (int64_t n = 0; n < N; n++) {
            float *first = s + i * V + n * LANES, *second = first + V;
            __builtin_prefetch(first + ahead, 1);
            __builtin_prefetch(second + ahead, 1);
            const floats one = decayed<DECAYS>(load(first), decay, step, i) + key[i] * added[n];
            const floats two = decayed<DECAYS>(load(second), decay, step, i + 1) + key[i + 1] * added[n];
            store(first, one);
            store(second, two);
            even[n] += query[i] * one;
            odd[n] += query[i + 1] * two;
        }
    for (int64_t n = 0; n < N; n++) {
        if (i < K) {
            float* last = s + i * V + n * LANES;
            const floats one = decayed<DECAYS>(load(last), decay, step, i) + key[i] * added[n];
            store(last, one);
            even[n] += query[i] * one;
        }
        store(out + n * LANES, even[n] + odd[n]);
    }
}

// `update_and_read` with one copy of the code for all factors: the browser's engine has no space for two.
template <bool DECAYS>
inline void update_and_read_rows(int64_t K, int64_t V, const float* query, const float* key, const float* value,
                                 const float* decay, int64_t step, float* s, float* out) {
    int64_t j = 0;
    for (; j + 2 * LANES <= V; j += 2 * LANES)
        update_and_read_columns<DECAYS, 2>(K, V, query, key, value + j, decay, step, s + j, out + j);
    for (; j + LANES <= V; j += LANES)
        update_and_read_columns<DECAYS, 1>(K, V, query, key, value + j, decay, step, s + j, out + j);
    for (; j < V; j++) {
        float sum = 0;
        for (int64_t i = 0; i < K; i++) {
            float& place = s[i * V + j];
            place = decayed<DECAYS>(place, decay, step, i) + key[i] * value[j];
            sum += query[i] * place;
        }
        out[j] = sum;
    }
}

// For each of the K rows: s <- decay s + key value^T. Then out [V] <- query^T s.
template <int DECAY>
inline void update_and_read(int64_t K, int64_t V, const float* query, const float* key, const float* value,
                            const float* decay, float* s, float* out) {
    update_and_read_rows<DECAY != KEEP>(K, V, query, key, value, decay, DECAY == ROWS, s, out);
}

// Does the same for a state that also has the sum z [K] of the keys, which is updated too. Returns query . z.
template <int DECAY>
inline float update_and_read(int64_t K, int64_t V, const float* query, const float* key, const float* value,
                             const float* decay, float* s, float* z, float* out) {
    update_and_read<DECAY>(K, V, query, key, value, decay, s, out);
    for (int64_t i = 0; i < K; i++) z[i] = decayed<DECAY != KEEP>(z[i], decay, DECAY == ROWS, i) + key[i];
    return dot(K, query, z);
}

// y [V] <- y / weight, or 0 if `weight` is 0.
inline void divide(int64_t V, float weight, float* y) {
    const double scale = reciprocal(weight);
    for (int64_t j = 0; j < V; j++) y[j] = static_cast<float>(y[j] * scale);
}

}  // namespace
