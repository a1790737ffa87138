// Number formats, and number types that C++ lacks: bfloat16, and SIMD vectors.
#pragma once

#include <cstdint>
#include <cstring>

enum Format { BFLOAT16 = LINTX_FORMAT_BFLOAT16, INT8 = LINTX_FORMAT_INT8 };

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

// A 64-byte vector of floats or doubles; the compiler splits it to fit the processor.
template <class A>
struct Lanes {
    static constexpr int64_t count = 64 / sizeof(A);
    typedef A type __attribute__((vector_size(64)));
    static type load(const A* from) {
        type values;
        std::memcpy(&values, from, 64);
        return values;
    }
    static void store(A* to, type values) { std::memcpy(to, &values, 64); }
    // The sum of all lanes, in a fixed order.
    static A total(type values) {
        typedef A half __attribute__((vector_size(32)));
        typedef A quarter __attribute__((vector_size(16)));
        const quarter rest = fold<quarter>(fold<half>(values));
        A sum = 0;
        for (uint64_t i = 0; i < 16 / sizeof(A); i++) sum += rest[i];
        return sum;
    }
    template <class Half, class Whole>
    static Half fold(const Whole& values) {
        Half parts[2];
        std::memcpy(parts, &values, sizeof values);
        return parts[0] + parts[1];
    }
    static int64_t pad(int64_t width) { return (width + count - 1) / count * count; }
};
