// The gradient at the input of ReLU, and the gradient of the bias before it, for the CPU; called by linear_layers.py.

#include <cstdint>

#include "scan.h"

namespace {

struct BiasCall {
    int64_t threads, rows, width, pieces;
    const bfloat16* gradient;  // [rows, width], at the output
    const bfloat16* y;         // [rows, width]: the output of ReLU; null without ReLU
    bfloat16* before;          // [rows, width], as `y`: the gradient at the input of ReLU
    float* sums;               // [pieces, width]: the sums of this gradient over each piece of the rows, initially 0
};

void add(int64_t width, const bfloat16* gradient, float* __restrict sums) {
    for (int64_t i = 0; i < width; i++) sums[i] += gradient[i];
}

// As in torch, the gradient passes if y is NaN.
void differentiate(int64_t width, const bfloat16* gradient, const bfloat16* y, bfloat16* __restrict before,
                   float* __restrict sums) {
    for (int64_t i = 0; i < width; i++) {
        const float after = gradient[i], value = y[i] <= 0 ? 0 : after;
        before[i] = value;
        sums[i] += value;
    }
}

}  // namespace

// The pieces do not depend on the number of threads, so neither do the sums.
extern "C" void lintx_bias_gradient(const BiasCall* given) {
    const BiasCall call = *given;
    spread(call.rows * call.width > 65536 ? call.threads : 1, call.pieces, [=](int64_t piece) {
        float* sums = call.sums + piece * call.width;
        for (int64_t t = piece * call.rows / call.pieces; t < (piece + 1) * call.rows / call.pieces; t++) {
            const int64_t row = t * call.width;
            if (call.y) differentiate(call.width, call.gradient + row, call.y + row, call.before + row, sums);
            else add(call.width, call.gradient + row, sums);
        }
    });
}
