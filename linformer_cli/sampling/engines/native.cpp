// One step of a model with `linear` attention, for the `native` engine (native.py); compiled on first use.
//
// Axes: B images, H heads, K and V widths of keys and values, D width of the model. All arrays are row-major. The
// weights of products and their inputs are float or bfloat16 (T). Everything else is float: the residual stream, sums,
// states and tables.

#include <cstdint>
#include <cstring>

#include "drawing.h"
#include "network_pass.h"

namespace {

// A few images form one pass, and all threads share each of its products. Many images are divided: each thread takes
// its own images through all layers, without waiting, and keeps its intermediate results in its own cache.
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

// Writes the vector of an image's token to x [D]: the vector of its position plus a row of each table.
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

// Draws the next values of one image. All positions of a window are computed as if the guesses were right. Given its
// random number, each position yields one value, which is right if all earlier guesses are. The first is always right.
template <class T>
void look_ahead(const Network& net, Drawing& drawing) {
    const int64_t D = net.width, known = drawing.known, left = drawing.count - known;
    const int64_t rows = left < drawing.rows ? left : drawing.rows;
    const int64_t start = drawing.first + known - 1;  // position of the next token, which holds the last known value
    int64_t* next = drawing.values + known;
    // The first guess is the value above, which costs nothing. Values drawn after a wrong guess are better guesses.
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
        const int64_t guess = next[r];  // undefined and unused in the last row
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
    // The next pass: one position more than were right, or twice as many if all were right.
    drawing.rows = right < rows ? right + 1 : 2 * rows < net.window ? 2 * rows : net.window;
}

}  // namespace

extern "C" {

// `embed` for each row of x [B, D]: `recent` [B, reach] is a ring of values, `slots` [sources] the slot of each source
// in it, -1 for none, and `table` [sources, levels + 1, D] has a vector for each value of a source and for none.
void lintx_embed(int64_t B, int64_t D, int64_t sources, int64_t reach, int64_t levels, const int32_t* slots,
                 const int16_t* recent, const float* table, const float* place, float* x) {
    for (int64_t b = 0; b < B; b++) embed(D, sources, levels, slots, recent + b * reach, table, place, x + b * D);
}

// Draws values by inversion from the softmax of logits [B, levels], with uniforms in [0, 1).
void lintx_draw_categorical(int64_t B, int64_t levels, const float* logits, const double* uniforms, int64_t* values) {
    for (int64_t b = 0; b < B; b++) values[b] = invert(levels, logits + b * levels, uniforms[b], nullptr);
}

// Draws values of mixtures of K logistics with parameters [B, 3 K].
void lintx_draw_mixture(int64_t B, int64_t K, int64_t levels, double lowest, double highest, const float* parameters,
                        const double* uniforms, int64_t* values) {
    for (int64_t b = 0; b < B; b++)
        values[b] = draw_mixture(K, levels, lowest, highest, parameters + b * 3 * K, uniforms[b]);
}

// Runs the whole network: x [B, D] holds embedded tokens and is overwritten; `out` [B, outputs] gets head parameters.
void lintx_step(const Network* net, int64_t position, float* x, float* out) {
    if (net->half) step<bfloat16>(*net, position, x, out);
    else step<float>(*net, position, x, out);
}

// Runs `passes` look-ahead passes, or fewer once all values of the image are known.
void lintx_look_ahead(const Network* net, Drawing* drawing, int64_t passes) {
    for (; passes > 0 && drawing->known < drawing->count; passes--) {
        if (net->half) look_ahead<bfloat16>(*net, *drawing);
        else look_ahead<float>(*net, *drawing);
    }
}
}
