// Mamba.
#pragma once

#include <cmath>
#include <cstdint>

#include "../maths.h"
#include "../operation.h"
#include "parts/scaling.h"
#include "parts/sums.h"

namespace {

// x [K], normalised if there are gains and biases [2, K], and rotated by R angles in turns.
inline void normalise_and_rotate(int64_t K, const float* x, const float* affine, int64_t R, const float* angles,
                                 float* out) {
    const float factor = affine ? shrink_factor(K, x) : 1;
    for (int64_t i = 0; i < K; i++) out[i] = x[i] * factor;
    const float inverse = affine ? 1 / std::sqrt(dot(K, out, out) / K + 1e-5f) : 1;
    for (int64_t i = 0; affine && i < K; i++) out[i] = out[i] * inverse * affine[i] + affine[K + i];
    for (int64_t r = 0; r < R; r++) {
        float sine, cosine;
        sine_cosine(angles[r] * 6.28318531f, sine, cosine);
        const float even = out[2 * r], odd = out[2 * r + 1];
        out[2 * r] = even * cosine - odd * sine;
        out[2 * r + 1] = even * sine + odd * cosine;
    }
}

struct Mamba : Mix {
    const int64_t state = buffer();           // s
    const int64_t angles = buffer_or_none();  // in turns
    // The key, the value and the weight of the newest position, for the trapezoidal rule.
    const int64_t key = buffer_or_none(), value = buffer_or_none(), weight = buffer_or_none();
    const int64_t constants = buffer();  // the bias of the step size, the skip factor, the rate of decay
    // The gain and the bias of queries, then of keys; none without normalisation.
    const int64_t affine = buffer_or_none();
    const int64_t R = integer();  // the number of angles
    const bool trapezoidal = integer();
    const bool input_rate = integer();  // whether the rate of decay is computed from the input

    void check(Rules& rules) const {
        rules.need(2 * R <= K);
        check_extra(rules, 1 + input_rate + trapezoidal + R);
        rules.state(state, {H, K, V});
        if (R) rules.state(angles, {H, R});
        if (trapezoidal) {
            rules.state(key, {H, K});
            rules.state(value, {H, V});
            rules.state(weight, {H});
        }
        rules.constant(constants, {H, 3});
        if (affine >= 0) rules.constant(affine, {H, 4, K});
    }

    void run() const {
        const auto part = [&](int64_t buffer, int64_t width) { return width ? Part{buffer, width} : Part{state, 0}; };
        const Part parts[] = {{state, K * V},
                              part(angles, R),
                              part(key, trapezoidal * K),
                              part(value, trapezoidal * V),
                              part(weight, trapezoidal)};
        for_heads(parts, K * V, [&](int64_t row, int64_t head, float** held) {
            const float *extra = extra_at(row, head, 1 + input_rate + trapezoidal + R), *v = v_at(row, head);
            const float* own_constants = own<float>(constants, row, head, 3);
            const float* norms = affine < 0 ? nullptr : own<float>(affine, row, head, 4 * K);
            float *query = workspace<Mix>(2 * K), *key = query + K, *y = y_at(row, head), *angles = held[1];
            const float size = softplus(*extra++ + own_constants[0]);
            float rate = own_constants[2];
            if (input_rate) {
                const float logit = *extra++, found = logit < 0 ? 1 / (1 - logit) : 1 + logit;
                rate = found < 1e-4f ? 1e-4f : found;
            }
            const float decay = exponential(-size * rate), weight = trapezoidal ? sigmoid(*extra++) * size : size;
            for (int64_t r = 0; r < R; r++) {
                const float angle = angles[r] + hyperbolic_tangent(extra[r]) * (0.5f * size);
                angles[r] = angle - std::nearbyint(angle);
            }
            normalise_and_rotate(K, q_at(row, head), norms, R, angles, query);
            normalise_and_rotate(K, k_at(row, head), norms ? norms + 2 * K : nullptr, R, angles, key);
            float skip = own_constants[1];
            if (trapezoidal) {
                skip += weight * dot(K, query, key);
                float *held_key = held[2], *held_value = held[3], &held_weight = *held[4];
                const float factor = decay * (held_weight + (size - weight));
                for (int64_t i = 0; i < K; i++) held_key[i] *= factor;
                update_and_read<ALL>(K, V, query, held_key, held_value, &decay, held[0], y);
                copy_numbers(K, key, held_key);
                copy_numbers(V, v, held_value);
                held_weight = weight;
            } else {
                for (int64_t i = 0; i < K; i++) key[i] *= weight;
                update_and_read<ALL>(K, V, query, key, v, &decay, held[0], y);
            }
            for (int64_t j = 0; j < V; j++) y[j] += skip * v[j];
        });
    }
};
OPERATION("mix.mamba", Mamba, STATEFUL);

}  // namespace
