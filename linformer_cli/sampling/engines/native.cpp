// One step of a model with `linear` attention, for the `native` engine (native.py); compiled on first use.
//
// `lintx_step` is the whole network but the embedding. Where torch multiplies (many images in bfloat16), `lintx_mix`,
// `lintx_join` and `lintx_activate` are what lies between two products.
//
// Letters as everywhere: B images, H heads, K and V widths of keys and values; D the width of the model. All arrays are
// dense and row-major. Weights and activations are float or bfloat16 (T), the residual stream, sums and states float.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "numbers.h"

namespace {

enum FeatureMap { ELU = 0, RELU = 1 };

inline float feature(float x, int map) {
    float positive = x > 0 ? x : 0;
    return map == RELU ? positive : std::exp(x < 0 ? x : 0) + positive;
}

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
void mix_head(int64_t K, int64_t V, const T* q, const T* k, const T* v, const float* q_bias, const float* k_bias,
              const float* v_bias, float* s, float* z, T* y, int map) {
    float query[WIDEST_HEAD], key[WIDEST_HEAD], value[WIDEST_HEAD], numerator[WIDEST_HEAD];
    for (int64_t i = 0; i < K; i++) query[i] = feature(static_cast<float>(q[i]) + q_bias[i], map);
    for (int64_t i = 0; i < K; i++) key[i] = feature(static_cast<float>(k[i]) + k_bias[i], map);
    for (int64_t j = 0; j < V; j++) value[j] = static_cast<float>(v[j]) + v_bias[j];
    for (int64_t j = 0; j < V; j++) numerator[j] = 0;
    float weight = 0;
    for (int64_t i = 0; i < K; i++) {
        z[i] += key[i];
        weight += query[i] * z[i];
    }
    for (int64_t i = 0; i < K; i++) {
        float* row = s + i * V;
        const float in = key[i], out = query[i];
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

template <class T>
void mix(int64_t B, int64_t H, int64_t K, int64_t V, const T* projected, const float* bias, float* s, float* z, T* y,
         int map) {
    const int64_t width = H * (2 * K + V);
#pragma omp parallel for schedule(static) if (B * H * K * V > 65536)
    for (int64_t index = 0; index < B * H; index++) {
        const int64_t b = index / H, h = index % H;
        const T* row = projected + b * width;
        mix_head(K, V, row + h * K, row + (H + h) * K, row + 2 * H * K + h * V, bias + h * K, bias + (H + h) * K,
                 bias + 2 * H * K + h * V, s + index * K * V, z + index * K, y + index * V, map);
    }
}

// `pre`: x <- x + branch + bias and h <- LayerNorm(x); otherwise x <- LayerNorm(x + branch + bias) and h is x.
template <class T>
void join_row(int64_t D, float* x, const T* branch, const float* bias, const float* gain, const float* shift, T* h,
              bool pre) {
    if (branch)
        for (int64_t i = 0; i < D; i++) x[i] += static_cast<float>(branch[i]) + bias[i];
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

template <class T>
void join(int64_t B, int64_t D, float* x, const T* branch, const float* bias, const float* gain, const float* shift,
          T* h, bool pre) {
#pragma omp parallel for schedule(static) if (B * D > 32768)
    for (int64_t b = 0; b < B; b++)
        join_row(D, x + b * D, branch ? branch + b * D : nullptr, bias, gain, shift, h + b * D, pre);
}

template <class T>
void activate(int64_t B, int64_t F, T* f, const float* bias, bool gelu) {
#pragma omp parallel for schedule(static) if (B * F > 32768)
    for (int64_t b = 0; b < B; b++)
        for (int64_t i = 0; i < F; i++) f[b * F + i] = T(activation(static_cast<float>(f[b * F + i]) + bias[i], gelu));
}

// Sixteen lanes, which the compiler cuts to what the processor has.
constexpr int LANES = 16;
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

inline floats load(const float* from) {
    floats values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

inline floats load(const bfloat16* from) {
    halves bits;
    std::memcpy(&bits, from, sizeof bits);
    const words wide = __builtin_convertvector(bits, words) << 16;
    floats values;
    std::memcpy(&values, &wide, sizeof values);
    return values;
}

// R rows of the weights with N images: every load serves several products.
template <class T, int R, int N>
void multiply_block(int64_t columns, int64_t rows, const float* x, const T* weight, float* y) {
    floats sums[R][N] = {};
    int64_t i = 0;
    for (; i + LANES <= columns; i += LANES) {
        floats inputs[N];
        for (int n = 0; n < N; n++) inputs[n] = load(x + n * columns + i);
        for (int r = 0; r < R; r++) {
            const floats w = load(weight + r * columns + i);
            for (int n = 0; n < N; n++) sums[r][n] += w * inputs[n];
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) {
            float total = 0;
            for (int lane = 0; lane < LANES; lane++) total += sums[r][n][lane];
            for (int64_t rest = i; rest < columns; rest++)
                total += x[n * columns + rest] * static_cast<float>(weight[r * columns + rest]);
            y[n * rows + r] = total;
        }
}

template <class T, int R>
void multiply_rows(int64_t B, int64_t columns, int64_t rows, const float* x, const T* weight, float* y) {
    int64_t b = 0;
    for (; b + 4 <= B; b += 4) multiply_block<T, R, 4>(columns, rows, x + b * columns, weight, y + b * rows);
    for (; b < B; b++) multiply_block<T, R, 1>(columns, rows, x + b * columns, weight, y + b * rows);
}

// y [B, rows] = x [B, columns] times W [rows, columns] transposed.
template <class T>
void multiply(int64_t B, int64_t columns, int64_t rows, const float* x, const T* weight, float* y) {
    const int64_t groups = rows / 4;
#pragma omp parallel for schedule(static) if (B * columns * rows > 131072)
    for (int64_t group = 0; group < groups; group++)
        multiply_rows<T, 4>(B, columns, rows, x, weight + 4 * group * columns, y + 4 * group);
    for (int64_t row = 4 * groups; row < rows; row++)
        multiply_rows<T, 1>(B, columns, rows, x, weight + row * columns, y + row);
}

constexpr int64_t MOST_LEVELS = 1024;

// The index whose share of softmax(logits) holds `uniform`, and where in its share that lies, if asked for.
int64_t invert(int64_t count, const float* logits, double uniform, double* place) {
    double shares[MOST_LEVELS];
    float most = logits[0];
    for (int64_t i = 1; i < count; i++) most = logits[i] > most ? logits[i] : most;
    for (int64_t i = 0; i < count; i++) shares[i] = std::exp(static_cast<double>(logits[i] - most));
    double total = 0;
    for (int64_t i = 0; i < count; i++) total += shares[i];
    // Below the total whatever the rounding, so that the search ends at a value that has a share.
    const double target = uniform * total;
    double before = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < count; i++) {
        if (shares[i] <= 0) continue;
        last = i;
        if (before + shares[i] > target) break;
        before += shares[i];
    }
    if (place) *place = (target - before) / shares[last];
    return last;
}

// The value 0 .. levels - 1 nearest to `x`, whatever x is. Fast math lets the compiler forget that a NaN passes every
// bound, so the integer that it becomes is bounded too, and volatile, lest that be deduced to be needless.
inline int64_t nearest_value(double x, int64_t levels) {
    const double most = static_cast<double>(levels - 1);
    const volatile int64_t nearest = static_cast<int64_t>(std::nearbyint(x < 0 ? 0 : x > most ? most : x));
    const int64_t value = nearest;
    return value < 0 ? 0 : value < levels ? value : levels - 1;
}

}  // namespace

extern "C" {

struct Layer {
    const void *input, *output, *up, *down;
    const float *input_bias, *output_bias, *up_bias, *down_bias;
    const float *mid_gain, *mid_shift;  // of the norm behind the attention branch
    const float *end_gain, *end_shift;  // and behind the feed-forward branch: for `pre` that of the next layer, or the last
    float *s, *z;
};

struct Network {
    int64_t batch, width, heads, key_width, value_width, feed_forward, layers, outputs;
    int64_t pre, gelu, map, half;  // half: weights are bfloat16
    const Layer* layer;
    const float *first_gain, *first_shift;  // of the norm before all layers; null where there is none
    const float *last_gain, *last_shift;    // and behind them all, after the last layer's own; null where there is none
    const void* head;
    const float* head_bias;
    float* scratch;  // batch x (twice width + the wider of q, k, v together and feed_forward + all heads' values)
};

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

// What lies between the products of many images in bfloat16.
void lintx_mix(int64_t B, int64_t H, int64_t K, int64_t V, const bfloat16* projected, const float* bias, float* s,
               float* z, bfloat16* y, int64_t map) {
    mix(B, H, K, V, projected, bias, s, z, y, static_cast<int>(map));
}

void lintx_join(int64_t B, int64_t D, float* x, const bfloat16* branch, const float* bias, const float* gain,
                const float* shift, bfloat16* h, int64_t pre) {
    join(B, D, x, branch, bias, gain, shift, h, pre != 0);
}

void lintx_activate(int64_t B, int64_t F, bfloat16* f, const float* bias, int64_t gelu) {
    activate(B, F, f, bias, gelu != 0);
}

static void multiply_weight(const Network* net, int64_t columns, int64_t rows, const float* x, const void* weight,
                            float* y) {
    if (net->half)
        multiply(net->batch, columns, rows, x, static_cast<const bfloat16*>(weight), y);
    else
        multiply(net->batch, columns, rows, x, static_cast<const float*>(weight), y);
}

// The whole network: x [B, D] is embedded already and is changed; the head's parameters go to `out`.
void lintx_step(const Network* net, float* x, float* out) {
    const int64_t B = net->batch, D = net->width, F = net->feed_forward, H = net->heads;
    const int64_t K = net->key_width, V = net->value_width, projected = H * (2 * K + V);
    float* h = net->scratch;
    float* wide = h + B * D;
    float* y = wide + B * (projected > F ? projected : F);
    float* branch = y + B * H * V;
    const bool pre = net->pre != 0;
    if (net->first_gain) join<float>(B, D, x, nullptr, nullptr, net->first_gain, net->first_shift, h, pre);
    else std::memcpy(h, x, B * D * sizeof(float));
    for (int64_t index = 0; index < net->layers; index++) {
        const Layer& layer = net->layer[index];
        multiply_weight(net, D, projected, h, layer.input, wide);
        mix(B, H, K, V, wide, layer.input_bias, layer.s, layer.z, y, static_cast<int>(net->map));
        multiply_weight(net, H * V, D, y, layer.output, branch);
        join(B, D, x, branch, layer.output_bias, layer.mid_gain, layer.mid_shift, h, pre);
        multiply_weight(net, D, F, h, layer.up, wide);
        activate(B, F, wide, layer.up_bias, net->gelu != 0);
        multiply_weight(net, F, D, wide, layer.down, branch);
        join(B, D, x, branch, layer.down_bias, layer.end_gain, layer.end_shift, h, pre);
    }
    if (net->last_gain) join<float>(B, D, x, nullptr, nullptr, net->last_gain, net->last_shift, h, pre);
    multiply_weight(net, D, net->outputs, h, net->head, out);
    for (int64_t b = 0; b < B; b++)
        for (int64_t i = 0; i < net->outputs; i++) out[b * net->outputs + i] += net->head_bias[i];
}
}
