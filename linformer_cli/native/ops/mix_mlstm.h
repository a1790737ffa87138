// mLSTM. State: exp(-m) C [K, V], exp(-m) n [K] and m of each head. Buffers: the bias of each head's forget gate.
// Integers: whether the forget gate is a sigmoid (else exp), and whether outputs are divided by their root mean square.
// Reals: the scale of keys, the largest exponent of the denominator's bound.
#pragma once

#include <cmath>
#include <cstdint>

#include "../maths.h"
#include "../program.h"
#include "scaling.h"
#include "sums.h"

namespace {

void mix_mlstm(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width;
    const float scale = static_cast<float>(op.real[0]), most = static_cast<float>(op.real[1]);
    const Part parts[] = {{0, K * V}, {1, K}, {2, 1}};
    for_heads(mix, parts, K * V, [&](int64_t row, int64_t head, float** state) {
        float *key = workspace<Mix>(K), *y = mix.output(row, head), &m = *state[2];
        const float *k = mix.key(row, head), *gates = mix.extra(row, head, 2);
        const float forget = gates[1] + *mix.own<float>(3, row, head, 1);
        const float faded = (mix.integer(0) ? log_sigmoid(forget) : forget) + m;
        m = gates[0] > 0 ? gates[0] : 0;
        m = faded > m ? faded : m;
        const float decay = exponential(faded - m), weight = exponential(gates[0] - m) * scale;
        for (int64_t i = 0; i < K; i++) key[i] = k[i] * weight;
        const float found = std::fabs(
            update_and_read<ALL>(K, V, mix.query(row, head), key, mix.value(row, head), &decay, state[0], state[1], y));
        const float least = exponential(m < most ? -m : -most);
        divide(V, found < least ? least : found, y);
        if (mix.integer(1)) scale_output(V, 1e-5f, nullptr, y);
    });
}

}  // namespace
