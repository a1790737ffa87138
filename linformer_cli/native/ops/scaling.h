// Scales vectors by their length or root mean square.
#pragma once

#include <cmath>
#include <cstdint>

#include "../maths.h"
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

// x [K], scaled to length 1.
inline void scale_to_direction(int64_t K, float* x) {
    const float inverse = 1 / std::sqrt(dot(K, x, x) + 1e-6f);
    for (int64_t i = 0; i < K; i++) x[i] *= inverse;
}

}  // namespace
