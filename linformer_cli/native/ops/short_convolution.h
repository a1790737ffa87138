// A causal convolution of each column over the last positions.
//
// Buffers: input, output, the state: inputs [kernel - 1, columns] of the last positions, oldest first; weights [kernel,
// columns], the last of them for the new input. Integers: kernel, at least 2; columns; the number of columns after
// these, which are only copied.
#pragma once

#include <cstdint>
#include <cstring>

#include "../program.h"

namespace {

void short_convolution(const Pass& pass, const Operation& op) {
    const int64_t kernel = op.integer[0], columns = op.integer[1], others = op.integer[2];
    // The input of the position `earlier` positions before that of the row. With look-ahead, it may be in this pass.
    const auto input = [&](int64_t row, int64_t earlier) {
        const int64_t place = (pass.mode == STEP ? 0 : row) - earlier;
        if (place >= 0) return pass.at<float>(op.buffer[0], row - earlier);
        return pass.at<float>(op.buffer[2], row) + (kernel - 1 + place) * columns;
    };
    for_columns(pass, columns, columns * kernel, [&](int64_t row, int64_t first, int64_t width) {
        if (pass.mode != COMMIT) {
            float* y = pass.at<float>(op.buffer[1], row);
            for (int64_t n = 0; n < kernel; n++) {
                const float* weights = pass.at<float>(op.buffer[3], 0) + n * columns;
                const float* x = input(row, kernel - 1 - n);
                if (n)
                    for (int64_t j = first; j < first + width; j++) y[j] += weights[j] * x[j];
                else
                    for (int64_t j = first; j < first + width; j++) y[j] = weights[j] * x[j];
            }
            if (!first) std::memcpy(y + columns, input(row, 0) + columns, others * sizeof(float));
        }
        if (pass.mode == STEP || (pass.mode == COMMIT && row == pass.rows - 1)) {
            float* kept = pass.at<float>(op.buffer[2], row) + first;
            for (int64_t n = 0; n < kernel - 1; n++)
                std::memcpy(kept + n * columns, input(row, kernel - 2 - n) + first, width * sizeof(float));
        }
    });
}

}  // namespace
