// The cell of an LSTM.
#pragma once

#include <cstdint>

#include "../maths.h"
#include "../operation.h"

namespace {

// c <- sigmoid(f) c + sigmoid(i) tanh(g), then h <- sigmoid(o) tanh(c). Each step needs h of the previous step, so
// there is no look-ahead.
struct Lstm : Arguments {
    // The contributions to the gates (i, f, g, o).
    const int64_t from_input = buffer(), from_h = buffer();
    const int64_t h = buffer(), c = buffer();
    const int64_t hidden = integer();

    void check(Rules& rules) const {
        rules.need(rules.file.window == 1);
        for (const int64_t part : {from_input, from_h}) rules.scratch(part, {4, hidden});
        for (const int64_t part : {h, c}) rules.state(part, {hidden});
    }

    void run() const {
        pass.for_each(pass.rows, 32 * pass.rows * hidden, [&](int64_t row) {
            const float *x = pass.at<float>(from_input, row), *y = pass.at<float>(from_h, row);
            float *held = pass.at<float>(c, row), *out = pass.at<float>(h, row);
            // There is one loop per gate, because compilers do not vectorise a loop over so many arrays that may
            // overlap.
            float *gates = workspace<Operation>(4 * hidden), *input = gates, *forget = gates + hidden;
            float *cell = gates + 2 * hidden, *output = gates + 3 * hidden;
            for (int64_t n = 0; n < 4 * hidden; n++) gates[n] = x[n] + y[n];
            for (int64_t n = 0; n < 2 * hidden; n++) input[n] = sigmoid(input[n]);
            for (int64_t n = 0; n < hidden; n++) cell[n] = hyperbolic_tangent(cell[n]);
            for (int64_t n = 0; n < hidden; n++) output[n] = sigmoid(output[n]);
            for (int64_t n = 0; n < hidden; n++) held[n] = forget[n] * held[n] + input[n] * cell[n];
            for (int64_t n = 0; n < hidden; n++) out[n] = output[n] * hyperbolic_tangent(held[n]);
        });
    }
};
OPERATION("lstm", Lstm, STATEFUL);

}  // namespace
