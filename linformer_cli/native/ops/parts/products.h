// Products of packed weights and the vectors of a few rows, plus a bias and an activation, for any number format.
//
// A panel holds 16 rows of weights. Each step over the columns has 16 words of 32 bits; after the last step, `TAIL`
// further words follow for each row. A format (products_float.h, products_int8.h) defines
//     Word                            the numbers of an input vector in one step
//     Sums                            the vector type of sums; the functions below work on one of its registers
//     TAIL                            words for each row of weights after its numbers
//     start(tail)                     the sums before the first step
//     add(sums, weights, word)        the sums after one step
//     finish(sums, tail, input_tail)  the results; `input_tail` follows the words of the input
#pragma once

#include <cstdint>
#include <cstring>

#include "../../maths.h"
#include "lanes.h"

namespace {

// The sums of a tile stay in registers: PANELS times 16 rows of weights by at most 6 vectors.
#ifdef __AVX512F__
constexpr int64_t PANELS = 4;
#else
constexpr int64_t PANELS = 1;
#endif
constexpr int64_t TILE = PANELS * LANES;
static_assert(TILE_ROWS % TILE == 0, "zeros fill the last tile of packed weights");

// The arguments of a product that are the same for all tiles. `depth` is the number of steps over the columns. Strides
// count elements of the pointers' types, `char` or `float`.
struct Product {
    int64_t depth, activation, input_stride, output_stride;
};

// Applies an activation to the results of a tile.
inline void activate_tile(int64_t activation, float* row) {
    if (activation == GELU)
        for (int64_t i = 0; i < TILE; i++) row[i] = activate(row[i], GELU);
    else if (activation == RELU)
        for (int64_t i = 0; i < TILE; i++) row[i] = activate(row[i], RELU);
    else if (activation == SILU)
        for (int64_t i = 0; i < TILE; i++) row[i] = activate(row[i], SILU);
}

template <class Format, int64_t N>
void multiply_tile(const Product& product, const uint32_t* weight, const float* bias, const char* x, float* y) {
    typedef typename Format::Word Word;
    typedef typename Format::Sums Sums;
    constexpr int64_t PARTS = PANELS * Sums::PARTS;
    const int64_t depth = product.depth, panel_words = (depth + Format::TAIL) * LANES;
    const uint32_t* tail = weight + depth * LANES;
    const char* input_tail = x + depth * sizeof(Word);
    // The offset of a register's words.
    const auto place = [&](int64_t part) { return part / Sums::PARTS * panel_words + part % Sums::PARTS * Sums::PART; };
    typename Sums::part sums[PARTS][N];
    for (int64_t part = 0; part < PARTS; part++)
        for (int64_t n = 0; n < N; n++) sums[part][n] = Format::start(tail + place(part));
    for (int64_t i = 0; i < depth; i++)
        for (int64_t part = 0; part < PARTS; part++) {
            const words::part w = load_part(weight + place(part) + i * LANES);
            for (int64_t n = 0; n < N; n++) {
                Word word;
                std::memcpy(&word, x + n * product.input_stride + i * sizeof word, sizeof word);
                sums[part][n] = Format::add(sums[part][n], w, word);
            }
        }
    for (int64_t n = 0; n < N; n++) {
        float* row = y + n * product.output_stride;
        for (int64_t part = 0; part < PARTS; part++) {
            const auto result =
                Format::finish(sums[part][n], tail + place(part), input_tail + n * product.input_stride);
            store_part(row + part * Sums::PART, result + load_part(bias + part * Sums::PART));
        }
        activate_tile(product.activation, row);
    }
}

// Computes tiles of N vectors, and smaller tiles for the remaining vectors.
template <class Format, int64_t N>
void multiply_rows(const Product& product, int64_t count, const uint32_t* weight, const float* bias, const char* x,
                   float* y) {
    int64_t b = 0;
    for (; b + N <= count; b += N)
        multiply_tile<Format, N>(product, weight, bias, x + b * product.input_stride, y + b * product.output_stride);
    if constexpr (N > 1)
        multiply_rows<Format, N - 1>(product, count - b, weight, bias, x + b * product.input_stride,
                                     y + b * product.output_stride);
}

}  // namespace
