// x plus a branch after dropout, LayerNorm of this sum, and the gradients, for the CPU; called by dropout.py.
//
// Whether element i is kept depends only on the seed and i. No mask is stored: the backward pass recomputes it.

#include <cmath>
#include <cstdint>
#include <vector>

#include "scan.h"

namespace {

// A 32-bit hash in which every output bit depends on every input bit (the rounds of "lowbias32", Wellons 2018).
inline uint32_t mix(uint32_t word) {
    word = (word ^ (word >> 16)) * 0x7feb352du;
    word = (word ^ (word >> 15)) * 0x846ca68bu;
    return word ^ (word >> 16);
}

// The number of elements that share one 32-bit seed.
constexpr int64_t SHARING = 4096;

struct Dropout {
    int64_t threads, count;
    uint64_t seed;
    double probability;
};

struct Norm {
    int64_t width, pieces;
    double epsilon;
    const float *weight, *bias;
    float *sum, *statistics;  // x plus the branch after dropout; mean and 1 / deviation of each row
    float* y;                 // the normalised sum, or its gradient (null: zeros)
    bfloat16* rounded;        // y rounded (null: not wanted), or its gradient (null: zeros)
    float* of_parameters;     // [pieces, 2, width]: the gradients of weight and bias from each piece of the rows
};

// The arguments are copies, because the variables that a lambda captures could change with every store, as far as the
// compiler knows. It would then not vectorise the loop.
template <class F>
void visit_block(int64_t first, int64_t last, uint32_t start, uint32_t key, uint32_t limit, float scale, F visit) {
    for (int64_t i = first; i < last; i++)
        visit(i, mix(key ^ (static_cast<uint32_t>(i) - start)) >= limit ? scale : 0.0f);
}

// Calls visit(i, factor) for elements from `first` to `last`. The factor is 0 for dropped elements.
template <class F>
void visit_elements(const Dropout& mask, int64_t first, int64_t last, F visit) {
    const uint32_t limit = static_cast<uint32_t>(std::ldexp(mask.probability, 32));
    const float scale = static_cast<float>(1 / (1 - mask.probability));
    while (first < last) {
        const int64_t block = first / SHARING, end = std::min(last, (block + 1) * SHARING);
        const uint32_t low = mix(static_cast<uint32_t>(mask.seed) + mix(static_cast<uint32_t>(block)));
        const uint32_t key = mix(low ^ mix(static_cast<uint32_t>(mask.seed >> 32)));
        visit_block(first, end, static_cast<uint32_t>(block * SHARING), key, limit, scale, visit);
        first = end;
    }
}

template <class E>
void add(const Dropout& mask, int64_t first, int64_t last, const float* x, const E* branch, float* sum) {
    visit_elements(mask, first, last,
                   [=](int64_t i, float scale) { sum[i] = x[i] + static_cast<float>(branch[i]) * scale; });
}

template <class E>
void differentiate(const Dropout& mask, int64_t first, int64_t last, const float* gradient, E* of_branch) {
    visit_elements(mask, first, last, [=](int64_t i, float scale) { of_branch[i] = E(gradient[i] * scale); });
}

// Scratch memory for the rows of one thread, padded with zeros to whole vectors.
struct Scratch {
    const int64_t padded;
    std::vector<float> ones, a, b;
    explicit Scratch(int64_t width) : padded(Lanes<float>::pad(width)), ones(padded), a(padded), b(padded) {
        std::fill_n(ones.begin(), width, 1.0f);
    }
    float total(const std::vector<float>& row) const { return dot(padded, row.data(), ones.data()); }
};

void normalise(const Norm& norm, int64_t t, Scratch& scratch) {
    const int64_t width = norm.width;
    const float *sum = norm.sum + t * width, *weight = norm.weight, *bias = norm.bias;
    float *row = scratch.a.data(), *y = norm.y + t * width;
    std::copy_n(sum, width, row);
    const float mean = scratch.total(scratch.a) / static_cast<float>(width);
    for (int64_t i = 0; i < width; i++) row[i] = sum[i] - mean;
    const float variance = dot(scratch.padded, row, row) / static_cast<float>(width);
    const float scale = 1 / std::sqrt(variance + static_cast<float>(norm.epsilon));
    norm.statistics[2 * t] = mean;
    norm.statistics[2 * t + 1] = scale;
    for (int64_t i = 0; i < width; i++) y[i] = row[i] * scale * weight[i] + bias[i];
    if (!norm.rounded) return;
    bfloat16* rounded = norm.rounded + t * width;
    for (int64_t i = 0; i < width; i++) rounded[i] = y[i];
}

// For one row: unit <- the normalised sum before weight and bias. Adds to the gradients of weight and bias, and then
// multiplies `gradient` by the weight.
void apply_weight(int64_t width, const float* sum, float mean, float scale, const float* weight, float* __restrict unit,
                  float* __restrict gradient, float* __restrict of_weight, float* __restrict of_bias) {
    for (int64_t i = 0; i < width; i++) {
        unit[i] = (sum[i] - mean) * scale;
        of_weight[i] += gradient[i] * unit[i];
        of_bias[i] += gradient[i];
        gradient[i] *= weight[i];
    }
}

void add_gradients(int64_t width, const float* of_y, const bfloat16* of_rounded, float* __restrict gradient) {
    if (of_y && of_rounded)
        for (int64_t i = 0; i < width; i++) gradient[i] = of_y[i] + static_cast<float>(of_rounded[i]);
    else
        for (int64_t i = 0; i < width; i++)
            gradient[i] = of_y ? of_y[i] : of_rounded ? static_cast<float>(of_rounded[i]) : 0;
}

// Writes the gradient of the sum, and adds to the gradients of weight and bias, which are adjacent.
void differentiate_norm(const Norm& norm, int64_t t, float* of_weight, float* of_sum, Scratch& scratch) {
    const int64_t width = norm.width, start = t * width;
    const float mean = norm.statistics[2 * t], scale = norm.statistics[2 * t + 1];
    float *gradient = scratch.a.data(), *unit = scratch.b.data();
    add_gradients(width, norm.y ? norm.y + start : nullptr, norm.rounded ? norm.rounded + start : nullptr, gradient);
    apply_weight(width, norm.sum + start, mean, scale, norm.weight, unit, gradient, of_weight, of_weight + width);
    const float level = scratch.total(scratch.a) / static_cast<float>(width);
    const float slope = dot(scratch.padded, gradient, unit) / static_cast<float>(width);
    float* row = of_sum + start;
    for (int64_t i = 0; i < width; i++) row[i] = scale * (gradient[i] - level - unit[i] * slope);
}

// Calls visit(piece, first row, last row, scratch) for groups of rows that stay in the cache. The pieces do not depend
// on the number of threads, so neither do sums over rows.
template <class F>
void visit_rows(const Dropout& mask, const Norm& norm, F visit) {
    const int64_t rows = mask.count / norm.width, group = std::max<int64_t>(1, SHARING / norm.width);
    spread(mask.count > 65536 ? mask.threads : 1, norm.pieces, [=](int64_t piece) {
        Scratch scratch(norm.width);
        const int64_t end = (piece + 1) * rows / norm.pieces;
        for (int64_t t = piece * rows / norm.pieces; t < end; t += group)
            visit(piece, t, std::min(end, t + group), scratch);
    });
}

template <class E>
void add_and_normalise(const Dropout& mask, const Norm& norm, const float* x, const E* branch) {
    visit_rows(mask, norm, [=](int64_t, int64_t first, int64_t last, Scratch& scratch) {
        add(mask, first * norm.width, last * norm.width, x, branch, norm.sum);
        for (int64_t t = first; t < last; t++) normalise(norm, t, scratch);
    });
}

template <class E>
void differentiate_both(const Dropout& mask, const Norm& norm, float* of_x, E* of_branch) {
    visit_rows(mask, norm, [=](int64_t piece, int64_t first, int64_t last, Scratch& scratch) {
        float* of_parameters = norm.of_parameters + piece * 2 * norm.width;
        for (int64_t t = first; t < last; t++) differentiate_norm(norm, t, of_parameters, of_x, scratch);
        differentiate(mask, first * norm.width, last * norm.width, of_x, of_branch);
    });
}

template <class F>
void for_blocks(const Dropout& mask, F visit) {
    spread(mask.count > 65536 ? mask.threads : 1, (mask.count + SHARING - 1) / SHARING,
           [=](int64_t block) { visit(block * SHARING, std::min(mask.count, (block + 1) * SHARING)); });
}

}  // namespace

