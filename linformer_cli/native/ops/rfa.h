// Random feature attention, in which x is divided by its length.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../maths.h"
#include "../operation.h"
#include "parts/features.h"
#include "parts/sums.h"

namespace {

struct Rfa : Mix {
    const int64_t s = buffer(), z = buffer();
    const int64_t n = buffer();  // the total weight of the keys
    const int64_t sigma = buffer();
    const int64_t directions = buffer();  // W
    const int64_t C = integer();
    const bool gated = integer();

    void check(Rules& rules) const {
        rules.need(C >= 1 && C % 2 == 0);
        check_extra(rules, gated);
        rules.state(s, {H, C, V});
        rules.state(z, {H, C});
        rules.state(n, {H});
        rules.constant(sigma, {H, K});
        rules.constant(directions, {K, C / 2});
    }

    void run() const {
        const Part parts[] = {{s, C * V}, {z, C}, {n, 1}};
        for_heads(parts, C * V, [&](int64_t row, int64_t head, float** held) {
            float *query = workspace<Mix>(2 * (C + K)), *key = query + C, *q = key + C, *k = q + K;
            const float* factors = own<float>(sigma, row, head, K);
            scale_to_length(K, q_at(row, head), factors, q);
            scale_to_length(K, k_at(row, head), factors, k);
            multiply_both(K, C / 2, own<float>(directions, row, 0, 0), q, k, query, key);
            const float gate = gated ? std::min(*extra_at(row, head, 1), 64.0f) : 0;  // see rfa.py
            average_by_sines(C, V, query, key, v_at(row, head), gated ? sigmoid(gate) : 1, gated ? sigmoid(-gate) : 1,
                             held[0], held[1], *held[2], y_at(row, head));
        });
    }
};
OPERATION("mix.rfa", Rfa, STATEFUL);

}  // namespace
