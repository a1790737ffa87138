// One step of a model with `linear` attention, for the `native` engine (native.py); compiled on first use.
//
// Letters as everywhere: B images, H heads, K and V widths of keys and values; D the width of the model. All arrays are
// row-major. Weights of products and their inputs are float or bfloat16 (T); the residual stream, sums, states and all
// that is looked up in tables float.

#include <algorithm>
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

// One pass over the state: it is updated and read while it is in the innermost cache. `key` [K] and `value` [V] become
// what the state was updated with.
template <class T>
void mix_head(int64_t K, int64_t V, const float* q, const float* k, const float* v, const float* q_bias,
              const float* k_bias, const float* v_bias, float* s, float* z, float* key, float* value, T* y, int map) {
    float query[WIDEST_HEAD], numerator[WIDEST_HEAD];
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
    const double scale = reciprocal(weight);
    for (int64_t j = 0; j < V; j++) y[j] = T(static_cast<float>(numerator[j] * scale));
}

// The update of `mix_head` alone, to the last bit.
void add_to_state(int64_t K, int64_t V, const float* key, const float* value, float* s, float* z) {
    for (int64_t i = 0; i < K; i++) {
        z[i] += key[i];
        float* row = s + i * V;
        const float in = key[i];
#pragma omp simd
        for (int64_t j = 0; j < V; j++) row[j] += in * value[j];
    }
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
    float* kept;  // [H, window, K + V], the keys and values of a pass that looks ahead
};

// What a model makes of the values around a position, as numbers (surroundings.py); no slots: it does not look.
struct Surroundings {
    int64_t slots, hidden, levels, reach;
    const int32_t* places;  // [T, slots]: in which place of the ring each value stands, -1 for none
    const int16_t* recent;  // [B, reach], the ring of values
    const uint32_t *input, *output;
    const float *input_bias, *output_bias;
};

// Vectors for the values of several neighbours together (neighbour_tables.py); no channels: there are none.
struct Tables {
    int64_t channels, levels, reach;
    const int32_t* places;       // [T, NEIGHBOURS]: in which place of the ring each value stands, -1 for none
    const int16_t* recent;       // [B, reach], the ring of values
    const float* rows;           // [channels, all rows of the tables, ROW_WIDTH]
    const float *weight, *bias;  // [TABLES * ROW_WIDTH, D] and [D], of what reads a row of each table
};

constexpr int64_t NEIGHBOURS = 4, ROW_WIDTH = 8, TABLES = 3, TABLE_ROWS[TABLES] = {1 << 16, 1 << 15, 1 << 14};

// The rows that the values of a position pick, one of each table: `find_rows` of neighbour_tables.py.
inline void find_rows(const Tables& tables, const int32_t* places, const int16_t* recent, int64_t channel,
                      const float** rows) {
    uint64_t values[NEIGHBOURS], keys[TABLES], key = 0;
    for (int64_t n = 0; n < NEIGHBOURS; n++) values[n] = places[n] < 0 ? tables.levels : recent[places[n]];
    keys[0] = std::min<uint64_t>(values[0], 255) * 256 + std::min<uint64_t>(values[1], 255);
    for (int64_t n = 0; n < NEIGHBOURS; n++) {
        key = (key * 257 + values[n] + 1) * 0x1E3779B97F4A7C15 & ((uint64_t(1) << 61) - 1);
        key ^= key >> 31;
        if (n >= 2) keys[n - 1] = (key ^ (key >> 17)) & (TABLE_ROWS[n - 1] - 1);
    }
    const float* table = tables.rows + channel * (TABLE_ROWS[0] + TABLE_ROWS[1] + TABLE_ROWS[2]) * ROW_WIDTH;
    for (int64_t n = 0; n < TABLES; n++) {
        rows[n] = table + keys[n] * ROW_WIDTH;
        table += TABLE_ROWS[n] * ROW_WIDTH;
    }
}

