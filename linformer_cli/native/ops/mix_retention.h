// Retention. Each coordinate of a key is multiplied by F factors. State: s [F K, V] of each head. Buffers: the decay of
// each head, and the factors [row, F] of each column. Sums decay at the first position of each row, so with rows of one
// position they decay at every position. Integers: F, row, whether there is an output gate. Reals: the scale of
// queries.
#pragma once

#include <cstdint>

#include "../program.h"
#include "scaling.h"
#include "sums.h"

namespace {

void mix_retention(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width, F = mix.integer(0), C = F * K;
    const float scale = static_cast<float>(op.real[0]);
    const Part parts[] = {{0, C * V}};
    for_heads(mix, parts, C * V, [&](int64_t row, int64_t head, float** state) {
        const int64_t column = pass.position_of(row) % mix.integer(1);
        const float *q = mix.query(row, head), *k = mix.key(row, head), *value = mix.value(row, head);
        const float* factors = mix.own<float>(2, row, column, F);
        float *query = workspace<Mix>(2 * C), *key = query + C, *y = mix.output(row, head);
        for (int64_t f = 0; f < F; f++) {
            for (int64_t i = 0; i < K; i++) query[f * K + i] = q[i] * scale * factors[f];
            for (int64_t i = 0; i < K; i++) key[f * K + i] = k[i] * factors[f];
        }
        if (column == 0) update_and_read<ALL>(C, V, query, key, value, mix.own<float>(1, row, head, 1), state[0], y);
        else update_and_read<KEEP>(C, V, query, key, value, nullptr, state[0], y);
        scale_output(V, 1e-6f, mix.integer(2) ? mix.extra(row, head, V) : nullptr, y);
    });
}

}  // namespace
