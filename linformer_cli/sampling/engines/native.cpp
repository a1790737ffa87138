// One step of a model with `linear` attention, for the `native` engine (native.py); compiled on first use.
//
// Letters as everywhere: B images, H heads, K and V widths of keys and values; D the width of the model. All arrays are
// row-major. Weights and the inputs of products are float or bfloat16 (T); the residual stream, sums and states float.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "drawing.h"
#include "feature_maps.h"
#include "numbers.h"
#include "products.h"

namespace {

// Within 1.5e-7 of the error function (Abramowitz and Stegun 7.1.26), which the compiler can vectorise.
inline float error_function(float x) {
    float magnitude = std::fabs(x);
    float t = 1 / (1 + 0.3275911f * magnitude);
    float polynomial = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    float value = 1 - polynomial * std::exp(-magnitude * magnitude);
    return x < 0 ? -value : value;
}

inline float activation(float x, bool gelu) {
    return gelu ? 0.5f * x * (1 + error_function(x * 0.70710678f)) : (x > 0 ? x : 0);
}

constexpr int64_t WIDEST_HEAD = 256;

// One pass over the state: it is updated and read while it is in the innermost cache.
template <class T>
void mix_head(int64_t K, int64_t V, const float* q, const float* k, const float* v, const float* q_bias,
              const float* k_bias, const float* v_bias, float* s, float* z, T* y, int map) {
    float query[WIDEST_HEAD], key[WIDEST_HEAD], value[WIDEST_HEAD], numerator[WIDEST_HEAD];
    for (int64_t i = 0; i < K; i++) query[i] = feature(q[i] + q_bias[i], map);
    for (int64_t i = 0; i < K; i++) key[i] = feature(k[i] + k_bias[i], map);
    for (int64_t j = 0; j < V; j++) value[j] = v[j] + v_bias[j];
    for (int64_t j = 0; j < V; j++) numerator[j] = 0;
    float weight = 0;
    for (int64_t i = 0; i < K; i++) {
        z[i] += key[i];
        weight += query[i] * z[i];
    }
    for (int64_t i = 0; i < K; i++) {
        float* row = s + i * V;
        const float in = key[i], out = query[i];
        // The next head's state: processors foresee nothing beyond a page of memory, which is what a head's state takes.
        for (int64_t j = 0; j < V; j += LANES) __builtin_prefetch(row + K * V + j, 1);
#pragma omp simd
        for (int64_t j = 0; j < V; j++) {
            const float sum = row[j] + in * value[j];
            row[j] = sum;
            numerator[j] += out * sum;
        }
    }
    const float scale = weight == 0 ? 0 : 1 / weight;
    for (int64_t j = 0; j < V; j++) y[j] = T(numerator[j] * scale);
}

// `pre`: x <- x + branch + bias and h <- LayerNorm(x); otherwise x <- LayerNorm(x + branch + bias) and h is x.
template <class T>
void join_row(int64_t D, float* x, const float* branch, const float* bias, const float* gain, const float* shift, T* h,
              bool pre) {
    if (branch)
        for (int64_t i = 0; i < D; i++) x[i] += branch[i] + bias[i];
    float total = 0, squares = 0;
    for (int64_t i = 0; i < D; i++) total += x[i];
    const float mean = total / D;
    for (int64_t i = 0; i < D; i++) squares += (x[i] - mean) * (x[i] - mean);
    const float inverse = 1 / std::sqrt(squares / D + 1e-5f);
    for (int64_t i = 0; i < D; i++) {
        const float normed = (x[i] - mean) * inverse * gain[i] + shift[i];
        h[i] = T(normed);
        if (!pre) x[i] = normed;
    }
}

struct Layer {
    const uint32_t *input, *output, *up, *down;  // weights as `multiply` takes them
    const float *input_bias, *output_bias, *up_bias, *down_bias;
    const float *mid_gain, *mid_shift;  // of the norm behind the attention branch
    const float *end_gain, *end_shift;  // and behind the feed-forward branch: for `pre` that of the next layer, or the last
    float *s, *z;
};

// What a model makes of the values around a position, as numbers (surroundings.py); no slots: it does not look.
struct Surroundings {
    int64_t slots, hidden, levels, reach;
    const int32_t* places;  // [T, slots]: in which place of the ring each value stands, -1 for none
    const int16_t* recent;  // [B, reach], the ring of values
    const uint32_t *input, *output;
    const float *input_bias, *output_bias;
};

struct Network {
    int64_t batch, width, heads, key_width, value_width, feed_forward, layers, outputs;
    int64_t pre, gelu, map, half;  // half: weights are bfloat16
    int64_t shares;                 // into how many the images are shared out; see `step`
    int64_t widest, scratch_width;  // rows of the widest product; floats of scratch, zero at first, for each image
    const Layer* layer;
    const float *first_gain, *first_shift;  // of the norm before all layers; null where there is none
    const float *last_gain, *last_shift;    // and behind them all, after the last layer's own; null where there is none
    Surroundings around;
    const uint32_t* head;
    const float* head_bias;
    float* scratch;
};

inline int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// How many rows the weights of a product have, zeros included: whole tiles.
constexpr int64_t TILE_ROWS = 64;
static_assert(TILE_ROWS % (PANELS * LANES) == 0, "");
inline int64_t rows_of(int64_t rows) { return round_up(rows, TILE_ROWS); }

// `body` of every index below `count`, shared out among the threads or not.
template <class Body>
inline void spread(bool among_threads, int64_t count, Body body) {
    if (!among_threads) {
        for (int64_t index = 0; index < count; index++) body(index);
        return;
    }
#pragma omp parallel for schedule(static)
    for (int64_t index = 0; index < count; index++) body(index);
}

// Some images through all layers, with scratch of their own.
template <class T>
class Pass {
    const Network& net;
    const int64_t first, B;  // the images
    const int64_t D = net.width, F = net.feed_forward, H = net.heads, K = net.key_width, V = net.value_width;
    // Inputs of products h [B, narrow], y [B, mixed] and f [B, wide]: vectors, heads' values, and what is between the
    // layers of feed-forward, each in whole words.
    const int64_t narrow = round_up(D, PER_WORD<T>), mixed = round_up(H * V, PER_WORD<T>);
    const int64_t wide = round_up(F, PER_WORD<T>);
    T *h, *y, *f;
    // And of the two layers that look at the surroundings: numbers and what is between the layers.
    const int64_t seen = round_up(2 * net.around.slots, PER_WORD<T>), between = round_up(net.around.hidden, PER_WORD<T>);
    T *numbers, *middle;
    float *x, *sums;  // the residual stream [B, D], and what a product gave, [B, rows_of(its rows)]
    const bool together = net.shares == 1;  // all threads work on these images

