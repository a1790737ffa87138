// One step of the delta rule: it erases what a state s [K, V] holds for a vector, adds new values, and reads s.
#pragma once

#include <cmath>
#include <cstdint>

#include "../../maths.h"
#include "lanes.h"
#include "sums.h"

namespace {

// p = a * s,    u = beta (value - erase^T p),    s <- p + key u^T,    y = query^T s
//
// With a second key, `value` belongs to that key instead: u = -beta erase^T p, and s <- p + key u^T + second value^T.
struct DeltaStep {
    const float *query, *erase;     // [K]; for ROWS, both are already times a
    const float *key, *value;       // [K], [V]
    const float* a;                 // the factors of the rows of s; see `Decay` of sums.h
    float beta, overlap;            // overlap: query . key, where the query is not times a
    const float* second = nullptr;  // [K]
    float second_overlap = 0;
};

// Updates s and sets y [V]. Going through s in columns of vectors keeps a column in the processor's cache until it is
// updated.
template <int DECAY, bool SECOND = false>
inline void replace_and_read(int64_t K, int64_t V, const DeltaStep& x, float* s, float* y) {
    const float *query = x.query, *erase = x.erase, *key = x.key, *second = x.second, *a = x.a;
    const float single = DECAY == ALL ? *a : 1;
    const auto faded = [=](auto sum) { return DECAY == ALL ? single * sum : sum; };
    int64_t j = 0;
    for (; j + LANES <= V; j += LANES) {
        floats held[2] = {}, read[2] = {};
        int64_t i = 0;
        for (; i + 2 <= K; i += 2)
            for (int64_t n = 0; n < 2; n++) {
                const floats old = load(s + (i + n) * V + j);
                __builtin_prefetch(s + (K + i + n) * V + j, 1);
                held[n] += erase[i + n] * old;
                read[n] += query[i + n] * old;
            }
        if (i < K) {
            held[0] += erase[i] * load(s + i * V + j);
            read[0] += query[i] * load(s + i * V + j);
        }
        const floats value = load(x.value + j), none = {};
        const floats u = x.beta * ((SECOND ? none : value) - faded(held[0] + held[1]));
        for (i = 0; i < K; i++) {
            floats row = decayed<true>(load(s + i * V + j), a, DECAY == ROWS, i) + key[i] * u;
            if (SECOND) row += second[i] * value;
            store(s + i * V + j, row);
        }
        floats out = faded(read[0] + read[1]) + x.overlap * u;
        if (SECOND) out += x.second_overlap * value;
        store(y + j, out);
    }
    for (; j < V; j++) {
        float held = 0, read = 0;
        for (int64_t i = 0; i < K; i++) held += erase[i] * s[i * V + j];
        for (int64_t i = 0; i < K; i++) read += query[i] * s[i * V + j];
        const float value = x.value[j], u = x.beta * ((SECOND ? 0 : value) - faded(held));
        for (int64_t i = 0; i < K; i++) {
            float row = decayed<true>(s[i * V + j], a, DECAY == ROWS, i) + key[i] * u;
            if (SECOND) row += second[i] * value;
            s[i * V + j] = row;
        }
        y[j] = faded(read) + x.overlap * u + (SECOND ? x.second_overlap * value : 0);
    }
}

}  // namespace
