// LayerNorm with the residual sum before it, the product with a gate, and other operations on single numbers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../maths.h"
#include "../program.h"
#include "lanes.h"

namespace {

// h [width] <- LayerNorm(x). h may be x.
inline void layer_norm(int64_t width, const float* x, const float* gain, const float* shift, float* h) {
    const float mean = sum_of(width, [&](int64_t i) { return x[i]; }) / width;
    const float squares = sum_of(width, [&](int64_t i) { return (x[i] - mean) * (x[i] - mean); });
    const float inverse = 1 / std::sqrt(squares / width + 1e-5f);
    for (int64_t i = 0; i < width; i++) h[i] = (x[i] - mean) * inverse * gain[i] + shift[i];
}

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
        layer_norm(width, x, gain, shift, h);
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

// y <- y * activation(gate). Buffers: y, gate. Integers: width, the first column of the gate, SILU or 0 for none.
void gate(const Pass& pass, const Operation& op) {
    const int64_t width = op.integer[0];
    const bool silu = op.integer[2] == SILU;
    pass.for_each(pass.rows, pass.rows * width * (silu ? 16 : 1), [&](int64_t row) {
        float* y = pass.at<float>(op.buffer[0], row);
        const float* factor = pass.at<float>(op.buffer[1], row) + op.integer[1];
        if (silu)
            for (int64_t i = 0; i < width; i++) y[i] *= activate(factor[i], SILU);
        else
            for (int64_t i = 0; i < width; i++) y[i] *= factor[i];
    });
}

// y <- x, from a column of y on. Buffers: y, x. Integers: width, the first column of y.
void copy(const Pass& pass, const Operation& op) {
    pass.for_each(pass.rows, pass.rows * op.integer[0], [&](int64_t row) {
        std::memcpy(pass.at<float>(op.buffer[0], row) + op.integer[1], pass.at<float>(op.buffer[1], row),
                    op.integer[0] * sizeof(float));
    });
}

// y [width] <- the sum of x [chunks, width] over its chunks. Buffers: y, x. Integers: width, chunks.
void fold(const Pass& pass, const Operation& op) {
    const int64_t width = op.integer[0], chunks = op.integer[1];
    pass.for_each(pass.rows, pass.rows * width * chunks, [&](int64_t row) {
        float* y = pass.at<float>(op.buffer[0], row);
        const float* x = pass.at<float>(op.buffer[1], row);
        std::memcpy(y, x, width * sizeof(float));
        for (int64_t n = 1; n < chunks; n++)
            for (int64_t i = 0; i < width; i++) y[i] += x[n * width + i];
    });
}

}  // namespace
