// LayerNorm with the residual sum before it, and the product with a gate.
#pragma once

#include <cmath>
#include <cstdint>

#include "../program.h"
#include "lanes.h"

namespace {

// x <- x + branch, then h <- LayerNorm(x). h may be x. Buffers: x, branch or none, h, gain, shift. Integers: width.
void join(const Pass& pass, const Operation& op) {
    const int64_t width = op.integer[0];
    pass.for_each(pass.rows, 4 * pass.rows * width, [&](int64_t row) {
        float *x = pass.at<float>(op.buffer[0], row), *h = pass.at<float>(op.buffer[2], row);
        const float *gain = pass.at<float>(op.buffer[3], row), *shift = pass.at<float>(op.buffer[4], row);
        if (op.buffer[1] >= 0) {
            const float* branch = pass.at<float>(op.buffer[1], row);
            for (int64_t i = 0; i < width; i++) x[i] += branch[i];
        }
        const float mean = sum_of(width, [&](int64_t i) { return x[i]; }) / width;
        const float squares = sum_of(width, [&](int64_t i) { return (x[i] - mean) * (x[i] - mean); });
        const float inverse = 1 / std::sqrt(squares / width + 1e-5f);
        for (int64_t i = 0; i < width; i++) h[i] = (x[i] - mean) * inverse * gain[i] + shift[i];
    });
}

// x <- x + branch. Buffers: x, branch. Integers: width.
void add(const Pass& pass, const Operation& op) {
    pass.for_each(pass.rows, pass.rows * op.integer[0], [&](int64_t row) {
        float* x = pass.at<float>(op.buffer[0], row);
        const float* branch = pass.at<float>(op.buffer[1], row);
        for (int64_t i = 0; i < op.integer[0]; i++) x[i] += branch[i];
    });
}

// y <- y * gate. Buffers: y, gate. Integers: width, the first column of the gate.
void gate(const Pass& pass, const Operation& op) {
    pass.for_each(pass.rows, pass.rows * op.integer[0], [&](int64_t row) {
        float* y = pass.at<float>(op.buffer[0], row);
        const float* factor = pass.at<float>(op.buffer[1], row) + op.integer[1];
        for (int64_t i = 0; i < op.integer[0]; i++) y[i] *= factor[i];
    });
}

}  // namespace
