// Draws values from a head's distribution by inversion.
#pragma once

#include <cmath>
#include <cstdint>

#include "maths.h"

namespace {  // local to the library that includes it: the compiler may inline all of it

constexpr int64_t MOST_LEVELS = LINTX_MOST_LEVELS;

// The distribution of a value.
struct Head {
    int64_t levels, mixtures;  // mixtures == 0: one logit for each level
    double lowest, highest;    // bounds of a logistic's log scale
};

// A single image drawn with look-ahead.
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

// The index whose share of softmax(logits) contains `uniform`. The position within that share goes to `place` if it is
// not null.
inline int64_t invert(int64_t count, const float* logits, double uniform, double* place) {
    double shares[MOST_LEVELS];
    float most = logits[0];
    for (int64_t i = 1; i < count; i++) most = logits[i] > most ? logits[i] : most;
    for (int64_t i = 0; i < count; i++) shares[i] = exponential(static_cast<double>(logits[i] - most));
    double total = 0;
    for (int64_t i = 0; i < count; i++) total += shares[i];
    // The target stays below the total even after rounding, so the search ends at an index of non-zero probability.
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

// The value 0 .. levels - 1 nearest to `x`; 0 if x is NaN.
inline int64_t nearest_value(double x, int64_t levels) {
    const double most = static_cast<double>(levels - 1);
    return x > 0 ? static_cast<int64_t>(std::nearbyint(x < most ? x : most)) : 0;
}

// Draws a value of a mixture of K logistics with parameters [3 K]: first the component, then its logistic by inversion.
inline int64_t draw_mixture(const Head& head, const float* parameters, double uniform) {
    const int64_t K = head.mixtures;
    double place;
    const int64_t component = invert(K, parameters, uniform, &place);
    place = place < 1e-12 ? 1e-12 : place > 1 - 1e-12 ? 1 - 1e-12 : place;
    double log_scale = parameters[2 * K + component];
    log_scale = log_scale < head.lowest ? head.lowest : log_scale > head.highest ? head.highest : log_scale;
    const double x = parameters[K + component] + exponential(log_scale) * logarithm(place / (1 - place));
    return nearest_value((x + 1) * (0.5 * (head.levels - 1)), head.levels);
}

// Draws values [rows] from parameters [rows, stride], with uniforms [rows] in [0, 1).
inline void draw(const Head& head, int64_t rows, const float* parameters, int64_t stride, const double* uniforms,
                 int64_t* values) {
    for (int64_t row = 0; row < rows; row++) {
        const float* own = parameters + row * stride;
        values[row] = head.mixtures ? draw_mixture(head, own, uniforms[row])
                                    : invert(head.levels, own, uniforms[row], nullptr);
    }
}

}  // namespace
