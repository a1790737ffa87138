// Products of float32 and bfloat16 numbers with float32 sums.
#pragma once

#include <cstdint>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "../../numbers.h"
#include "products.h"

namespace {

// a * b + c with one rounding where the processor has an instruction for it. Everything else is compiled without fused
// multiply-adds.
inline floats::part multiply_add(floats::part a, float b, floats::part c) {
#if defined(__AVX512F__)
    return bits_as<floats::part>(_mm512_fmadd_ps(bits_as<__m512>(a), _mm512_set1_ps(b), bits_as<__m512>(c)));
#elif defined(__FMA__)
    return bits_as<floats::part>(_mm256_fmadd_ps(bits_as<__m256>(a), _mm256_set1_ps(b), bits_as<__m256>(c)));
#elif defined(__aarch64__)
    return bits_as<floats::part>(vfmaq_n_f32(bits_as<float32x4_t>(c), bits_as<float32x4_t>(a), b));
#else
    return a * b + c;
#endif
}

struct FloatSums {
    typedef uint32_t Word;
    typedef floats Sums;
    // Programs in int8 have few products of floats: one vector at a time saves the space of the tiles.
    static constexpr int64_t TAIL = 0, IMAGES = ONLY_INT8 ? 1 : REGISTER_BYTES == 16 ? 3 : 6;

    static floats::part start(const uint32_t*) { return floats::part{}; }
    static floats::part finish(floats::part sums, const uint32_t*, const char*) { return sums; }
};

struct Float32 : FloatSums {
    static floats::part add(floats::part sums, words::part weight, uint32_t x) {
        return multiply_add(bits_as<floats::part>(weight), bits_as<float>(x), sums);
    }
};

// Products and sums are rounded separately, so the results have the same bits on every processor.
struct Exact : FloatSums {
    static floats::part add(floats::part sums, words::part weight, uint32_t x) {
        return sums + bits_as<floats::part>(weight) * bits_as<float>(x);
    }
};

// A word is two numbers.
struct Bfloat16 : FloatSums {
    static floats::part add(floats::part sums, words::part weight, uint32_t x) {
        const uint32_t upper = 0xffff0000;
        sums = multiply_add(bits_as<floats::part>(weight << 16), bits_as<float>(x << 16), sums);
        return multiply_add(bits_as<floats::part>(weight & upper), bits_as<float>(x & upper), sums);
    }
};

inline void round_to_bfloat16(int64_t columns, const float* x, bfloat16* rounded) {
    for (int64_t i = 0; i < columns; i++) rounded[i] = bfloat16(x[i]);
    if (columns % 2) rounded[columns] = bfloat16(0.0f);
}

}  // namespace
