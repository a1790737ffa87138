// Gated DeltaNet. State: s [K, V] of each head. Buffers: the bias of each head's gate (none without a gate). Reals: the
// largest beta.
#pragma once

#include <cmath>
#include <cstdint>

#include "../maths.h"
#include "../program.h"
#include "scaling.h"

namespace {

// SiLU(x) [K], scaled to length 1.
inline void silu_direction(int64_t K, const float* x, float* out) {
    for (int64_t i = 0; i < K; i++) out[i] = x[i] * sigmoid(x[i]);
    const float inverse = 1 / std::sqrt(dot(K, out, out) + 1e-6f);
    for (int64_t i = 0; i < K; i++) out[i] *= inverse;
}

// s <- alpha s + key written^T, where written = beta (value - alpha key^T s). Then y [V] <- query^T s. `overlap` is
// query . key. Going through s in columns of vectors keeps a column in the processor's cache until it is updated.
inline void replace_and_read(int64_t K, int64_t V, const float* query, const float* key, const float* value,
                             float alpha, float beta, float overlap, float* s, float* y) {
    int64_t j = 0;
    for (; j + LANES <= V; j += LANES) {
        floats held[2] = {}, read[2] = {};
        int64_t i = 0;
        for (; i + 2 <= K; i += 2)
            for (int64_t n = 0; n < 2; n++) {
                const floats old = load(s + (i + n) * V + j);
                __builtin_prefetch(s + (K + i + n) * V + j, 1);
                held[n] += key[i + n] * old;
                read[n] += query[i + n] * old;
            }
        if (i < K) {
            held[0] += key[i] * load(s + i * V + j);
            read[0] += query[i] * load(s + i * V + j);
        }
        const floats written = beta * (load(value + j) - alpha * (held[0] + held[1]));
        for (i = 0; i < K; i++) store(s + i * V + j, alpha * load(s + i * V + j) + key[i] * written);
        store(y + j, alpha * (read[0] + read[1]) + overlap * written);
    }
    for (; j < V; j++) {
        float held = 0, read = 0;
        for (int64_t i = 0; i < K; i++) held += key[i] * s[i * V + j];
        for (int64_t i = 0; i < K; i++) read += query[i] * s[i * V + j];
        const float written = beta * (value[j] - alpha * held);
        for (int64_t i = 0; i < K; i++) s[i * V + j] = alpha * s[i * V + j] + key[i] * written;
        y[j] = alpha * read + overlap * written;
    }
}

void mix_deltanet(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width;
    const bool gated = mix.buffer(1) >= 0;
    const float largest_beta = static_cast<float>(op.real[0]);
    const Part parts[] = {{0, K * V}};
    for_heads(mix, parts, 2 * K * V, [&](int64_t row, int64_t head, float** state) {
        float *query = workspace<Mix>(2 * K), *key = query + K, *y = mix.output(row, head);
        silu_direction(K, mix.query(row, head), query);
        silu_direction(K, mix.key(row, head), key);
        const float* extra = mix.extra(row, head, gated ? 2 : 1);
        const float alpha = gated ? sigmoid(extra[1] + *mix.own<float>(1, row, head, 1)) : 1;
        replace_and_read(K, V, query, key, mix.value(row, head), alpha, largest_beta * sigmoid(extra[0]),
                         dot(K, query, key), state[0], y);
        scale_output(V, 1e-5f, nullptr, y);
    });
}

}  // namespace
