// mLSTM.
#pragma once

#include <cmath>
#include <cstdint>

#include "../maths.h"
#include "../operation.h"
#include "parts/scaling.h"
#include "parts/sums.h"

namespace {

struct Mlstm : Mix {
    const int64_t C = buffer(), n = buffer();  // exp(-m) C [K, V] and exp(-m) n [K] of each head
    const int64_t m = buffer();
    const int64_t forget_bias = buffer();
    const bool sigmoid_forget = integer();  // whether the forget gate is a sigmoid; else it is an exponential
    const bool normalised = integer();      // whether outputs are divided by their root mean square
    const float scale = real();             // of keys
    const float largest_exponent = real();  // of the denominator's bound

    void check(Rules& rules) const {
        check_extra(rules, 2);
        rules.state(C, {H, K, V});
        rules.state(n, {H, K});
        rules.state(m, {H});
        rules.constant(forget_bias, {H});
    }

    void run() const {
        const float most = largest_exponent;
        const Part parts[] = {{C, K * V}, {n, K}, {m, 1}};
        for_heads(parts, K * V, [&](int64_t row, int64_t head, float** held) {
            float *key = workspace<Mix>(K), *y = y_at(row, head), &m = *held[2];
            const float *k = k_at(row, head), *gates = extra_at(row, head, 2);
            const float forget = gates[1] + *own<float>(forget_bias, row, head, 1);
            const float faded = (sigmoid_forget ? log_sigmoid(forget) : forget) + m;
            m = gates[0] > 0 ? gates[0] : 0;
            m = faded > m ? faded : m;
            const float decay = exponential(faded - m), weight = exponential(gates[0] - m) * scale;
            for (int64_t i = 0; i < K; i++) key[i] = k[i] * weight;
            const float found = std::fabs(
                update_and_read<ALL>(K, V, q_at(row, head), key, v_at(row, head), &decay, held[0], held[1], y));
            const float least = exponential(m < most ? -m : -most);
            divide(V, found < least ? least : found, y);
            if (normalised) scale_output(V, 1e-5f, nullptr, y);
        });
    }
};
OPERATION("mix.mlstm", Mlstm, STATEFUL);

}  // namespace
