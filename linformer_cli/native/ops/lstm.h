// The cell of an LSTM: c <- sigmoid(f) c + sigmoid(i) tanh(g), then h <- sigmoid(o) tanh(c).
//
// Buffers: the parts of the gates (i, f, g, o) from the input and from h, each [4 hidden], then the states h and c.
// Integers: hidden. Each step needs h of the step before, so there is no look-ahead.
#pragma once

#include <cstdint>

#include "../maths.h"
#include "../program.h"

namespace {

void lstm(const Pass& pass, const Operation& op) {
    const int64_t hidden = op.integer[0];
    pass.for_each(pass.rows, 32 * pass.rows * hidden, [&](int64_t row) {
        const float *x = pass.at<float>(op.buffer[0], row), *y = pass.at<float>(op.buffer[1], row);
        float *h = pass.at<float>(op.buffer[2], row), *c = pass.at<float>(op.buffer[3], row);
        for (int64_t n = 0; n < hidden; n++) {
            const float input = sigmoid(x[n] + y[n]), forget = sigmoid(x[hidden + n] + y[hidden + n]);
            const float cell = hyperbolic_tangent(x[2 * hidden + n] + y[2 * hidden + n]);
            const float output = sigmoid(x[3 * hidden + n] + y[3 * hidden + n]);
            const float sum = forget * c[n] + input * cell;
            c[n] = sum;
            h[n] = output * hyperbolic_tangent(sum);
        }
    });
}

}  // namespace
