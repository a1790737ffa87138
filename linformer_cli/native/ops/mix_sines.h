// Attentions with the features [sin, cos](x W) / sqrt(D), for W [K, D]. The denominator is bounded below by a tenth of
// the total weight n of the keys.
#pragma once

#include <cmath>
#include <cstdint>

#include "../maths.h"
#include "../program.h"
#include "features.h"
#include "sums.h"

namespace {

// s, z and n are multiplied by `kept`, and the new key is added with weight `added`. Then y [V] is the query's average.
inline void average_by_sines(int64_t C, int64_t V, float* query, float* key, const float* value, float kept,
                             float added, float* s, float* z, float& n, float* y) {
    sine_features(C / 2, query);
    sine_features(C / 2, key);
    for (int64_t i = 0; i < C; i++) key[i] *= added;
    n = n * kept + added;
    const float weight = update_and_read<ALL>(C, V, query, key, value, &kept, s, z, y), least = 0.1f * n;
    divide(V, weight < least ? least : weight, y);
}

// Performer's trig map. Keys have weight exp(|x|^2 / 2), and sums are divided by the largest weight exp(c). State: s
// [C, V], z [C], c and n of each head. Buffers: W, which includes the scale of x. Integers: C.
void mix_performer_trig(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width, C = mix.integer(0);
    const Part parts[] = {{0, C * V}, {1, C}, {2, 1}, {3, 1}};
    for_heads(mix, parts, C * V, [&](int64_t row, int64_t head, float** state) {
        float *query = workspace<Mix>(2 * C), *key = query + C, &c = *state[2];
        const float *q = mix.query(row, head), *k = mix.key(row, head);
        multiply_both(K, C / 2, mix.own<float>(4, row, 0, 0), q, k, query, key);
        const float exponent = half_square(K, k), before = c;
        c = exponent > before ? exponent : before;
        average_by_sines(C, V, query, key, mix.value(row, head), exponential(before - c), exponential(exponent - c),
                         state[0], state[1], *state[3], mix.output(row, head));
    });
}

// Random feature attention, in which x is divided by its length. State: s [C, V], z [C] and n of each head. Buffers:
// sigma [K] of each head, W. Integers: C, whether there is a gate.
void mix_rfa(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t K = mix.key_width, V = mix.value_width, C = mix.integer(0);
    const Part parts[] = {{0, C * V}, {1, C}, {2, 1}};
    for_heads(mix, parts, C * V, [&](int64_t row, int64_t head, float** state) {
        float *query = workspace<Mix>(2 * (C + K)), *key = query + C, *q = key + C, *k = q + K;
        const float* sigma = mix.own<float>(3, row, head, K);
        scale_to_length(K, mix.query(row, head), sigma, q);
        scale_to_length(K, mix.key(row, head), sigma, k);
        multiply_both(K, C / 2, mix.own<float>(4, row, 0, 0), q, k, query, key);
        const bool gated = mix.integer(1);
        const float gate = gated ? *mix.extra(row, head, 1) : 0;
        average_by_sines(C, V, query, key, mix.value(row, head), gated ? sigmoid(gate) : 1, gated ? sigmoid(-gate) : 1,
                         state[0], state[1], *state[2], mix.output(row, head));
    });
}

}  // namespace
