// The cell of an LSTM: c <- sigmoid(f) c + sigmoid(i) tanh(g), then h <- sigmoid(o) tanh(c).
//
// Buffers: the contributions of the input and of h to the gates (i, f, g, o), each [4 hidden], then the states h and c.
// Integers: hidden. Each step needs h of the previous step, so there is no look-ahead.
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
        // There is one loop per gate, because compilers do not vectorise a loop over so many arrays that may overlap.
        float *gates = workspace<Operation>(4 * hidden), *input = gates, *forget = gates + hidden;
        float *cell = gates + 2 * hidden, *output = gates + 3 * hidden;
        for (int64_t n = 0; n < 4 * hidden; n++) gates[n] = x[n] + y[n];
        for (int64_t n = 0; n < 2 * hidden; n++) input[n] = sigmoid(input[n]);
        for (int64_t n = 0; n < hidden; n++) cell[n] = hyperbolic_tangent(cell[n]);
        for (int64_t n = 0; n < hidden; n++) output[n] = sigmoid(output[n]);
        for (int64_t n = 0; n < hidden; n++) c[n] = forget[n] * c[n] + input[n] * cell[n];
        for (int64_t n = 0; n < hidden; n++) h[n] = output[n] * hyperbolic_tangent(c[n]);
    });
}

}  // namespace
