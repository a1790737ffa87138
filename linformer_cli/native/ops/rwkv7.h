// RWKV-7.
#pragma once

#include <cstdint>

#include "../maths.h"
#include "../operation.h"
#include "parts/delta_rule.h"
#include "parts/scaling.h"

namespace {

struct Rwkv7 : Mix {
    const int64_t state = buffer();  // s
    // The biases of the decay and of the learning rate, and the factors xi, alpha and rho of the removal key, the
    // replacement key and the bonus.
    const int64_t parameters = buffer();

    void check(Rules& rules) const {
        check_extra(rules, 2 * K);
        rules.state(state, {H, K, V});
        rules.constant(parameters, {H, 5, K});
    }

    void run() const {
        const Part parts[] = {{state, K * V}};
        for_heads(parts, 3 * K * V, [&](int64_t row, int64_t head, float** held) {
            float *w = workspace<Mix>(5 * K), *query = w + K, *removal = query + K, *removed = removal + K;
            float *added = removed + K, *y = y_at(row, head);
            const float *r = q_at(row, head), *k = k_at(row, head), *value = v_at(row, head);
            const float *decay = extra_at(row, head, 2 * K), *rate = decay + K;
            const float *decay_bias = own<float>(parameters, row, head, 5 * K), *rate_bias = decay_bias + K;
            const float *xi = rate_bias + K, *alpha = xi + K, *rho = alpha + K;
            for (int64_t i = 0; i < K; i++) w[i] = exponential(-0.60653066f * sigmoid(decay[i] + decay_bias[i]));
            for (int64_t i = 0; i < K; i++) query[i] = r[i] * w[i];
            for (int64_t i = 0; i < K; i++) removal[i] = k[i] * xi[i];
            scale_to_direction(K, removal);
            for (int64_t i = 0; i < K; i++) removed[i] = sigmoid(rate[i] + rate_bias[i]);
            for (int64_t i = 0; i < K; i++) added[i] = k[i] * (1 + (removed[i] - 1) * alpha[i]);
            for (int64_t i = 0; i < K; i++) removed[i] *= removal[i];
            // The removal key reads the state before its decay, so it is not multiplied by w.
            const DeltaStep step{query, removal, removed, value, w, 1, dot(K, r, removed), added, dot(K, r, added)};
            replace_and_read<ROWS, true>(K, V, step, held[0], y);
            scale_output(V, 1e-5f, nullptr, y);
            for (int64_t i = 0; i < K; i++) query[i] = r[i] * rho[i];
            const float bonus = dot(K, query, added);
            for (int64_t j = 0; j < V; j++) y[j] += bonus * value[j];
        });
    }
};
OPERATION("mix.rwkv7", Rwkv7, STATEFUL);

}  // namespace
