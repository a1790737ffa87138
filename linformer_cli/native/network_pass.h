// One pass through all layers of a model with `linear` attention.
#pragma once

#include <cstdint>
#include <cstring>

#include "layers.h"
#include "linear_step.h"
#include "network.h"
#include "products.h"

namespace {  // local to the library that includes it: the compiler may inline all of it

inline int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// The number of rows of a product's weights, including the zeros that fill up the last tile.
constexpr int64_t TILE_ROWS = LINTX_TILE_ROWS;
static_assert(TILE_ROWS % (PANELS * LANES) == 0, "");
inline int64_t rows_of(int64_t rows) { return round_up(rows, TILE_ROWS); }

// Calls `body` for every index below `count`, optionally divided among threads.
template <class Body>
inline void spread(bool among_threads, int64_t count, Body body) {
    if (!among_threads) {
        for (int64_t index = 0; index < count; index++) body(index);
        return;
    }
#pragma omp parallel for schedule(static)
    for (int64_t index = 0; index < count; index++) body(index);
}

// Takes some images through all layers, with their own scratch. With `ahead`, it takes successive positions of one image
// instead, stores their keys and values, and leaves the state unchanged.
template <class T>
class Pass {
    const Network& net;
    const int64_t first, B;  // the images
    const bool ahead;
    const int64_t D = net.width, F = net.feed_forward, H = net.heads, K = net.key_width, V = net.value_width;
    // Inputs of products, padded to whole words: vectors h [B, narrow], attention outputs y [B, mixed], and f [B, wide]
    // between the layers of the feed-forward branch.
    const int64_t narrow = round_up(D, PER_WORD<T>), mixed = round_up(H * V, PER_WORD<T>);
    const int64_t wide = round_up(F, PER_WORD<T>);
    T *h, *y, *f;
    // The same for the two layers of the surroundings: their input, and the activations between them.
    const int64_t seen = round_up(2 * net.around.slots, PER_WORD<T>), between = round_up(net.around.hidden, PER_WORD<T>);
    T *numbers, *middle;
    float *x, *sums;  // the residual stream [B, D], and the output of a product, [B, rows_of(its rows)]
    const bool together = net.shares == 1;  // all threads work on these images

    // sums = inputs [B, columns] times the weights [rows_of(rows) / 16, columns in words, 16], transposed.
    void multiply(const T* inputs, int64_t columns, const uint32_t* weight, int64_t rows) {
        rows = rows_of(rows);
        spread(together && B * columns * rows > 131072, rows / (PANELS * LANES), [&](int64_t tile) {
            const int64_t row = tile * PANELS * LANES;
            multiply_images<T, IMAGES>(B, columns, weight + row * columns / PER_WORD<T>, inputs, sums + row, rows);
        });
    }

    // Adds the surroundings of each image's position to its vector.
    void look_around(int64_t position) {
        const Surroundings& around = net.around;
        for (int64_t b = 0; b < B; b++) {
            const int32_t* places = around.places + (position + (ahead ? b : 0)) * around.slots;
            const int16_t* recent = around.recent + (ahead ? 0 : first + b) * around.reach;
            T* row = numbers + b * seen;
            for (int64_t n = 0; n < around.slots; n++) {
                const bool known = places[n] >= 0;
                const int64_t value = known ? recent[places[n]] : 0;
                row[n] = T(known ? 2.0f * value / (around.levels - 1) - 1 : 0.0f);
                row[around.slots + n] = T(known ? (value > 0 ? 1.0f : 0.0f) : 0.5f);
            }
        }
        multiply(numbers, seen, around.input, around.hidden);
        for (int64_t b = 0; b < B; b++) {
            const float* sum = sums + b * rows_of(around.hidden);
            for (int64_t i = 0; i < around.hidden; i++)
                middle[b * between + i] = T(activation(sum[i] + around.input_bias[i], true));
        }
        multiply(middle, between, around.output, D);
        for (int64_t b = 0; b < B; b++)
            for (int64_t i = 0; i < D; i++) x[b * D + i] += sums[b * rows_of(D) + i] + around.output_bias[i];
    }

