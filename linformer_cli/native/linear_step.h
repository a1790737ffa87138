// One step of linear attention for one head.
#pragma once

#include <cstdint>

#include "feature_maps.h"
#include "products.h"

namespace {  // local to the library that includes it: the compiler may inline all of it

constexpr int64_t WIDEST_HEAD = LINTX_WIDEST_HEAD;

// One pass over the state, which is updated and read while it is in the L1 cache. `key` [K] and `value` [V] get the
// feature vector and the value that the state was updated with.
template <class T>
void mix_head(int64_t K, int64_t V, const float* q, const float* k, const float* v, const float* q_bias,
              const float* k_bias, const float* v_bias, float* s, float* z, float* key, float* value, T* y, int map) {
    float query[WIDEST_HEAD], numerator[WIDEST_HEAD];
    for (int64_t i = 0; i < K; i++) query[i] = feature(q[i] + q_bias[i], map);
    for (int64_t i = 0; i < K; i++) key[i] = feature(k[i] + k_bias[i], map);
    for (int64_t j = 0; j < V; j++) value[j] = v[j] + v_bias[j];
    for (int64_t j = 0; j < V; j++) numerator[j] = 0;
    float weight = 0;
    for (int64_t i = 0; i < K; i++) {
        z[i] += key[i];
        weight += query[i] * z[i];
    }
    for (int64_t i = 0; i < K; i++) {
        float* row = s + i * V;
        const float in = key[i], out = query[i];
        // Prefetch the next head's state: a head's state fills a page, and hardware prefetching stops at its end.
        for (int64_t j = 0; j < V; j += LANES) __builtin_prefetch(row + K * V + j, 1);
#pragma omp simd
        for (int64_t j = 0; j < V; j++) {
            const float sum = row[j] + in * value[j];
            row[j] = sum;
            numerator[j] += out * sum;
        }
    }
    const double scale = reciprocal(weight);
    for (int64_t j = 0; j < V; j++) y[j] = T(static_cast<float>(numerator[j] * scale));
}

// Only the state update of `mix_head`, bit for bit the same.
inline void add_to_state(int64_t K, int64_t V, const float* key, const float* value, float* s, float* z) {
    for (int64_t i = 0; i < K; i++) {
        z[i] += key[i];
        float* row = s + i * V;
        const float in = key[i];
#pragma omp simd
        for (int64_t j = 0; j < V; j++) row[j] += in * value[j];
    }
}

}  // namespace