    // sums = inputs [B, columns] times the weights [rows_of(rows) / 16, columns in words, 16], transposed.
    void multiply(const T* inputs, int64_t columns, const uint32_t* weight, int64_t rows) {
        rows = rows_of(rows);
        spread(together && B * columns * rows > 131072, rows / (PANELS * LANES), [&](int64_t tile) {
            const int64_t row = tile * PANELS * LANES;
            multiply_images<T, IMAGES>(B, columns, weight + row * columns / PER_WORD<T>, inputs, sums + row, rows);
        });
    }

    // What lies around each image's position goes into its vector.
    void look_around(int64_t position) {
        const Surroundings& around = net.around;
        const int32_t* places = around.places + position * around.slots;
        for (int64_t b = 0; b < B; b++) {
            const int16_t* recent = around.recent + (first + b) * around.reach;
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

    void mix(const Layer& layer) {
        const int64_t stride = rows_of(H * (2 * K + V));
        const float* bias = layer.input_bias;
        spread(together && B * H * K * V > 65536, B * H, [&](int64_t index) {
            const int64_t b = index / H, head = index % H, place = first * H + index;
            const int64_t q = head * K, k = (H + head) * K, v = 2 * H * K + head * V;
            const float* row = sums + b * stride;
            T* to = y + b * mixed + head * V;
            mix_head(K, V, row + q, row + k, row + v, bias + q, bias + k, bias + v, layer.s + place * K * V,
                     layer.z + place * K, to, static_cast<int>(net.map));
        });
    }

    // What a product gave, if anything, into the residual stream, and the norm behind it.
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
    Pass(const Network& net, int64_t first, int64_t B, float* x, float* scratch)
        : net(net), first(first), B(B), x(x + first * net.width) {
        sums = scratch;
        h = reinterpret_cast<T*>(sums + B * rows_of(net.widest));
        y = h + B * narrow;
        f = y + B * mixed;
        numbers = f + B * wide;
        middle = numbers + B * seen;
    }

    void run(int64_t position, float* out) {
        if (net.around.slots) look_around(position);
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

// Few images are one pass, on whose every product the threads work together. Many are shared out: each thread takes its
// images through all layers, waits for none, and finds what it made before in its own cache.
template <class T>
void step(const Network& net, int64_t position, float* x, float* out) {
    if (net.shares == 1) {
        Pass<T>(net, 0, net.batch, x, net.scratch).run(position, out);
        return;
    }
    const int64_t share = (net.batch + net.shares - 1) / net.shares;
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < net.batch; first += share) {
        const int64_t count = net.batch - first < share ? net.batch - first : share;
        Pass<T>(net, first, count, x, net.scratch + first * net.scratch_width).run(position, out);
    }
}

}  // namespace

extern "C" {

// x [B, D] += the tables' rows of the values around each image's position, and what the position itself adds.
// `recent` [B, reach] is a ring of values; `slots` [sources] says where in it each source stands, -1 for none.
void lintx_embed(int64_t B, int64_t D, int64_t sources, int64_t reach, int64_t levels, const int32_t* slots,
                 const int16_t* recent, const float* table, const float* place, float* x) {
    for (int64_t b = 0; b < B; b++) {
        float* row = x + b * D;
        std::memcpy(row, place, D * sizeof(float));
        for (int64_t source = 0; source < sources; source++) {
            const int64_t value = slots[source] < 0 ? levels : recent[b * reach + slots[source]];
            const float* vector = table + (source * (levels + 1) + value) * D;
            for (int64_t i = 0; i < D; i++) row[i] += vector[i];
        }
    }
}

// Values drawn by inversion from the softmax of logits [B, levels], with uniforms in [0, 1).
void lintx_draw_categorical(int64_t B, int64_t levels, const float* logits, const double* uniforms, int64_t* values) {
    for (int64_t b = 0; b < B; b++) values[b] = invert(levels, logits + b * levels, uniforms[b], nullptr);
}

// Values of a mixture of K logistics with parameters [B, 3 K]: a component, then its logistic by inversion, then the bin.
void lintx_draw_mixture(int64_t B, int64_t K, int64_t levels, double lowest, double highest, const float* parameters,
                        const double* uniforms, int64_t* values) {
    for (int64_t b = 0; b < B; b++) {
        const float* row = parameters + b * 3 * K;
        double place;
        const int64_t component = invert(K, row, uniforms[b], &place);
        place = place < 1e-12 ? 1e-12 : place > 1 - 1e-12 ? 1 - 1e-12 : place;
        double log_scale = row[2 * K + component];
        log_scale = log_scale < lowest ? lowest : log_scale > highest ? highest : log_scale;
        const double x = row[K + component] + std::exp(log_scale) * std::log(place / (1 - place));
        values[b] = nearest_value((x + 1) * (0.5 * (levels - 1)), levels);
    }
}

// The whole network: x [B, D] is embedded already and is changed; the head's parameters go to `out` [B, outputs].
void lintx_step(const Network* net, int64_t position, float* x, float* out) {
    if (net->half) step<bfloat16>(*net, position, x, out);
    else step<float>(*net, position, x, out);
}
}
