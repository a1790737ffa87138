// LayerNorm with the residual sum before it, the product with a gate, and other operations on single numbers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../maths.h"
#include "../operation.h"
#include "parts/lanes.h"

namespace {

// h [width] <- LayerNorm(x). h may be x.
inline void layer_norm(int64_t width, const float* x, const float* gain, const float* shift, float* h) {
    const float mean = sum_of(width, [&](int64_t i) { return x[i]; }) / width;
    const float squares = sum_of(width, [&](int64_t i) { return (x[i] - mean) * (x[i] - mean); });
    const float inverse = 1 / std::sqrt(squares / width + 1e-5f);
    for (int64_t i = 0; i < width; i++) h[i] = (x[i] - mean) * inverse * gain[i] + shift[i];
}

// x <- x + branch, then h <- LayerNorm(x). h may be x.
struct Join : Arguments {
    const int64_t x = buffer(), branch = buffer_or_none(), h = buffer(), gain = buffer(), shift = buffer();
    const int64_t width = integer();

    void check(Rules& rules) const {
        rules.scratch(x, {width});
        if (branch >= 0) rules.scratch(branch, {width});
        rules.scratch(h, {width});
        rules.constant(gain, {width});
        rules.constant(shift, {width});
    }

    void run() const {
        pass.for_each(pass.rows, 4 * pass.rows * width, [&](int64_t row) {
            float* sum = pass.at<float>(x, row);
            if (branch >= 0) {
                const float* added = pass.at<float>(branch, row);
                for (int64_t i = 0; i < width; i++) sum[i] += added[i];
            }
            layer_norm(width, sum, pass.at<float>(gain, row), pass.at<float>(shift, row), pass.at<float>(h, row));
        });
    }
};
OPERATION("join", Join, STATELESS);

// x <- x + branch.
struct Add : Arguments {
    const int64_t x = buffer(), branch = buffer();
    const int64_t width = integer();

    void check(Rules& rules) const {
        rules.scratch(x, {width});
        rules.row(branch, width);
    }

    void run() const {
        pass.for_each(pass.rows, pass.rows * width, [&](int64_t row) {
            float* sum = pass.at<float>(x, row);
            const float* added = pass.at<float>(branch, row);
            for (int64_t i = 0; i < width; i++) sum[i] += added[i];
        });
    }
};
OPERATION("add", Add, STATELESS);

// y <- y * activation(gate), from column `first` of the gate on. The activation is SILU, or 0 for none.
struct Gate : Arguments {
    const int64_t y = buffer(), gate = buffer();
    const int64_t width = integer(), first = integer(), activation = integer();

    void check(Rules& rules) const {
        rules.scratch(y, {width});
        rules.scratch(gate, {first + width});
    }

    void run() const {
        const bool silu = activation == SILU;
        pass.for_each(pass.rows, pass.rows * width * (silu ? 16 : 1), [&](int64_t row) {
            float* product = pass.at<float>(y, row);
            const float* factor = pass.at<float>(gate, row) + first;
            if (silu)
                for (int64_t i = 0; i < width; i++) product[i] *= activate(factor[i], SILU);
            else
                for (int64_t i = 0; i < width; i++) product[i] *= factor[i];
        });
    }
};
OPERATION("gate", Gate, STATELESS);

// y <- x, from column `first` of y on.
struct Copy : Arguments {
    const int64_t y = buffer(), x = buffer();
    const int64_t width = integer(), first = integer();

    void check(Rules& rules) const {
        rules.row(y, first + width);
        rules.scratch(x, {width});
    }

    void run() const {
        pass.for_each(pass.rows, pass.rows * width, [&](int64_t row) {
            std::memcpy(pass.at<float>(y, row) + first, pass.at<float>(x, row), width * sizeof(float));
        });
    }
};
OPERATION("copy", Copy, STATELESS);

// y [width] <- the sum of x [chunks, width] over its chunks.
struct Fold : Arguments {
    const int64_t y = buffer(), x = buffer();
    const int64_t width = integer(), chunks = integer();

    void check(Rules& rules) const {
        rules.need(chunks >= 1);
        rules.scratch(y, {width});
        rules.scratch(x, {chunks, width});
    }

    void run() const {
        pass.for_each(pass.rows, pass.rows * width * chunks, [&](int64_t row) {
            float* sum = pass.at<float>(y, row);
            const float* parts = pass.at<float>(x, row);
            std::memcpy(sum, parts, width * sizeof(float));
            for (int64_t n = 1; n < chunks; n++)
                for (int64_t i = 0; i < width; i++) sum[i] += parts[n * width + i];
        });
    }
};
OPERATION("fold", Fold, STATELESS);

// Scales vectors that lie side by side from column 0 on, such as the outputs of heads: y <- y / sqrt(|y|^2 / divisor +
// floor). If there are weights, y is then multiplied by them.
struct Normalise : Arguments {
    const int64_t y = buffer(), weights = buffer_or_none();
    const int64_t count = integer(), width = integer();
    const float divisor = real(), floor = real();

    void check(Rules& rules) const {
        rules.scratch(y, {count, width});
        if (weights >= 0) rules.constant(weights, {count, width});
    }

    void run() const {
        pass.for_each(pass.rows, 4 * pass.rows * count * width, [&](int64_t row) {
            for (int64_t n = 0; n < count; n++) {
                float* vector = pass.at<float>(y, row) + n * width;
                const float inverse = 1 / std::sqrt(dot(width, vector, vector) / divisor + floor);
                for (int64_t i = 0; i < width; i++) vector[i] *= inverse;
                if (weights < 0) continue;
                const float* factors = pass.at<float>(weights, row) + n * width;
                for (int64_t i = 0; i < width; i++) vector[i] *= factors[i];
            }
        });
    }
};
OPERATION("normalise", Normalise, STATELESS);

}  // namespace
