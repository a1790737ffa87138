// Log-linear attention over linear attention, a scalar decay (Mamba-2) or the gated delta rule.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "../maths.h"
#include "../operation.h"
#include "deltanet.h"
#include "parts/delta_rule.h"
#include "parts/features.h"
#include "parts/rows.h"
#include "parts/scaling.h"
#include "parts/sums.h"

namespace {

// The base mechanism. Its number is also that of its extra scalars.
enum Over { OVER_LINEAR, OVER_MAMBA2, OVER_DELTANET };

// What a position does to the state of its head.
struct LevelStep {
    float *query, *key, *written;  // the position adds key written^T to the state
    float decay, rate;             // and multiplies it by decay (I - rate key key^T)
    float overlap;                 // query . key
};

struct LogLinear : Mix {
    // s of each bucket. Bucket b is valid if bit b of the position is 1.
    const int64_t state = buffer();
    // Over linear attention, z of each bucket. Over Mamba-2 a factor of each bucket, which decays in its place.
    const int64_t second = buffer_or_none();
    const int64_t bias = buffer_or_none();  // over Mamba-2 of dt, over the delta rule of the gate
    const int64_t rate = buffer_or_none();  // over Mamba-2
    const int64_t over = integer();
    const int64_t G = integer();       // the number of buckets
    const int64_t levels = integer();  // with a weight of their own

    void check(Rules& rules) const {
        rules.need(over <= OVER_DELTANET && G < 63 && int64_t{1} << std::min<int64_t>(G, 62) > rules.T && levels >= 1);
        check_extra(rules, over + levels);
        rules.state(state, {H, G, K, V});
        if (over != OVER_DELTANET) rules.state(second, {H, G, over == OVER_LINEAR ? K : 1});
        if (over != OVER_LINEAR) rules.constant(bias, {H});
        if (over == OVER_MAMBA2) rules.constant(rate, {H});
    }

    LevelStep prepare_step(int64_t row, int64_t head, const float* extra) const {
        const float *q = q_at(row, head), *k = k_at(row, head), *value = v_at(row, head);
        float* query = workspace<LevelStep>(2 * K + V);
        LevelStep step{query, query + K, query + 2 * K, 1, 0, 0};
        float amount = 1;  // of the value that is added
        if (over == OVER_LINEAR) {
            for (int64_t i = 0; i < K; i++) step.query[i] = feature(q[i], ELU_MAP);
            for (int64_t i = 0; i < K; i++) step.key[i] = feature(k[i], ELU_MAP);
        } else if (over == OVER_MAMBA2) {
            copy_numbers(K, q, step.query);
            copy_numbers(K, k, step.key);
            amount = softplus(extra[0] + *own<float>(bias, row, head, 1));
            step.decay = exponential(-*own<float>(rate, row, head, 1) * amount);
        } else {
            silu_direction(K, q, step.query);
            silu_direction(K, k, step.key);
            amount = step.rate = sigmoid(extra[0]);
            step.decay = sigmoid(extra[1] + *own<float>(bias, row, head, 1));
        }
        for (int64_t j = 0; j < V; j++) step.written[j] = amount * value[j];
        step.overlap = dot(K, step.query, step.key);
        return step;
    }

    void run() const {
        const int64_t last = levels - 1;
        const auto body = [&](int64_t row, int64_t head, float** held) {
            const int64_t position = pass.position_of(row);
            const float* extra = extra_at(row, head, over + last + 1);
            const LevelStep step = prepare_step(row, head, extra);
            // See log_linear.py.
            const float least = over == OVER_LINEAR ? -64.0f : -std::numeric_limits<float>::infinity();
            const auto weight = [&](int64_t level) {
                return softplus(std::max(extra[over + (level < last ? level : last)], least));
            };
            float *weights = workspace<Mix>(K + 2 * V), *read = weights + K, *nothing = read + V, *y = y_at(row, head);
            for (int64_t j = 0; j < V; j++) nothing[j] = 0;
            const float own = weight(0) * step.overlap;
            float total = own;
            for (int64_t j = 0; j < V; j++) y[j] = own * step.written[j];
            for (int64_t b = 0; position >> b; b++) {
                if (!(position >> b & 1)) continue;
                float *s = held[0] + b * K * V, scale = weight(b + 1);
                if (over == OVER_DELTANET) {
                    const DeltaStep change{step.query,  step.key,  step.key,    nothing,
                                           &step.decay, step.rate, step.overlap};
                    replace_and_read<ALL>(K, V, change, s, read);
                    for (int64_t j = 0; j < V; j++) y[j] += scale * read[j];
                    continue;
                }
                if (over == OVER_LINEAR) total += scale * dot(K, step.query, held[1] + b * K);
                else scale *= held[1][b] *= step.decay;
                for (int64_t i = 0; i < K; i++) weights[i] = scale * step.query[i];
                add_rows(K, V, weights, s, V, y);
            }
            // The position is merged with the buckets of the lowest bits that are all 1.
            int64_t carries = 0;
            while (position >> carries & 1) carries++;
            float* merged = held[0] + carries * K * V;
            for (int64_t i = 0; i < K; i++)
                for (int64_t j = 0; j < V; j++) merged[i * V + j] = step.key[i] * step.written[j];
            for (int64_t b = 0; b < carries; b++) {
                const float factor = over == OVER_MAMBA2 ? held[1][b] : 1, *s = held[0] + b * K * V;
                for (int64_t i = 0; i < K * V; i++) merged[i] += factor * s[i];
            }
            if (over == OVER_LINEAR) {
                float* z = held[1] + carries * K;
                copy_numbers(K, step.key, z);
                for (int64_t b = 0; b < carries; b++)
                    for (int64_t i = 0; i < K; i++) z[i] += held[1][b * K + i];
                return divide(V, total, y);
            }
            if (over == OVER_MAMBA2) held[1][carries] = 1;
            scale_output(V, 1e-6f, nullptr, y);
        };
        const Part sums{state, G * K * V}, both[] = {sums, {second, over == OVER_LINEAR ? G * K : G}}, one[] = {sums};
        const int64_t work = G * K * V;
        over == OVER_DELTANET ? for_heads(one, work, body) : for_heads(both, work, body);
    }
};
OPERATION("mix.log_linear", LogLinear, STATEFUL);

}  // namespace
