// Draws values from a head's distribution by inversion.
#pragma once

#include <cmath>
#include <cstdint>

constexpr int64_t MOST_LEVELS = LINTX_MOST_LEVELS;

// The index whose share of softmax(logits) contains `uniform`; `place`, if not null, gets the position in the share.
inline int64_t invert(int64_t count, const float* logits, double uniform, double* place) {
    double shares[MOST_LEVELS];
    float most = logits[0];
    for (int64_t i = 1; i < count; i++) most = logits[i] > most ? logits[i] : most;
    for (int64_t i = 0; i < count; i++) shares[i] = std::exp(static_cast<double>(logits[i] - most));
    double total = 0;
    for (int64_t i = 0; i < count; i++) total += shares[i];
    // Below the total even after rounding, so the search ends at an index of non-zero probability.
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

// The value 0 .. levels - 1 nearest to `x`, for any x. With fast math the compiler assumes that x is not NaN, so NaN
// passes the bounds on x. The integer is therefore bounded too. It is volatile, or the compiler would drop its bounds.
inline int64_t nearest_value(double x, int64_t levels) {
    const double most = static_cast<double>(levels - 1);
    const volatile int64_t nearest = static_cast<int64_t>(std::nearbyint(x < 0 ? 0 : x > most ? most : x));
    const int64_t value = nearest;
    return value < 0 ? 0 : value < levels ? value : levels - 1;
}

// Draws a value of a mixture of K logistics with parameters [3 K]: first the component, then its logistic by inversion.
inline int64_t draw_mixture(int64_t K, int64_t levels, double lowest, double highest, const float* parameters, double uniform) {
    double place;
    const int64_t component = invert(K, parameters, uniform, &place);
    place = place < 1e-12 ? 1e-12 : place > 1 - 1e-12 ? 1 - 1e-12 : place;
    double log_scale = parameters[2 * K + component];
    log_scale = log_scale < lowest ? lowest : log_scale > highest ? highest : log_scale;
    const double x = parameters[K + component] + std::exp(log_scale) * std::log(place / (1 - place));
    return nearest_value((x + 1) * (0.5 * (levels - 1)), levels);
}
