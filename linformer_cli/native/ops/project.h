// Products of packed weights and the vectors of a few rows.
#pragma once

#include <cstdint>

#include "../operation.h"
#include "parts/products_float.h"
#include "parts/products_int8.h"

namespace {

// output <- activation(weights input + bias).
struct Project : Arguments {
    const int64_t input = buffer(), output = buffer(), weights = buffer(), bias = buffer();
    const int64_t converted = buffer_or_none();  // the input in bfloat16 or int8
    const int64_t columns = integer(), rows = integer(), activation = integer(), format = integer();

    void check(Rules& rules) const {
        const int64_t stored = (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
        rules.need(columns >= 1 && rows >= 1 && format <= EXACT);
        rules.row(input, columns);
        rules.scratch(output, {stored});
        rules.constant(bias, {stored});
        const int64_t per_word = format == INT8 ? 4 : format == BFLOAT16 ? 2 : 1;
        const int64_t depth = (columns + per_word - 1) / per_word;
        rules.constant(weights, {stored, depth + (format == INT8 ? Int8::TAIL : 0)}, Type::INT32);
        if (format == BFLOAT16) rules.scratch(converted, {2, depth}, Type::BFLOAT16);
        if (format == INT8) rules.scratch(converted, {2 * depth + 1}, Type::INT32);
    }

    void run() const {
        if (format == EXACT) return multiply<Exact>(input, 1);
        if (!ONLY_INT8 && format != BFLOAT16 && format != INT8) return multiply<Float32>(input, 1);
        pass.for_each(pass.rows, pass.rows * columns, [&](int64_t row) {
            const float* x = pass.at<float>(input, row);
            if (ONLY_INT8 || format == INT8) quantise(columns, x, pass.at<char>(converted, row));
            else round_to_bfloat16(columns, x, pass.at<bfloat16>(converted, row));
        });
        ONLY_INT8 || format == INT8 ? multiply<Int8>(converted, 4) : multiply<Bfloat16>(converted, 2);
    }

private:
    // Multiplies the vectors in a buffer; each step takes `per_word` columns.
    template <class Format>
    void multiply(int64_t vectors, int64_t per_word) const {
        const int64_t depth = (columns + per_word - 1) / per_word;
        const Product product{depth, activation, pass.stride<char>(vectors), pass.stride<float>(output)};
        const uint32_t* weight = pass.at<uint32_t>(weights, 0);
        const char* x = pass.at<char>(vectors, 0);
        const float* added = pass.at<float>(bias, 0);
        float* y = pass.at<float>(output, 0);
        // With few rows, the time is that of reading the weights, so it depends on their bytes.
        pass.for_each((rows + TILE - 1) / TILE, pass.rows * columns * rows / per_word, [&](int64_t tile) {
            const int64_t row = tile * TILE;
            multiply_rows<Format, Format::IMAGES>(product, pass.rows, weight + row * (depth + Format::TAIL),
                                                  added + row, x, y + row);
        });
    }
};
OPERATION("project", Project, STATELESS);

}  // namespace
