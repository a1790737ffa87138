// The distribution of a value, and how a value is drawn from it by inversion.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "constants.h"
#include "maths.h"

namespace {  // local to the library that includes it: the compiler may inline all of it

// The distribution of a value, and the filters that change it; `Filters` of choose.py explains them.
struct Distribution {
    int64_t levels, mixtures;  // mixtures == 0: one logit for each level
    double lowest, highest;    // bounds of a logistic's log scale
    double guidance = 1;
    double temperature = 1;
    int64_t top_k = 0;  // 0: all values
    double top_p = 0;   // 0: all values

    int64_t parameters() const { return mixtures ? 3 * mixtures : levels; }
    bool is_guided() const { return guidance != 1; }
    bool is_filtered() const { return is_guided() || temperature != 1 || top_k || top_p > 0; }
    double bound(double log_scale) const {
        return log_scale < lowest ? lowest : log_scale > highest ? highest : log_scale;
    }
};

// Whether all numbers are finite: NaN and infinity are the numbers whose exponent has only ones.
inline bool are_finite(int64_t count, const float* numbers) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        std::memcpy(&bits, numbers + i, sizeof bits);
        const uint32_t exponent = bits & 0x7f800000;
        largest = exponent > largest ? exponent : largest;
    }
    return largest != 0x7f800000;
}

// The index whose part of the sum of all shares contains `uniform` times the sum. The position within that part, from
// 0 to 1, goes to `place` if it is not null.
inline int64_t find_share(int64_t count, const double* shares, double uniform, double* place) {
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

// Draws an index from softmax(logits); `find_share` explains `place`.
inline int64_t invert(int64_t count, const float* logits, double uniform, double* place) {
    double shares[MOST_LEVELS];
    float most = logits[0];
    for (int64_t i = 1; i < count; i++) most = logits[i] > most ? logits[i] : most;
    for (int64_t i = 0; i < count; i++) shares[i] = exponential(static_cast<double>(logits[i] - most));
    return find_share(count, shares, uniform, place);
}

// The value 0 .. levels - 1 nearest to `x`; 0 if x is NaN.
inline int64_t nearest_value(double x, int64_t levels) {
    const double most = static_cast<double>(levels - 1);
    return x > 0 ? static_cast<int64_t>(std::nearbyint(x < most ? x : most)) : 0;
}

// Draws a value of a mixture of K logistics with parameters [3 K]: first the component, then its logistic by inversion.
inline int64_t draw_mixture(const Distribution& distribution, const float* parameters, double uniform) {
    const int64_t K = distribution.mixtures;
    double place;
    const int64_t component = invert(K, parameters, uniform, &place);
    place = place < 1e-12 ? 1e-12 : place > 1 - 1e-12 ? 1 - 1e-12 : place;
    const double scale = exponential(distribution.bound(parameters[2 * K + component]));
    const double x = parameters[K + component] + scale * logarithm(place / (1 - place));
    return nearest_value((x + 1) * (0.5 * (distribution.levels - 1)), distribution.levels);
}

}  // namespace
