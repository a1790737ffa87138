// Number formats, and number types that C++ lacks: bfloat16, and SIMD vectors.
#pragma once

#include <cstdint>
#include <cstring>

#include "constants.h"

// Browsers load an engine without the product formats float32 and bfloat16, which is smaller. With products in int8,
// caches are bfloat16.
#ifdef LINTX_ONLY_INT8
constexpr bool ONLY_INT8 = true;
#else
constexpr bool ONLY_INT8 = false;
#endif

// Whether the numbers of a cache of this format are bfloat16 instead of float.
constexpr bool is_bfloat16(int64_t format) { return ONLY_INT8 || format == BFLOAT16; }

struct bfloat16 {
    uint16_t bits;
    bfloat16() = default;
    bfloat16(float value) {
        uint32_t word;
        std::memcpy(&word, &value, 4);
        const uint32_t nearest = word + 0x7fff + ((word >> 16) & 1);  // ties to even
        // The carry could turn NaN into a number.
        bits = static_cast<uint16_t>(((word & 0x7fffffff) > 0x7f800000 ? word | 0x400000 : nearest) >> 16);
    }
    operator float() const {
        uint32_t word = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &word, 4);
        return value;
    }
};

#if defined(__AVX512F__)
constexpr int64_t REGISTER_BYTES = 64;
#elif defined(__AVX2__)
constexpr int64_t REGISTER_BYTES = 32;
#else
constexpr int64_t REGISTER_BYTES = 16;
#endif

// A SIMD register of floats, doubles or integers. Vectors wider than a register would go through memory in GCC.
template <class A>
struct Lanes {
    static constexpr int64_t count = REGISTER_BYTES / sizeof(A);
    typedef A type __attribute__((vector_size(REGISTER_BYTES)));
    static type load(const A* from) {
        type values;
        std::memcpy(&values, from, sizeof values);
        return values;
    }
    static void store(A* to, type values) { std::memcpy(to, &values, sizeof values); }
    // The sum of all lanes, in a fixed order.
    static A total(type values) { return fold<REGISTER_BYTES>(values); }
    template <int BYTES, class Part>
    static A fold(const Part& values) {
        if constexpr (BYTES > 16) {
            typedef A half __attribute__((vector_size(BYTES / 2)));
            half parts[2];
            std::memcpy(parts, &values, sizeof values);
            return fold<BYTES / 2>(parts[0] + parts[1]);
        } else {
            A sum = 0;
            for (uint64_t i = 0; i < BYTES / sizeof(A); i++) sum += values[i];
            return sum;
        }
    }
    static int64_t pad(int64_t width) { return (width + count - 1) / count * count; }
};
