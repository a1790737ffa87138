// The lengths of vectors.
#pragma once

#include <cmath>
#include <cstdint>

#include "../program.h"
#include "lanes.h"

namespace {

// Scales vectors that lie side by side, such as the outputs of heads: y <- y / sqrt(|y|^2 / divisor + floor). If there
// are weights, y is then multiplied by them. Buffers: y, the weights of all vectors or none. Integers:
// number and width of the vectors, which start at column 0. Reals: divisor, floor.
void normalise(const Pass& pass, const Operation& op) {
    const int64_t count = op.integer[0], width = op.integer[1];
    const float divisor = static_cast<float>(op.real[0]), floor = static_cast<float>(op.real[1]);
    pass.for_each(pass.rows, 4 * pass.rows * count * width, [&](int64_t row) {
        for (int64_t n = 0; n < count; n++) {
            float* y = pass.at<float>(op.buffer[0], row) + n * width;
            const float inverse = 1 / std::sqrt(dot(width, y, y) / divisor + floor);
            for (int64_t i = 0; i < width; i++) y[i] *= inverse;
            if (op.buffer[1] < 0) continue;
            const float* weights = pass.at<float>(op.buffer[1], row) + n * width;
            for (int64_t i = 0; i < width; i++) y[i] *= weights[i];
        }
    });
}

}  // namespace
