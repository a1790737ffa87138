// Long-short attention, except its softmax, which is in softmax.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../maths.h"
#include "../operation.h"
#include "parts/lanes.h"
#include "parts/scaling.h"

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

// Copies q and normalises k and v to the output [q, k, v].
struct NormHeads : Mix {
    const int64_t gain = buffer(), shift = buffer();
    const int64_t widest = integer();

    void check(Rules& rules) const {
        rules.need(widest >= std::max(K, V));
        rules.scratch(outputs, {H, 2 * K + V});
        for (const int64_t vectors : {gain, shift}) rules.constant(vectors, {H, widest});
    }

    void run() const {
        const float *gains = pass.at<float>(gain, 0), *shifts = pass.at<float>(shift, 0);
        pass.for_each(pass.rows, pass.rows * H * (K + V) * 4, [&](int64_t row) {
            float* out = y_at(row, 0);
            std::memcpy(out, q_at(row, 0), H * K * sizeof(float));
            norm_heads(H, K, k_at(row, 0), gains, shifts, widest, out + H * K, K);
            norm_heads(H, V, v_at(row, 0), gains, shifts, widest, out + 2 * H * K, V);
        });
    }
};
OPERATION("mix.norm_heads", NormHeads, STATELESS);

// Adds a position to the averages of its chunk. The averages of a finished chunk become `rank` rows of the cache, where
// later positions see them. Weights are exponentials of the extra scalars.
struct Compress : CachedMix {
    const int64_t largest = buffer();  // scalar so far
    const int64_t sums = buffer();     // of weights, weighted keys and weighted values, relative to the largest scalar
    const int64_t gain = buffer(), shift = buffer();  // of the norm of the averages
    const int64_t capacity = integer();
    const int64_t first = integer();  // row for averages
    const int64_t chunk = integer(), rank = integer(), widest = integer(), format = integer();

    void check(Rules& rules) const {
        if (!rules.need(chunk >= 1)) return;
        rules.need(widest >= std::max(K, V) && capacity >= first + rules.T / chunk * rank);
        check_extra(rules, rank);
        check_cache(rules, capacity, format);
        rules.state(largest, {H, rank});
        rules.state(sums, {H, rank, 1 + K + V});
        for (const int64_t vectors : {gain, shift}) rules.constant(vectors, {H, widest});
    }

    void run() const { is_bfloat16(format) ? run_in<bfloat16>() : run_in<float>(); }

    template <class Number>
    void run_in() const {
        const int64_t width = 1 + K + V;
        const float *gains = pass.at<float>(gain, 0), *shifts = pass.at<float>(shift, 0);
        const Part parts[] = {{largest, H * rank}, {sums, H * rank * width}};
        for_groups(1, parts, H * rank * width, [&](int64_t row, int64_t, float** held) {
            for (int64_t head = 0; head < H; head++) {
                const float *score = extra_at(row, head, rank), *k = k_at(row, head), *v = v_at(row, head);
                for (int64_t r = 0; r < rank; r++) {
                    float &top = held[0][head * rank + r], *sum = held[1] + (head * rank + r) * width;
                    const float most = score[r] > top ? score[r] : top;
                    const float kept = exponential(top - most), weight = exponential(score[r] - most);
                    top = most;
                    sum[0] = sum[0] * kept + weight;
                    for (int64_t i = 0; i < K; i++) sum[1 + i] = sum[1 + i] * kept + weight * k[i];
                    for (int64_t i = 0; i < V; i++) sum[1 + K + i] = sum[1 + K + i] * kept + weight * v[i];
                }
            }
            const int64_t position = pass.position_of(row);
            if ((position + 1) % chunk) return;
            float *k = workspace<Mix>(H * (K + V)), *v = k + H * K;
            for (int64_t r = 0; r < rank; r++) {
                for (int64_t head = 0; head < H; head++) {
                    const float *sum = held[1] + (head * rank + r) * width, total = sum[0];
                    for (int64_t i = 0; i < K; i++) k[head * K + i] = sum[1 + i] / total;
                    for (int64_t i = 0; i < V; i++) v[head * V + i] = sum[1 + K + i] / total;
                }
                const int64_t slot = first + position / chunk * rank + r;
                norm_heads(H, K, k, gains, shifts, widest, own<Number>(keys, row, 0, 0) + slot * K, capacity * K);
                norm_heads(H, V, v, gains, shifts, widest, own<Number>(values, row, 0, 0) + slot * V, capacity * V);
            }
            for (int64_t i = 0; i < H * rank; i++) held[0][i] = -INFINITY;
            for (int64_t i = 0; i < H * rank * width; i++) held[1][i] = 0;
        });
    }
};
OPERATION("mix.compress", Compress, STATEFUL);

}  // namespace
