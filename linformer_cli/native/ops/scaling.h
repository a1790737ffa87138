// Scales the outputs of attentions that have no denominator.
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

}  // namespace
