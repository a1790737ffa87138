// Mamba. State: s [K, V], the angles [R] in turns, and the key [K], value [V] and weight of the newest position, of
// each head. Without angles or the trapezoidal rule, these buffers are absent. Buffers: three constants of each head
// (the bias of the step size, the skip factor, the rate of decay), and the gain and the bias [K] of each head's
// queries, then of its keys (absent without normalisation). Integers: R, whether the rule is trapezoidal, whether the
// rate of decay is computed from the input.
#pragma once

#include <cmath>
#include <cstdint>

#include "../maths.h"
#include "../program.h"
#include "scaling.h"
#include "sums.h"

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

void mix_mamba(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width, R = mix.integer(0);
    const bool trapezoidal = mix.integer(1), input_rate = mix.integer(2), normalised = mix.buffer(6) >= 0;
    const auto part = [](int64_t index, int64_t width) { return width ? Part{index, width} : Part{0, 0}; };
    const Part parts[] = {
        {0, K * V}, part(1, R), part(2, trapezoidal * K), part(3, trapezoidal * V), part(4, trapezoidal)};
    for_heads(mix, parts, K * V, [&](int64_t row, int64_t head, float** state) {
        const float *extra = mix.extra(row, head, 1 + input_rate + trapezoidal + R), *v = mix.value(row, head);
        const float* constants = mix.own<float>(5, row, head, 3);
        const float* affine = normalised ? mix.own<float>(6, row, head, 4 * K) : nullptr;
        float *query = workspace<Mix>(2 * K), *key = query + K, *y = mix.output(row, head), *angles = state[1];
        const float size = softplus(*extra++ + constants[0]);
        float rate = constants[2];
        if (input_rate) {
            const float logit = *extra++, found = logit < 0 ? 1 / (1 - logit) : 1 + logit;
            rate = found < 1e-4f ? 1e-4f : found;
        }
        const float decay = exponential(-size * rate), weight = trapezoidal ? sigmoid(*extra++) * size : size;
        for (int64_t r = 0; r < R; r++) {
            const float angle = angles[r] + hyperbolic_tangent(extra[r]) * (0.5f * size);
            angles[r] = angle - std::nearbyint(angle);
        }
        normalise_and_rotate(K, mix.query(row, head), affine, R, angles, query);
        normalise_and_rotate(K, mix.key(row, head), affine ? affine + 2 * K : nullptr, R, angles, key);
        float own = constants[1];
        if (trapezoidal) {
            own += weight * dot(K, query, key);
            float *held_key = state[2], *held_value = state[3], &held_weight = *state[4];
            const float factor = decay * (held_weight + (size - weight));
            for (int64_t i = 0; i < K; i++) held_key[i] *= factor;
            update_and_read<ALL>(K, V, query, held_key, held_value, &decay, state[0], y);
            copy_numbers(K, key, held_key);
            copy_numbers(V, v, held_value);
            held_weight = weight;
        } else {
            for (int64_t i = 0; i < K; i++) key[i] *= weight;
            update_and_read<ALL>(K, V, query, key, v, &decay, state[0], y);
        }
        for (int64_t j = 0; j < V; j++) y[j] += own * v[j];
    });
}

}  // namespace
