// Gated linear attention. State: s [K, V] of each head. Buffers: the biases b of each head's gates. Integers: the
// number of gates of a head (K or 1), and whether there is an output gate. Reals: the scale of queries, the power of
// the gates.
#pragma once

#include <cstdint>

#include "../maths.h"
#include "../program.h"
#include "scaling.h"
#include "sums.h"

namespace {

void mix_gla(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width, gates = mix.integer(0);
    const bool gated = mix.integer(1);
    const float scale = static_cast<float>(op.real[0]), power = static_cast<float>(op.real[1]);
    const Part parts[] = {{0, K * V}};
    for_heads(mix, parts, K * V, [&](int64_t row, int64_t head, float** state) {
        float *query = workspace<Mix>(2 * K), *decay = query + K, *y = mix.output(row, head);
        const float *q = mix.query(row, head), *k = mix.key(row, head), *value = mix.value(row, head);
        const float* logits = mix.extra(row, head, gated ? gates + V : gates);
        const float* start = mix.own<float>(1, row, head, gates);
        for (int64_t i = 0; i < K; i++) query[i] = q[i] * scale;
        for (int64_t i = 0; i < gates; i++) decay[i] = exponential(log_sigmoid(logits[i] + start[i]) * power);
        if (gates == 1) update_and_read<ALL>(K, V, query, k, value, decay, state[0], y);
        else update_and_read<ROWS>(K, V, query, k, value, decay, state[0], y);
        scale_output(V, 1e-6f, gated ? logits + gates : nullptr, y);
    });
}

}  // namespace
