// Gated linear attention.
#pragma once

#include <cstdint>

#include "../maths.h"
#include "../operation.h"
#include "parts/scaling.h"
#include "parts/sums.h"

namespace {

struct Gla : Mix {
    const int64_t state = buffer();   // s
    const int64_t start = buffer();   // the biases of the gates
    const int64_t gates = integer();  // of a head: K or 1
    const bool gated = integer();     // whether there is an output gate
    const float scale = real();       // of queries
    const float power = real();       // of the gates

    void check(Rules& rules) const {
        rules.need(gates == 1 || gates == K);
        check_extra(rules, gates + (gated ? V : 0));
        rules.state(state, {H, K, V});
        rules.constant(start, {H, gates});
    }

    void run() const {
        const Part parts[] = {{state, K * V}};
        for_heads(parts, K * V, [&](int64_t row, int64_t head, float** held) {
            float *query = workspace<Mix>(2 * K), *decay = query + K, *y = y_at(row, head);
            const float *q = q_at(row, head), *k = k_at(row, head), *value = v_at(row, head);
            const float* logits = extra_at(row, head, gated ? gates + V : gates);
            const float* biases = own<float>(start, row, head, gates);
            for (int64_t i = 0; i < K; i++) query[i] = q[i] * scale;
            for (int64_t i = 0; i < gates; i++) decay[i] = exponential(log_sigmoid(logits[i] + biases[i]) * power);
            if (gates == 1) update_and_read<ALL>(K, V, query, k, value, decay, held[0], y);
            else update_and_read<ROWS>(K, V, query, k, value, decay, held[0], y);
            scale_output(V, 1e-6f, gated ? logits + gates : nullptr, y);
        });
    }
};
OPERATION("mix.gla", Gla, STATEFUL);

}  // namespace