struct Network {
    int64_t batch, width, heads, key_width, value_width, feed_forward, layers, outputs;
    int64_t pre, gelu, map, half;  // half: weights are bfloat16
    int64_t shares;                 // into how many the images are shared out; see `step`
    int64_t widest, scratch_width;  // rows of the widest product; floats of scratch, zero at first, for each image
    const Layer* layer;
    const float *first_gain, *first_shift;  // of the norm before all layers; null where there is none
    const float *last_gain, *last_shift;    // and behind them all, after the last layer's own; null where there is none
    Surroundings around;
    Tables tables;
    const uint32_t* head;
    const float* head_bias;
    float* scratch;
    int64_t window;  // how many positions of one image a pass may take at once
    float* trial;    // [H, K, V + 1], the state of a layer while it does
};

// A single image that is drawn by looking ahead: how its tokens become vectors, what is drawn, and how far it has come.
struct Drawing {
    int64_t sources, reach, levels, row;  // of tables a position sees; of the ring; a row of the image has so many values
    const int32_t* slots;                 // [T, sources], as `lintx_embed` takes them, and so the next three
    int16_t* recent;
    const float *table, *place;
    const float* label;  // [D], the vector of the image's class, or null
    int64_t mixtures;    // 0: the head is categorical
    double lowest, highest;  // of a logistic's log scale
    const double* uniforms;  // [count], one for each value
    int64_t* values;         // [count]: the known ones, guesses up to `guessed`, and nothing yet
    float *x, *out;          // scratch, [window, D] and [window, outputs]
    int64_t count, known, guessed;
    int64_t first;     // position of the token that holds values[0]
    int64_t rows;      // how many positions the next pass takes
    int64_t passes;    // so far
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

// Some images through all layers, with scratch of their own; or, looking `ahead`, successive positions of one image,
// whose keys and values are then kept, and the state is not changed.
template <class T>
class Pass {
    const Network& net;
    const int64_t first, B;  // the images
    const bool ahead;
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

    // What the tables have for the values beside each image's position goes into its vector.
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

    // One head of one row, on the state `s` and `z`.
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
    // `room` is for how many rows there is scratch: the same at each pass over it, as its zeros must stay where they are.
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

// Few images are one pass, on whose every product the threads work together. Many are shared out: each thread takes its
// images through all layers, waits for none, and finds what it made before in its own cache.
template <class T>
void step(const Network& net, int64_t position, float* x, float* out) {
    if (net.shares == 1) {
        Pass<T>(net, 0, net.batch, x, net.scratch, net.batch * net.window).run(position, out);
        return;
    }
    const int64_t share = (net.batch + net.shares - 1) / net.shares;
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < net.batch; first += share) {
        const int64_t count = net.batch - first < share ? net.batch - first : share;
        Pass<T>(net, first, count, x, net.scratch + first * net.scratch_width, count).run(position, out);
    }
}

// Row b of x [B, D] becomes the vector of an image's token: what its position adds, and the tables' rows of the values
// around it.
void embed(int64_t D, int64_t sources, int64_t levels, const int32_t* slots, const int16_t* recent, const float* table,
           const float* place, float* x) {
    std::memcpy(x, place, D * sizeof(float));
    for (int64_t source = 0; source < sources; source++) {
        const int64_t value = slots[source] < 0 ? levels : recent[slots[source]];
        const float* vector = table + (source * (levels + 1) + value) * D;
        for (int64_t i = 0; i < D; i++) x[i] += vector[i];
    }
}

int64_t draw(const Drawing& drawing, const float* parameters, double uniform) {
    if (!drawing.mixtures) return invert(drawing.levels, parameters, uniform, nullptr);
    return draw_mixture(drawing.mixtures, drawing.levels, drawing.lowest, drawing.highest, parameters, uniform);
}

// The next values of one image. All positions of a window are computed as if the guesses were right: as its random number
// is fixed, each gives one value, which is the image's as long as all guesses before it are. The first always is.
template <class T>
void look_ahead(const Network& net, Drawing& drawing) {
    const int64_t D = net.width, known = drawing.known, left = drawing.count - known;
    const int64_t rows = left < drawing.rows ? left : drawing.rows;
    const int64_t start = drawing.first + known - 1;  // of the token with the last known value, the next to step with
    int64_t* next = drawing.values + known;
    // The value above is the best guess that costs nothing; a wrong pass leaves better ones.
    for (int64_t& index = drawing.guessed; index < known + rows - 1; index++)
        drawing.values[index] = drawing.values[index - (index < drawing.row ? 1 : drawing.row)];
    for (int64_t r = 0; r < rows; r++)
        drawing.recent[(start + r - 1) % drawing.reach] = static_cast<int16_t>(next[r - 1]);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t position = start + r;
        float* row = drawing.x + r * D;
        embed(D, drawing.sources, drawing.levels, drawing.slots + position * drawing.sources, drawing.recent,
              drawing.table, drawing.place + position * D, row);
        if (drawing.label)
            for (int64_t i = 0; i < D; i++) row[i] += drawing.label[i];
    }
    Pass<T>(net, 0, rows, drawing.x, net.scratch, net.window, true).run(start, drawing.out);
    int64_t right = 0;
    bool sure = true;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t guess = next[r];  // behind the last row it means nothing, and nothing follows
        next[r] = draw(drawing, drawing.out + r * net.outputs, drawing.uniforms[known + r]);
        right += sure;
        sure = sure && next[r] == guess;
    }
    const int64_t H = net.heads, K = net.key_width, V = net.value_width;
    spread(net.layers * H * K * V * right > 65536, net.layers * H, [&](int64_t index) {
        const Layer& layer = net.layer[index / H];
        const int64_t head = index % H;
        for (int64_t r = 0; r < right; r++) {
            const float* key = layer.kept + (head * net.window + r) * (K + V);
            add_to_state(K, V, key, key + K, layer.s + head * K * V, layer.z + head * K);
        }
    });
    drawing.guessed = known + rows > drawing.guessed ? known + rows : drawing.guessed;
    drawing.known += right;
    drawing.passes++;
    // As far as it went well, and a little farther.
    drawing.rows = right < rows ? right + 1 : 2 * rows < net.window ? 2 * rows : net.window;
}

}  // namespace

