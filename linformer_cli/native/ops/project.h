// Products of packed weights and the vectors of a few rows, plus a bias and an activation.
//
// Buffers: input, output, weights, bias, and for bfloat16 and int8 the converted input. Integers: columns,
// rows, activation, format.
#pragma once

#include <cstdint>

#include "products_float.h"
#include "products_int8.h"

namespace {

void project(const Pass& pass, const Operation& op) {
    const int64_t columns = op.integer[0], format = op.integer[3], input = op.buffer[4];
    if (format == EXACT) return multiply<Exact>(pass, op, op.buffer[0], 1);
    if (!ONLY_INT8 && format != BFLOAT16 && format != INT8) return multiply<Float32>(pass, op, op.buffer[0], 1);
    pass.for_each(pass.rows, pass.rows * columns, [&](int64_t row) {
        const float* x = pass.at<float>(op.buffer[0], row);
        if (ONLY_INT8 || format == INT8) quantise(columns, x, pass.at<char>(input, row));
        else round_to_bfloat16(columns, x, pass.at<bfloat16>(input, row));
    });
    ONLY_INT8 || format == INT8 ? multiply<Int8>(pass, op, input, 4) : multiply<Bfloat16>(pass, op, input, 2);
}

}  // namespace
