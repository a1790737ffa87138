// Log-linear attention over linear attention, a scalar decay (Mamba-2) or the gated delta rule.
//
// State: s [G, K, V] of each head, where bucket b is valid if bit b of the position is 1; and z [G, K] over linear
// attention, or over Mamba-2 a factor [G] of each bucket, which decays in place of the bucket. Buffers: over Mamba-2
// the bias of dt and the rate of each head; over the delta rule the bias of each head's gate. Integers: the base
// mechanism, G, and the number of levels with a weight of their own.
#pragma once

#include <cstdint>

#include "../maths.h"
#include "../program.h"
#include "delta_rule.h"
#include "features.h"
#include "mix_deltanet.h"
#include "rows.h"
#include "scaling.h"
#include "sums.h"

namespace {

// The base mechanism. Its number is also that of its extra scalars.
enum Over { OVER_LINEAR, OVER_MAMBA2, OVER_DELTANET };

// What a position does to the state of its head.
struct LevelStep {
    float *query, *key, *written;  // the position adds key written^T to the state
    float decay, rate;             // and multiplies it by decay (I - rate key key^T)
    float overlap;                 // query . key
};

inline LevelStep prepare_step(const Mix& mix, int64_t row, int64_t head, int64_t over, const float* extra) {
    const int64_t K = mix.key_width, V = mix.value_width;
    const float *q = mix.query(row, head), *k = mix.key(row, head), *value = mix.value(row, head);
    float* query = workspace<LevelStep>(2 * K + V);
    LevelStep step{query, query + K, query + 2 * K, 1, 0, 0};
    float amount = 1;  // of the value that is added
    if (over == OVER_LINEAR) {
        for (int64_t i = 0; i < K; i++) step.query[i] = feature(q[i], ELU_MAP);
        for (int64_t i = 0; i < K; i++) step.key[i] = feature(k[i], ELU_MAP);
    } else if (over == OVER_MAMBA2) {
        copy_numbers(K, q, step.query);
        copy_numbers(K, k, step.key);
        amount = softplus(extra[0] + *mix.own<float>(2, row, head, 1));
        step.decay = exponential(-*mix.own<float>(3, row, head, 1) * amount);
    } else {
        silu_direction(K, q, step.query);
        silu_direction(K, k, step.key);
        amount = step.rate = sigmoid(extra[0]);
        step.decay = sigmoid(extra[1] + *mix.own<float>(2, row, head, 1));
    }
    for (int64_t j = 0; j < V; j++) step.written[j] = amount * value[j];
    step.overlap = dot(K, step.query, step.key);
    return step;
}

void mix_log_linear(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width, over = mix.integer(0), G = mix.integer(1);
    const int64_t last = mix.integer(2) - 1;
    const auto body = [&](int64_t row, int64_t head, float** state) {
        const int64_t position = pass.position_of(row);
        const float* extra = mix.extra(row, head, over + last + 1);
        const LevelStep step = prepare_step(mix, row, head, over, extra);
        const auto weight = [&](int64_t level) { return softplus(extra[over + (level < last ? level : last)]); };
        float *weights = workspace<Mix>(K + 2 * V), *read = weights + K, *nothing = read + V,
              *y = mix.output(row, head);
        for (int64_t j = 0; j < V; j++) nothing[j] = 0;
        const float own = weight(0) * step.overlap;
        float total = own;
        for (int64_t j = 0; j < V; j++) y[j] = own * step.written[j];
        for (int64_t b = 0; position >> b; b++) {
            if (!(position >> b & 1)) continue;
            float *s = state[0] + b * K * V, scale = weight(b + 1);
            if (over == OVER_DELTANET) {
                const DeltaStep change{step.query, step.key, step.key, nothing, &step.decay, step.rate, step.overlap};
                replace_and_read<ALL>(K, V, change, s, read);
                for (int64_t j = 0; j < V; j++) y[j] += scale * read[j];
                continue;
            }
            if (over == OVER_LINEAR) total += scale * dot(K, step.query, state[1] + b * K);
            else scale *= state[1][b] *= step.decay;
            for (int64_t i = 0; i < K; i++) weights[i] = scale * step.query[i];
            add_rows(K, V, weights, s, V, y);
        }
        // The position is merged with the buckets of the lowest bits that are all 1.
        int64_t carries = 0;
        while (position >> carries & 1) carries++;
        float* merged = state[0] + carries * K * V;
        for (int64_t i = 0; i < K; i++)
            for (int64_t j = 0; j < V; j++) merged[i * V + j] = step.key[i] * step.written[j];
        for (int64_t b = 0; b < carries; b++) {
            const float factor = over == OVER_MAMBA2 ? state[1][b] : 1, *s = state[0] + b * K * V;
            for (int64_t i = 0; i < K * V; i++) merged[i] += factor * s[i];
        }
        if (over == OVER_LINEAR) {
            float* z = state[1] + carries * K;
            copy_numbers(K, step.key, z);
            for (int64_t b = 0; b < carries; b++)
                for (int64_t i = 0; i < K; i++) z[i] += state[1][b * K + i];
            return divide(V, total, y);
        }
        if (over == OVER_MAMBA2) state[1][carries] = 1;
        scale_output(V, 1e-6f, nullptr, y);
    };
    const Part sums{0, G * K * V}, both[] = {sums, {1, over == OVER_LINEAR ? G * K : G}}, one[] = {sums};
    const int64_t work = G * K * V;
    over == OVER_DELTANET ? for_heads(mix, one, work, body) : for_heads(mix, both, work, body);
}

}  // namespace
