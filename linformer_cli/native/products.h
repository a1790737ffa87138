// Products of packed weights and a few vectors, for inference.
#pragma once

#include <cstdint>
#include <cstring>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "numbers.h"

constexpr int64_t LANES = LINTX_LANES;  // of a vector; the compiler splits it to fit the processor
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

template <class To, class From>
inline To bits_as(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

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

// The sums of a tile stay in registers: PANELS times 16 rows by IMAGES images.
#ifdef __AVX512F__
constexpr int64_t PANELS = 4, IMAGES = 6;
#else
constexpr int64_t PANELS = 1, IMAGES = 6;
#endif

template <class T, int64_t N>
void multiply_tile(int64_t columns, const uint32_t* weight, const T* x, float* y, int64_t rows) {
    floats sums[PANELS][N] = {};
    const int64_t depth = columns / PER_WORD<T>;
    for (int64_t i = 0; i < depth; i++)
        for (int64_t panel = 0; panel < PANELS; panel++) {
            words w;
            std::memcpy(&w, weight + (panel * depth + i) * LANES, sizeof w);
            for (int64_t n = 0; n < N; n++) {
                uint32_t word;
                std::memcpy(&word, x + n * columns + i * PER_WORD<T>, sizeof word);
                sums[panel][n] = add_product<T>(sums[panel][n], w, word);
            }
        }
    for (int64_t panel = 0; panel < PANELS; panel++)
        for (int64_t n = 0; n < N; n++) std::memcpy(y + n * rows + panel * LANES, &sums[panel][n], sizeof(floats));
}

// Tiles of N images, and smaller tiles for the rest.
template <class T, int64_t N>
void multiply_images(int64_t B, int64_t columns, const uint32_t* weight, const T* x, float* y, int64_t rows) {
    int64_t b = 0;
    for (; b + N <= B; b += N) multiply_tile<T, N>(columns, weight, x + b * columns, y + b * rows, rows);
    if constexpr (N > 1) multiply_images<T, N - 1>(B - b, columns, weight, x + b * columns, y + b * rows, rows);
}
