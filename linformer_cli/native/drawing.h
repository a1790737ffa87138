// Draws values with or without filters.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>

#include "inversion.h"

namespace {  // local to the library that includes it: the compiler may inline all of it

// A single image drawn with look-ahead. With guidance, it is two images of the program: with its class, and without.
struct Drawing {
    Head head;
    int64_t ring, reach, output;  // the buffer of recent values, its length, and the buffer of the head's parameters
    int64_t row;                  // values in a row of the image
    const double* uniforms;       // [count], one for each value
    int64_t* values;              // [count]: known values, then guesses up to index `guessed`, then undefined values
    int64_t count, known, guessed;
    int64_t first;   // position of the token that holds values[0]
    int64_t rows;    // positions in the next pass
    int64_t passes;  // passes so far
};

inline double log_sigmoid(double x) { return (x < 0 ? x : 0) - logarithm(1 + exponential(-std::fabs(x))); }

// Replaces numbers x by exp(x / temperature), divided by the largest result.
inline void exponentiate(int64_t count, double* numbers, double temperature) {
    const double most = *std::max_element(numbers, numbers + count);
    for (int64_t i = 0; i < count; i++) numbers[i] = exponential((numbers[i] - most) / temperature);
}

// The logarithm of the probability of a value of a mixture, up to a constant; MixtureHead of heads.py has the formula.
inline double find_log_mass(const Head& head, const float* parameters, int64_t value) {
    const int64_t K = head.mixtures;
    const double bin = 2.0 / static_cast<double>(head.levels - 1), centre = static_cast<double>(value) * bin - 1;
    double logs[MOST_LEVELS];
    for (int64_t n = 0; n < K; n++) {
        const double mean = parameters[K + n], inverse = exponential(-head.bound(parameters[2 * K + n]));
        const double width = bin * inverse;
        const bool first = value == 0, last = value == head.levels - 1;
        logs[n] = parameters[n];
        if (!last) logs[n] += log_sigmoid((centre + bin / 2 - mean) * inverse);
        if (!first) logs[n] += log_sigmoid((mean - centre + bin / 2) * inverse);
        // For a small width, 1 - exp(-width) would lose digits.
        if (!first && !last) logs[n] += logarithm(width < 1e-5 ? width * (1 - width / 2) : 1 - exponential(-width));
    }
    const double most = *std::max_element(logs, logs + K);
    double sum = 0;
    for (int64_t n = 0; n < K; n++) sum += exponential(logs[n] - most);
    return most + logarithm(sum);
}

// The logarithms of the probabilities [levels] of all values, up to a constant.
inline void find_logs(const Head& head, const float* parameters, double* logs) {
    for (int64_t value = 0; value < head.levels; value++)
        logs[value] = head.mixtures ? find_log_mass(head, parameters, value) : parameters[value];
}

// Replaces the logarithms [levels] of an image with its class by others + guidance (logs - others), where `others` are
// those of the image without a class, from the parameters `free`.
inline void guide(const Head& head, const float* free, double* logs) {
    double others[MOST_LEVELS];
    find_logs(head, free, others);
    for (int64_t n = 0; n < head.levels; n++) logs[n] = others[n] + head.guidance * (logs[n] - others[n]);
}

// Sets the shares [levels] of the values that top-k and top-p drop to 0. Of equal shares, those of smaller values stay.
inline void drop_shares(const Head& head, double* shares) {
    const int64_t levels = head.levels, most = head.top_k ? std::min(head.top_k, levels) : levels;
    int64_t order[MOST_LEVELS];
    std::iota(order, order + levels, 0);
    // Of two values, the less likely one. A heap stays in its memory even if shares are NaN, unlike a sort.
    const auto less = [&](int64_t a, int64_t b) { return shares[a] < shares[b] || (shares[a] == shares[b] && a > b); };
    std::make_heap(order, order + levels, less);
    double total = 0, before = 0;
    for (int64_t n = levels - 1; n >= levels - most; n--) {
        std::pop_heap(order, order + n + 1, less);  // moves the likeliest of the first n + 1 values to place n
        total += shares[order[n]];
    }
    for (int64_t n = levels - 1; n >= 0; n--) {
        double& share = shares[order[n]];
        const bool kept = n >= levels - most && (head.top_p <= 0 || before < head.top_p * total);
        before += share;
        if (!kept) share = 0;
    }
}

// Draws a value after the filters. With guidance, `free` are the parameters without the class.
inline int64_t draw_filtered(const Head& head, const float* parameters, const float* free, double uniform) {
    double shares[MOST_LEVELS];
    find_logs(head, parameters, shares);
    if (head.is_guided()) guide(head, free, shares);
    exponentiate(head.levels, shares, head.temperature);
    if (head.top_k || head.top_p > 0) drop_shares(head, shares);
    return find_share(head.levels, shares, uniform, nullptr);
}

// Draws values [rows] from parameters [rows, stride], with uniforms [rows] in [0, 1). With guidance, another `rows`
// rows of parameters follow, for the same images without their classes.
inline void draw(const Head& head, int64_t rows, const float* parameters, int64_t stride, const double* uniforms,
                 int64_t* values) {
    for (int64_t row = 0; row < rows; row++) {
        const float* own = parameters + row * stride;
        const float* free = head.is_guided() ? own + rows * stride : nullptr;
        values[row] = head.is_filtered() ? draw_filtered(head, own, free, uniforms[row])
                      : head.mixtures    ? draw_mixture(head, own, uniforms[row])
                                         : invert(head.levels, own, uniforms[row], nullptr);
    }
}

}  // namespace
