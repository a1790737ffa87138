// The pass over a state s [K, V] that updates it and reads it while it is in the processor's registers.
#pragma once

#include <cstdint>

#include "lanes.h"

namespace {

// The factors of the rows of a state: none, one factor [K] for each row, or one factor [1] for all rows.
enum Decay { KEEP, DECAY_ROWS, DECAY_ALL };

// `old` of row i times the row's factor.
template <int DECAY, class A>
inline A decayed(A old, const float* decay, int64_t i) {
    if (DECAY == KEEP) return old;
    return old * decay[DECAY == DECAY_ALL ? 0 : i];
}

// For each of the K rows: s <- decay s + key value^T. Then out [V] <- query^T s. The next head's state follows; it is prefetched, because hardware prefetching stops at the end of a page.
template <int DECAY>
inline void update_and_read(int64_t K, int64_t V, const float* query, const float* key, const float* value,
                            const float* decay, float* s, float* out) {
    int64_t j = 0;
    for (; j + LANES <= V; j += LANES) {
        const floats added = load(value + j);
        floats even = {}, odd = {};
        int64_t i = 0;
        for (; i + 2 <= K; i += 2) {
            float *first = s + i * V + j, *second = first + V;
            __builtin_prefetch(first + K * V, 1);
            __builtin_prefetch(second + K * V, 1);
            const floats one = decayed<DECAY>(load(first), decay, i) + key[i] * added;
            const floats two = decayed<DECAY>(load(second), decay, i + 1) + key[i + 1] * added;
            store(first, one);
            store(second, two);
            even += query[i] * one;
            odd += query[i + 1] * two;
        }
        if (i < K) {
            float* last = s + i * V + j;
            const floats one = decayed<DECAY>(load(last), decay, i) + key[i] * added;
            store(last, one);
            even += query[i] * one;
        }
        store(out + j, even + odd);
    }
    for (; j < V; j++) {
        float sum = 0;
        for (int64_t i = 0; i < K; i++) {
            float& place = s[i * V + j];
            place = decayed<DECAY>(place, decay, i) + key[i] * value[j];
            sum += query[i] * place;
        }
        out[j] = sum;
    }
}

// The same for a state with the sum z [K] of the keys, which is updated as well. Returns query . z.
template <int DECAY>
inline float update_and_read(int64_t K, int64_t V, const float* query, const float* key, const float* value,
                             const float* decay, float* s, float* z, float* out) {
    update_and_read<DECAY>(K, V, query, key, value, decay, s, out);
    for (int64_t i = 0; i < K; i++) z[i] = decayed<DECAY>(z[i], decay, i) + key[i];
    return dot(K, query, z);
}

// 1 / weight, or 0 if `weight` is 0. In double, because the reciprocal of the smallest floats overflows a float even if
// the quotient does not.
inline double reciprocal(double weight) { return weight == 0 ? 0 : 1 / weight; }

// y [V] <- y / weight, or 0 if `weight` is 0.
inline void divide(int64_t V, float weight, float* y) {
    const double scale = reciprocal(weight);
    for (int64_t j = 0; j < V; j++) y[j] = static_cast<float>(y[j] * scale);
}

}  // namespace
