// RWKV-7. State: s [K, V] of each head. Buffers: the parameters [5, K] of each head: the biases of the decay and of the
// learning rate, and the factors xi, alpha and rho of the removal key, the replacement key and the bonus.
#pragma once

#include <cstdint>

#include "../maths.h"
#include "../program.h"
#include "delta_rule.h"
#include "scaling.h"

namespace {

void mix_rwkv7(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width;
    const Part parts[] = {{0, K * V}};
    for_heads(mix, parts, 3 * K * V, [&](int64_t row, int64_t head, float** state) {
        float *w = workspace<Mix>(5 * K), *query = w + K, *removal = query + K, *removed = removal + K;
        float *added = removed + K, *y = mix.output(row, head);
        const float *r = mix.query(row, head), *k = mix.key(row, head), *value = mix.value(row, head);
        const float *decay = mix.extra(row, head, 2 * K), *rate = decay + K;
        const float *decay_bias = mix.own<float>(1, row, head, 5 * K), *rate_bias = decay_bias + K;
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
        replace_and_read<ROWS, true>(K, V, step, state[0], y);
        scale_output(V, 1e-5f, nullptr, y);
        for (int64_t i = 0; i < K; i++) query[i] = r[i] * rho[i];
        const float bonus = dot(K, query, added);
        for (int64_t j = 0; j < V; j++) y[j] += bonus * value[j];
    });
}

}  // namespace
