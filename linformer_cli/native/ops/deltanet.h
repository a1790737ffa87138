// Gated DeltaNet and Gated DeltaNet-2.
#pragma once

#include <cstdint>

#include "../maths.h"
#include "../operation.h"
#include "parts/delta_rule.h"
#include "parts/scaling.h"

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

struct Deltanet : Mix {
    const int64_t state = buffer();          // s
    const int64_t start = buffer_or_none();  // the biases of the decay gates; none without a decay
    const bool erases_apart = integer();     // whether a head has K erase gates and not one
    const int64_t writes = integer();        // the number of write gates; 0: the erase gate is the write gate
    const bool decays_apart = integer();     // whether a head has K decay gates and not one
    const float largest = real();            // the largest erase gate

    int64_t erases() const { return erases_apart ? K : 1; }
    int64_t decays() const { return start < 0 ? 0 : decays_apart ? K : 1; }

    void check(Rules& rules) const {
        rules.need(writes == 1 || writes == V || (writes == 0 && !erases_apart));
        check_extra(rules, erases() + writes + decays());
        rules.state(state, {H, K, V});
        if (start >= 0) rules.constant(start, {H, decays()});
    }

    void run() const {
        const int64_t erases = this->erases(), decays = this->decays();
        const Part parts[] = {{state, K * V}};
        for_heads(parts, 2 * K * V, [&](int64_t row, int64_t head, float** held) {
            float *query = workspace<Mix>(4 * K + V), *key = query + K, *erase = key + K, *a = erase + K,
                  *value = a + K;
            const float *gates = extra_at(row, head, erases + writes + decays), *logits = gates + erases + writes;
            silu_direction(K, q_at(row, head), query);
            silu_direction(K, k_at(row, head), key);
            DeltaStep step{query, key, key, v_at(row, head), a, 1, dot(K, query, key)};
            if (writes) {
                step.erase = apply_gates(K, key, largest, erases == 1, gates, erase);
                step.value = apply_gates(V, step.value, 1, writes == 1, gates + erases, value);
            } else {
                step.beta = largest * sigmoid(*gates);
            }
            *a = 1;
            const float* bias = decays ? own<float>(start, row, head, decays) : nullptr;
            for (int64_t i = 0; i < decays; i++) a[i] = sigmoid(logits[i] + bias[i]);
            float* y = y_at(row, head);
            if (decays > 1) {
                for (int64_t i = 0; i < K; i++) query[i] *= a[i];
                for (int64_t i = 0; i < K; i++) erase[i] = step.erase[i] * a[i];
                step.erase = erase;
                replace_and_read<ROWS>(K, V, step, held[0], y);
            } else {
                replace_and_read<ALL>(K, V, step, held[0], y);
            }
            scale_output(V, 1e-5f, nullptr, y);
        });
    }
};
OPERATION("mix.deltanet", Deltanet, STATEFUL);

}  // namespace
