// The short convolution of an attention layer.
#pragma once

#include <cstdint>
#include <cstring>

#include "../operation.h"

namespace {

// A causal convolution of each column over the last positions.
struct ShortConvolution : Arguments {
    const int64_t input = buffer(), output = buffer();
    const int64_t recent = buffer();   // inputs of the last positions, oldest first
    const int64_t weights = buffer();  // the last of them for the new input
    const int64_t kernel = integer(), columns = integer();
    const int64_t others = integer();  // the number of columns after these, which are only copied

    void check(Rules& rules) const {
        rules.need(kernel >= 2 && columns >= 1);
        for (const int64_t part : {input, output}) rules.scratch(part, {columns + others});
        rules.state(recent, {kernel - 1, columns});
        rules.constant(weights, {kernel, columns});
    }

    void run() const {
        for_columns(pass, columns, columns * kernel, [&](int64_t row, int64_t first, int64_t width) {
            if (pass.mode != COMMIT) {
                float* y = pass.at<float>(output, row);
                for (int64_t n = 0; n < kernel; n++) {
                    const float* factors = pass.at<float>(weights, 0) + n * columns;
                    const float* x = input_at(row, kernel - 1 - n);
                    if (n)
                        for (int64_t j = first; j < first + width; j++) y[j] += factors[j] * x[j];
                    else
                        for (int64_t j = first; j < first + width; j++) y[j] = factors[j] * x[j];
                }
                if (!first) std::memcpy(y + columns, input_at(row, 0) + columns, others * sizeof(float));
            }
            if (pass.mode == STEP || (pass.mode == COMMIT && row == pass.rows - 1)) {
                float* kept = pass.at<float>(recent, row) + first;
                for (int64_t n = 0; n < kernel - 1; n++)
                    std::memcpy(kept + n * columns, input_at(row, kernel - 2 - n) + first, width * sizeof(float));
            }
        });
    }

    // The input of the position `earlier` positions before that of the row. With look-ahead, it may be in this pass.
    const float* input_at(int64_t row, int64_t earlier) const {
        const int64_t place = (pass.mode == STEP ? 0 : row) - earlier;
        if (place >= 0) return pass.at<float>(input, row - earlier);
        return pass.at<float>(recent, row) + (kernel - 1 + place) * columns;
    }
};
OPERATION("short_convolution", ShortConvolution, STATEFUL);

}  // namespace
