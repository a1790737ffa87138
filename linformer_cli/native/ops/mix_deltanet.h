// Gated DeltaNet and Gated DeltaNet-2. State: s [K, V] of each head. Buffers: the biases of each head's decay gates
// (none without a decay). Integers: whether a head has K erase gates and not one, the number of write gates (0: its
// erase gate is the write gate), whether a head has K decay gates and not one. Reals: the largest erase gate.
#pragma once

#include <cstdint>

#include "../maths.h"
#include "../program.h"
#include "delta_rule.h"
#include "scaling.h"

namespace {

// SiLU(x) [K], scaled to length 1.
inline void silu_direction(int64_t K, const float* x, float* out) {
    for (int64_t i = 0; i < K; i++) out[i] = x[i] * sigmoid(x[i]);
    scale_to_direction(K, out);
}

// out [count] <- x * factor * sigmoid(gates) for `count` gates or a `single` one. Returns out.
inline float* apply_gates(int64_t count, const float* x, float factor, bool single, const float* gates, float* out) {
    if (single) {
        const float gate = factor * sigmoid(*gates);
        for (int64_t i = 0; i < count; i++) out[i] = x[i] * gate;
    } else {
        for (int64_t i = 0; i < count; i++) out[i] = x[i] * (factor * sigmoid(gates[i]));
    }
    return out;
}

void mix_deltanet(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width, writes = mix.integer(1);
    const int64_t erases = mix.integer(0) ? K : 1, decays = mix.buffer(1) < 0 ? 0 : mix.integer(2) ? K : 1;
    const float largest = static_cast<float>(op.real[0]);
    const Part parts[] = {{0, K * V}};
    for_heads(mix, parts, 2 * K * V, [&](int64_t row, int64_t head, float** state) {
        float *query = workspace<Mix>(4 * K + V), *key = query + K, *erase = key + K, *a = erase + K, *value = a + K;
        const float *gates = mix.extra(row, head, erases + writes + decays), *logits = gates + erases + writes;
        silu_direction(K, mix.query(row, head), query);
        silu_direction(K, mix.key(row, head), key);
        DeltaStep step{query, key, key, mix.value(row, head), a, 1, dot(K, query, key)};
        if (writes) {
            step.erase = apply_gates(K, key, largest, erases == 1, gates, erase);
            step.value = apply_gates(V, step.value, 1, writes == 1, gates + erases, value);
        } else {
            step.beta = largest * sigmoid(*gates);
        }
        *a = 1;
        const float* bias = decays ? mix.own<float>(1, row, head, decays) : nullptr;
        for (int64_t i = 0; i < decays; i++) a[i] = sigmoid(logits[i] + bias[i]);
        float* y = mix.output(row, head);
        if (decays > 1) {
            for (int64_t i = 0; i < K; i++) query[i] *= a[i];
            for (int64_t i = 0; i < K; i++) erase[i] = step.erase[i] * a[i];
            step.erase = erase;
            replace_and_read<ROWS>(K, V, step, state[0], y);
        } else {
            replace_and_read<ALL>(K, V, step, state[0], y);
        }
        scale_output(V, 1e-5f, nullptr, y);
    });
}

}  // namespace