extern "C" {

// Row by row `embed`: `recent` [B, reach] is a ring of values, `slots` [sources] says where in it each source stands, -1 for
// none, and `table` [sources, levels + 1, D] has a vector for every value of each, and for none.
void lintx_embed(int64_t B, int64_t D, int64_t sources, int64_t reach, int64_t levels, const int32_t* slots,
                 const int16_t* recent, const float* table, const float* place, float* x) {
    for (int64_t b = 0; b < B; b++) embed(D, sources, levels, slots, recent + b * reach, table, place, x + b * D);
}

// Values drawn by inversion from the softmax of logits [B, levels], with uniforms in [0, 1).
void lintx_draw_categorical(int64_t B, int64_t levels, const float* logits, const double* uniforms, int64_t* values) {
    for (int64_t b = 0; b < B; b++) values[b] = invert(levels, logits + b * levels, uniforms[b], nullptr);
}

// Values of mixtures of K logistics with parameters [B, 3 K].
void lintx_draw_mixture(int64_t B, int64_t K, int64_t levels, double lowest, double highest, const float* parameters,
                        const double* uniforms, int64_t* values) {
    for (int64_t b = 0; b < B; b++)
        values[b] = draw_mixture(K, levels, lowest, highest, parameters + b * 3 * K, uniforms[b]);
}

// The whole network: x [B, D] is embedded already and is changed; the head's parameters go to `out` [B, outputs].
void lintx_step(const Network* net, int64_t position, float* x, float* out) {
    if (net->half) step<bfloat16>(*net, position, x, out);
    else step<float>(*net, position, x, out);
}

// Looks ahead so many times, or until all values of the image are known.
void lintx_look_ahead(const Network* net, Drawing* drawing, int64_t passes) {
    for (; passes > 0 && drawing->known < drawing->count; passes--) {
        if (net->half) look_ahead<bfloat16>(*net, *drawing);
        else look_ahead<float>(*net, *drawing);
    }
}
}
