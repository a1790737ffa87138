// Long-short attention, except its softmax, which is in mix_rows.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../maths.h"
#include "../program.h"
#include "lanes.h"
#include "scaling.h"

namespace {

// out [heads, width] <- LayerNorm over all of x [heads, width]. Heads of `out` are `stride` apart; gain and shift are
// [heads, widest]. Where squares could overflow, x is scaled down; this does not change a LayerNorm.
template <class Number>
inline void norm_heads(int64_t heads, int64_t width, const float* x, const float* gain, const float* shift,
                       int64_t widest, Number* out, int64_t stride) {
    const int64_t count = heads * width;
    const float factor = shrink_factor(count, x);
    const float mean = sum_of(count, [&](int64_t i) { return x[i] * factor; }) / count;
    const float squares = sum_of(count, [&](int64_t i) { return (x[i] * factor - mean) * (x[i] * factor - mean); });
    const float inverse = 1 / std::sqrt(squares / count + 1e-5f);
    for (int64_t head = 0; head < heads; head++)
        for (int64_t i = 0; i < width; i++)
            out[head * stride + i] = Number((x[head * width + i] * factor - mean) * inverse * gain[head * widest + i] +
                                            shift[head * widest + i]);
}

// Copies q and normalises k and v to the output [q, k, v]. Shared: gain and shift. Integers: widest.
void mix_norm_heads(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t H = mix.heads, K = mix.key_width, V = mix.value_width, widest = mix.integer(0);
    const float *gain = mix.own<float>(0, 0, 0, 0), *shift = mix.own<float>(1, 0, 0, 0);
    pass.for_each(pass.rows, pass.rows * H * (K + V) * 4, [&](int64_t row) {
        float* out = pass.at<float>(op.buffer[1], row);
        std::memcpy(out, mix.query(row, 0), H * K * sizeof(float));
        norm_heads(H, K, mix.key(row, 0), gain, shift, widest, out + H * K, K);
        norm_heads(H, V, mix.value(row, 0), gain, shift, widest, out + 2 * H * K, V);
    });
}

// Adds a position to the averages of its chunk. The averages of a finished chunk become `rank` rows of the cache, where
// later positions see them. Weights are exponentials of the extra scalars.
// State: the cache, keys [H, capacity, K] and values [H, capacity, V]; the largest scalar so far [H, rank]; the sums
// [H, rank, 1 + K + V] of weights, weighted keys and weighted values, relative to the largest scalar.
// Shared: gain and shift of the norm of the averages. Integers: capacity, the first row for averages, chunk, rank,
// widest, the format of the cache.
template <class Number>
void mix_compress(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op}, whole{pass, op, 1};
    const int64_t H = mix.heads, K = mix.key_width, V = mix.value_width, width = 1 + K + V, capacity = mix.integer(0);
    const int64_t chunk = mix.integer(2), rank = mix.integer(3), widest = mix.integer(4);
    const float *gain = mix.own<float>(4, 0, 0, 0), *shift = mix.own<float>(5, 0, 0, 0);
    const Part parts[] = {{2, H * rank}, {3, H * rank * width}};
    for_heads(whole, parts, H * rank * width, [&](int64_t row, int64_t, float** state) {
        for (int64_t head = 0; head < H; head++) {
            const float *score = mix.extra(row, head, rank), *k = mix.key(row, head), *v = mix.value(row, head);
            for (int64_t r = 0; r < rank; r++) {
                float &largest = state[0][head * rank + r], *sum = state[1] + (head * rank + r) * width;
                const float most = score[r] > largest ? score[r] : largest;
                const float kept = exponential(largest - most), weight = exponential(score[r] - most);
                largest = most;
                sum[0] = sum[0] * kept + weight;
                for (int64_t i = 0; i < K; i++) sum[1 + i] = sum[1 + i] * kept + weight * k[i];
                for (int64_t i = 0; i < V; i++) sum[1 + K + i] = sum[1 + K + i] * kept + weight * v[i];
            }
        }
        const int64_t position = pass.position_of(row);
        if ((position + 1) % chunk) return;
        float *keys = workspace<Mix>(H * (K + V)), *values = keys + H * K;
        for (int64_t r = 0; r < rank; r++) {
            for (int64_t head = 0; head < H; head++) {
                const float *sum = state[1] + (head * rank + r) * width, total = sum[0];
                for (int64_t i = 0; i < K; i++) keys[head * K + i] = sum[1 + i] / total;
                for (int64_t i = 0; i < V; i++) values[head * V + i] = sum[1 + K + i] / total;
            }
            const int64_t slot = mix.integer(1) + position / chunk * rank + r;
            norm_heads(H, K, keys, gain, shift, widest, mix.own<Number>(0, row, 0, 0) + slot * K, capacity * K);
            norm_heads(H, V, values, gain, shift, widest, mix.own<Number>(1, row, 0, 0) + slot * V, capacity * V);
        }
        for (int64_t i = 0; i < H * rank; i++) state[0][i] = -INFINITY;
        for (int64_t i = 0; i < H * rank * width; i++) state[1][i] = 0;
    });
}

}  // namespace