extern "C" {

void lintx_dropout_add(const Dropout* mask, int64_t half, const float* x, const void* branch, float* sum) {
    for_blocks(*mask, [=](int64_t first, int64_t last) {
        if (half) add(*mask, first, last, x, static_cast<const bfloat16*>(branch), sum);
        else add(*mask, first, last, x, static_cast<const float*>(branch), sum);
    });
}

void lintx_dropout_gradient(const Dropout* mask, int64_t half, const float* gradient, void* of_branch) {
    for_blocks(*mask, [=](int64_t first, int64_t last) {
        if (half) differentiate(*mask, first, last, gradient, static_cast<bfloat16*>(of_branch));
        else differentiate(*mask, first, last, gradient, static_cast<float*>(of_branch));
    });
}

void lintx_dropout_norm(const Dropout* mask, int64_t half, const Norm* norm, const float* x, const void* branch) {
    if (half) add_and_normalise(*mask, *norm, x, static_cast<const bfloat16*>(branch));
    else add_and_normalise(*mask, *norm, x, static_cast<const float*>(branch));
}

void lintx_dropout_norm_gradient(const Dropout* mask, int64_t half, const Norm* norm, float* of_x, void* of_branch) {
    if (half) differentiate_both(*mask, *norm, of_x, static_cast<bfloat16*>(of_branch));
    else differentiate_both(*mask, *norm, of_x, static_cast<float*>(of_branch));
}
}