    // Adds the vector of the neighbour tables at each image's position to its vector.
    void look_up(int64_t position) {
        const Tables& tables = net.tables;
        for (int64_t b = 0; b < B; b++) {
            const int64_t own = position + (ahead ? b : 0);
            const int16_t* recent = tables.recent + (ahead ? 0 : first + b) * tables.reach;
            const float* rows[TABLES];
            find_rows(tables, tables.places + own * NEIGHBOURS, recent, own % tables.channels, rows);
            float* vector = x + b * D;
            for (int64_t i = 0; i < D; i++) vector[i] += tables.bias[i];
            for (int64_t n = 0; n < TABLES * ROW_WIDTH; n++) {
                const float number = rows[n / ROW_WIDTH][n % ROW_WIDTH];
                for (int64_t i = 0; i < D; i++) vector[i] += number * tables.weight[n * D + i];
            }
        }
    }

    // One head of one row; updates the state `s` and `z`.
    void mix_row(const Layer& layer, int64_t b, int64_t head, float* s, float* z, float* key, float* value) {
        const int64_t q = head * K, k = (H + head) * K, v = 2 * H * K + head * V;
        const float *row = sums + b * rows_of(H * (2 * K + V)), *bias = layer.input_bias;
        mix_head(K, V, row + q, row + k, row + v, bias + q, bias + k, bias + v, s, z, key, value,
                 y + b * mixed + head * V, static_cast<int>(net.map));
    }

    void mix(const Layer& layer) {
        const bool shared = together && B * H * K * V > 65536;
        if (!ahead) {
            spread(shared, B * H, [&](int64_t index) {
                const int64_t b = index / H, head = index % H, place = first * H + index;
                float key[WIDEST_HEAD], value[WIDEST_HEAD];
                mix_row(layer, b, head, layer.s + place * K * V, layer.z + place * K, key, value);
            });
            return;
        }
        spread(shared, H, [&](int64_t head) {
            float *s = net.trial + head * K * (V + 1), *z = s + K * V;
            std::memcpy(s, layer.s + head * K * V, K * V * sizeof(float));
            std::memcpy(z, layer.z + head * K, K * sizeof(float));
            for (int64_t b = 0; b < B; b++) {
                float* key = layer.kept + (head * net.window + b) * (K + V);
                mix_row(layer, b, head, s, z, key, key + K);
            }
        });
    }

    // Adds the output of a product to the residual stream, if `added`, and applies the norm that follows.
    void join(bool added, const float* bias, const float* gain, const float* shift) {
        const int64_t stride = rows_of(D);
        spread(together && B * D > 32768, B, [&](int64_t b) {
            const float* branch = added ? sums + b * stride : nullptr;
            join_row(D, x + b * D, branch, bias, gain, shift, h + b * narrow, net.pre != 0);
        });
    }

    void activate(const float* bias) {
        const int64_t stride = rows_of(F);
        const bool gelu = net.gelu != 0;
        spread(together && B * F > 32768, B, [&](int64_t b) {
            for (int64_t i = 0; i < F; i++) f[b * wide + i] = T(activation(sums[b * stride + i] + bias[i], gelu));
        });
    }

public:
    // Scratch has `room` rows in every pass, because the zeros that fill up words must stay in place.
    Pass(const Network& net, int64_t first, int64_t B, float* x, float* scratch, int64_t room, bool ahead = false)
        : net(net), first(first), B(B), ahead(ahead), x(x + first * net.width) {
        sums = scratch;
        h = reinterpret_cast<T*>(sums + room * rows_of(net.widest));
        y = h + room * narrow;
        f = y + room * mixed;
        numbers = f + room * wide;
        middle = numbers + room * seen;
    }

    void run(int64_t position, float* out) {
        if (net.around.slots) look_around(position);
        if (net.tables.channels) look_up(position);
        for (int64_t b = 0; b < B; b++)
            for (int64_t i = 0; i < D; i++) h[b * narrow + i] = T(x[b * D + i]);
        if (net.first_gain) join(false, nullptr, net.first_gain, net.first_shift);
        for (int64_t index = 0; index < net.layers; index++) {
            const Layer& layer = net.layer[index];
            multiply(h, narrow, layer.input, H * (2 * K + V));
            mix(layer);
            multiply(y, mixed, layer.output, D);
            join(true, layer.output_bias, layer.mid_gain, layer.mid_shift);
            multiply(h, narrow, layer.up, F);
            activate(layer.up_bias);
            multiply(f, wide, layer.down, D);
            join(true, layer.down_bias, layer.end_gain, layer.end_shift);
        }
        if (net.last_gain) join(false, nullptr, net.last_gain, net.last_shift);
        multiply(h, narrow, net.head, net.outputs);
        for (int64_t b = 0; b < B; b++)
            for (int64_t i = 0; i < net.outputs; i++)
                out[(first + b) * net.outputs + i] = sums[b * rows_of(net.outputs) + i] + net.head_bias[i];
    }
};

}  // namespace
