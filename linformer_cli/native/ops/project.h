// Products of packed weights and the vectors of a few rows, plus a bias and an activation.
//
// Buffers: input, output, weights, bias, and for bfloat16 the rounded input. Integers: columns, rows, activation, format.
#pragma once

#include <cstdint>
#include <cstring>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "../maths.h"
#include "../numbers.h"
#include "../program.h"
#include "lanes.h"

namespace {

// Elements per 32-bit word; a product reads its inputs word by word.
template <class T>
constexpr int64_t PER_WORD = 4 / sizeof(T);

// `sums` of 16 rows plus the product of one word of each row and one word of the input.
template <class T>
inline floats add_product(floats sums, words weight, uint32_t x);

template <>
inline floats add_product<float>(floats sums, words weight, uint32_t x) {
    return sums + bits_as<floats>(weight) * bits_as<float>(x);
}

template <>
inline floats add_product<bfloat16>(floats sums, words weight, uint32_t x) {
#ifdef __AVX512BF16__
    return bits_as<floats>(_mm512_dpbf16_ps(bits_as<__m512>(sums), bits_as<__m512bh>(weight),
                                            bits_as<__m512bh>(_mm512_set1_epi32(static_cast<int>(x)))));
#else
    const uint32_t upper = 0xffff0000;
    return sums + bits_as<floats>(weight << 16) * bits_as<float>(x << 16) +
           bits_as<floats>(weight & upper) * bits_as<float>(x & upper);
#endif
}

// The sums of a tile stay in registers: PANELS times 16 rows of weights by IMAGES vectors.
#ifdef __AVX512F__
constexpr int64_t PANELS = 4, IMAGES = 6;
#else
constexpr int64_t PANELS = 1, IMAGES = 6;
#endif
constexpr int64_t TILE = PANELS * LANES;
static_assert(LINTX_TILE_ROWS % TILE == 0, "zeros fill the last tile of packed weights");

// The arguments of a product that are the same for all tiles. The strides are in elements.
struct Product {
    int64_t columns, activation, input_stride, output_stride;
};

template <class T, int64_t N>
void multiply_tile(const Product& product, const uint32_t* weight, const float* bias, const T* x, float* y) {
    floats sums[PANELS][N] = {};
    const int64_t depth = (product.columns + PER_WORD<T> - 1) / PER_WORD<T>;
    for (int64_t i = 0; i < depth; i++)
        for (int64_t panel = 0; panel < PANELS; panel++) {
            words w;
            std::memcpy(&w, weight + (panel * depth + i) * LANES, sizeof w);
            for (int64_t n = 0; n < N; n++) {
                uint32_t word;
                std::memcpy(&word, x + n * product.input_stride + i * PER_WORD<T>, sizeof word);
                sums[panel][n] = add_product<T>(sums[panel][n], w, word);
            }
        }
    for (int64_t n = 0; n < N; n++) {
        float* row = y + n * product.output_stride;
        for (int64_t panel = 0; panel < PANELS; panel++) {
            floats start;
            std::memcpy(&start, bias + panel * LANES, sizeof start);
            start += sums[panel][n];
            std::memcpy(row + panel * LANES, &start, sizeof start);
        }
        if (product.activation == GELU)
            for (int64_t i = 0; i < TILE; i++) row[i] = activate(row[i], GELU);
        else if (product.activation == RELU)
            for (int64_t i = 0; i < TILE; i++) row[i] = activate(row[i], RELU);
        else if (product.activation == SILU)
            for (int64_t i = 0; i < TILE; i++) row[i] = activate(row[i], SILU);
    }
}

// Tiles of N vectors, and smaller tiles for the rest.
template <class T, int64_t N>
void multiply_rows(const Product& product, int64_t count, const uint32_t* weight, const float* bias, const T* x, float* y) {
    int64_t b = 0;
    for (; b + N <= count; b += N)
        multiply_tile<T, N>(product, weight, bias, x + b * product.input_stride, y + b * product.output_stride);
    if constexpr (N > 1)
        multiply_rows<T, N - 1>(product, count - b, weight, bias, x + b * product.input_stride, y + b * product.output_stride);
}

template <class T>
void multiply(const Pass& pass, const Operation& op, int64_t input) {
    const int64_t columns = op.integer[0], rows = op.integer[1];
    const Product product{columns, op.integer[2], pass.stride<T>(input), pass.stride<float>(op.buffer[1])};
    const int64_t words = (columns + PER_WORD<T> - 1) / PER_WORD<T>;
    const uint32_t* weight = pass.at<uint32_t>(op.buffer[2], 0);
    const float* bias = pass.at<float>(op.buffer[3], 0);
    const T* x = pass.at<T>(input, 0);
    float* y = pass.at<float>(op.buffer[1], 0);
    pass.for_each((rows + TILE - 1) / TILE, pass.rows * columns * rows / 2, [&](int64_t tile) {
        const int64_t row = tile * TILE;
        multiply_rows<T, IMAGES>(product, pass.rows, weight + row * words, bias + row, x, y + row);
    });
}

void project(const Pass& pass, const Operation& op) {
    if (!op.integer[3]) return multiply<float>(pass, op, op.buffer[0]);
    const int64_t columns = op.integer[0];
    pass.for_each(pass.rows, pass.rows * columns, [&](int64_t row) {
        const float* x = pass.at<float>(op.buffer[0], row);
        bfloat16* rounded = pass.at<bfloat16>(op.buffer[4], row);
        for (int64_t i = 0; i < columns; i++) rounded[i] = bfloat16(x[i]);
        if (columns % 2) rounded[columns] = bfloat16(0.0f);
    });
    multiply<bfloat16>(pass, op, op.buffer[4]);
}

}  // namespace
