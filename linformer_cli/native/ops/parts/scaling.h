// Scales vectors by their length or root mean square.
#pragma once

#include <cmath>
#include <cstdint>

#include "../../maths.h"
#include "lanes.h"

namespace {

// y [V] <- y / rms(y), times SiLU(gate) if there is a gate [V]. `floor` is added to the mean square.
inline void scale_output(int64_t V, float floor, const float* gate, float* y) {
    const float inverse = 1 / std::sqrt(dot(V, y, y) / V + floor);
    if (gate)
        for (int64_t j = 0; j < V; j++) y[j] *= inverse * (gate[j] * sigmoid(gate[j]));
    else
        for (int64_t j = 0; j < V; j++) y[j] *= inverse;
}

// The factor that keeps sums of squares of x from overflowing. It is 1 unless an element exceeds the fourth root of the
// largest float.
inline float shrink_factor(int64_t count, const float* x) {
    const float limit = 4.2949673e9f;
    if (dot(count, x, x) <= limit * limit) return 1;  // faster than the loop
    float largest = limit;
    for (int64_t i = 0; i < count; i++) largest = std::fabs(x[i]) > largest ? std::fabs(x[i]) : largest;
    return limit / largest;
}

// x [K], scaled to length 1.
inline void scale_to_direction(int64_t K, float* x) {
    const float inverse = 1 / std::sqrt(dot(K, x, x) + 1e-6f);
    for (int64_t i = 0; i < K; i++) x[i] *= inverse;
}

}  // namespace
