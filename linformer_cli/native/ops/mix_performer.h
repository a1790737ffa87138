// Performer attention with positive features exp(w . x - |x|^2 / 2), for D directions w, or for w and -w. Performer's
// relu map uses the code of linear attention. State: s [C, V], z [C] and the largest exponents c [C] of each head.
// Buffers: w [K, D], which includes the scale of x. Integers: C, D.
#pragma once

#include <cstdint>

#include "../maths.h"
#include "../program.h"
#include "features.h"
#include "sums.h"

namespace {

void mix_performer(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width, C = mix.integer(0), D = mix.integer(1);
    const Part parts[] = {{0, C * V}, {1, C}, {2, C}};
    for_heads(mix, parts, C * V, [&](int64_t row, int64_t head, float** state) {
        float *query = workspace<Mix>(3 * C), *key = query + C, *decay = key + C;
        float *c = state[2], *y = mix.output(row, head);
        const float *q = mix.query(row, head), *k = mix.key(row, head);
        multiply_both(K, D, mix.own<float>(3, row, 0, 0), q, k, query, key);
        for (int64_t i = D; i < C; i++) query[i] = -query[i - D];
        for (int64_t i = D; i < C; i++) key[i] = -key[i - D];
        const float half = half_square(K, k);
        for (int64_t i = 0; i < C; i++) {
            const float exponent = key[i] - half, before = c[i];
            c[i] = exponent > before ? exponent : before;
            decay[i] = exponential(before - c[i]);
            key[i] = exponential(exponent - c[i]);
        }
        // All features of the query are divided by the largest one; the factor cancels in the quotient.
        for (int64_t i = 0; i < C; i++) query[i] += c[i];
        const float most = largest(C, query);
        for (int64_t i = 0; i < C; i++) query[i] = exponential(query[i] - most);
        divide(V, update_and_read<ROWS>(C, V, query, key, mix.value(row, head), decay, state[0], state[1], y), y);
    });
}

}  // namespace
