// Products of 8-bit integers with 32-bit integer sums. The sums are the same on every machine.
//
// A number is an integer from -127 to 127 times a scale. Each row of weights and each input vector has its own scale. A
// word of a panel holds four weights of a row. The tail of a panel holds the scale and the sum of each row.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#elif defined(__wasm_simd128__)
#include <wasm_simd128.h>
#endif

#include "products.h"

namespace {

struct IntegerSums {
    typedef ints Sums;
    static constexpr int64_t TAIL = 2;

    static floats::part finish(ints::part sums, const uint32_t* tail, const char* input_tail) {
        float scale;
        std::memcpy(&scale, input_tail, sizeof scale);
        return __builtin_convertvector(sums, floats::part) * (scale * bits_as<floats::part>(load_part(tail)));
    }
};

#if defined(__AVX512VNNI__)

// The instruction multiplies unsigned by signed numbers. Therefore 128 is added to every input, and sums start at -128
// times the sum of the weights.
struct Int8 : IntegerSums {
    typedef uint32_t Word;
    typedef uint8_t Number;
    static constexpr int64_t IMAGES = 6;
    static constexpr int32_t OFFSET = 128;

    static ints::part start(const uint32_t* tail) { return bits_as<ints::part>(load_part(tail + LANES)) * -OFFSET; }
    static ints::part add(ints::part sums, words::part weight, uint32_t x) {
        return bits_as<ints::part>(_mm512_dpbusd_epi32(bits_as<__m512i>(sums), _mm512_set1_epi32(static_cast<int>(x)),
                                                       bits_as<__m512i>(weight)));
    }
    static void order(char*, int64_t) {}
};

#elif defined(__ARM_FEATURE_DOTPROD)

// The instruction multiplies signed numbers. Sums, inputs and weights of four images fit into the 32 registers.
struct Int8 : IntegerSums {
    typedef uint32_t Word;
    typedef int8_t Number;
    static constexpr int64_t IMAGES = 4;
    static constexpr int32_t OFFSET = 0;

    static ints::part start(const uint32_t*) { return ints::part{}; }
    static ints::part add(ints::part sums, words::part weight, uint32_t x) {
        return bits_as<ints::part>(
            vdotq_s32(bits_as<int32x4_t>(sums), bits_as<int8x16_t>(weight), bits_as<int8x16_t>(vdupq_n_u32(x))));
    }
    static void order(char*, int64_t) {}
};

#else

// Products of 16-bit integers. Products of the even and of the odd numbers of a word are added separately.
struct Int8 : IntegerSums {
    typedef uint64_t Word;
    typedef int16_t Number;
    static constexpr int64_t IMAGES = REGISTER_BYTES == 16 ? 2 : 4;
    static constexpr int32_t OFFSET = 0;

    static ints::part start(const uint32_t*) { return ints::part{}; }
    static ints::part add(ints::part sums, words::part weight, uint64_t x) {
        const shorts even = bits_as<shorts>(weight << 8) >> 8, odd = bits_as<shorts>(weight) >> 8;
        return sums + add_pairs(even, static_cast<uint32_t>(x)) + add_pairs(odd, static_cast<uint32_t>(x >> 32));
    }
    // Puts the even numbers of each word before its odd ones.
    static void order(char* words, int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            uint64_t word;
            std::memcpy(&word, words + i * sizeof word, sizeof word);
            word = (word & 0xffff00000000ffff) | (word & 0xffff0000) << 16 | (word >> 16 & 0xffff0000);
            std::memcpy(words + i * sizeof word, &word, sizeof word);
        }
    }

private:
    typedef int16_t shorts __attribute__((vector_size(REGISTER_BYTES)));

    // For each pair of neighbouring weights, the sum of their products with two inputs.
    static ints::part add_pairs(shorts weights, uint32_t inputs) {
        const shorts x = bits_as<shorts>(words::part{} + inputs);
#if defined(__AVX512BW__)
        return bits_as<ints::part>(_mm512_madd_epi16(bits_as<__m512i>(weights), bits_as<__m512i>(x)));
#elif defined(__AVX2__)
        return bits_as<ints::part>(_mm256_madd_epi16(bits_as<__m256i>(weights), bits_as<__m256i>(x)));
#elif defined(__wasm_simd128__)
        return bits_as<ints::part>(wasm_i32x4_dot_i16x8(bits_as<v128_t>(weights), bits_as<v128_t>(x)));
#else
        const ints::part products = bits_as<ints::part>(weights * x);  // at most 127 * 128, so it fits into 16 bits
        return (bits_as<ints::part>(bits_as<words::part>(products) << 16) >> 16) + (products >> 16);
#endif
    }
};

#endif

// Writes the integers of x and then its scale. If x contains NaN or infinity, the scale is NaN.
inline void quantise(int64_t columns, const float* x, char* quantised) {
    const int64_t depth = (columns + 3) / 4;
    // The bits of absolute values, read as integers, have the same order as the values. NaN is the largest.
    int32_t largest = 0;
    for (int64_t i = 0; i < columns; i++) {
        const int32_t magnitude = bits_as<int32_t>(x[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    const float most = bits_as<float>(largest);
    const float least = 1e-30f;  // smaller numbers count as 0, because their reciprocals might not be finite
    const float inverse = most >= least && most < INFINITY ? 127 / most : 0;
    const float scale = most < least ? 0 : most < INFINITY ? most / 127 : NAN;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even, in the lowest bits
    Int8::Number* numbers = reinterpret_cast<Int8::Number*>(quantised);
    for (int64_t i = 0; i < columns; i++) {
        const int8_t number = static_cast<int8_t>(bits_as<int32_t>(x[i] * inverse + shift));
        numbers[i] = static_cast<Int8::Number>(number + Int8::OFFSET);
    }
    Int8::order(quantised, depth);
    std::memcpy(quantised + depth * sizeof(Int8::Word), &scale, sizeof scale);
}

}  // namespace
