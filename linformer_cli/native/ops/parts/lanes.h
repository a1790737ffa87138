// Sums over the lanes of vectors, and memory for intermediate results.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "../../numbers.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// 16 numbers, in registers.
template <class A>
struct Vector {
    typedef typename Lanes<A>::type part;
    static constexpr int64_t PART = Lanes<A>::count, PARTS = LANES / PART;
    part parts[PARTS];

    // clang-format off: it would write `OP## =`
#define LINTX_OPERATOR(OP)                                                         \
    friend Vector operator OP(Vector a, const Vector& b) {                         \
        for (int64_t n = 0; n < PARTS; n++) a.parts[n] = a.parts[n] OP b.parts[n]; \
        return a;                                                                  \
    }                                                                              \
    friend Vector operator OP(Vector a, A b) {                                     \
        for (int64_t n = 0; n < PARTS; n++) a.parts[n] = a.parts[n] OP b;          \
        return a;                                                                  \
    }                                                                              \
    friend Vector operator OP(A a, Vector b) {                                     \
        for (int64_t n = 0; n < PARTS; n++) b.parts[n] = a OP b.parts[n];          \
        return b;                                                                  \
    }                                                                              \
    template <class B>                                                             \
    Vector& operator OP##=(const B& other) {                                       \
        return *this = *this OP other;                                             \
    }
    // clang-format on
    LINTX_OPERATOR(+)
    LINTX_OPERATOR(-)
    LINTX_OPERATOR(*)
#undef LINTX_OPERATOR
};

typedef Vector<float> floats;
typedef Vector<int32_t> ints;
typedef Vector<uint32_t> words;

template <class To, class From>
inline To bits_as(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <class A>
inline typename Vector<A>::part load_part(const A* from) {
    return Lanes<A>::load(from);
}

// Each register is copied separately. GCC would copy a larger object in pieces of a different size, which stalls the
// processor.
inline floats load(const float* from) {
    floats values;
    for (int64_t n = 0; n < values.PARTS; n++) values.parts[n] = load_part(from + n * values.PART);
    return values;
}

typedef uint16_t halves __attribute__((vector_size(REGISTER_BYTES / 2)));

// One instruction. GCC would convert each half of the vector separately, with five.
inline words::part widen(halves bits) {
#if defined(__AVX512F__)
    return bits_as<words::part>(_mm512_cvtepu16_epi32(bits_as<__m256i>(bits)));
#elif defined(__AVX2__)
    return bits_as<words::part>(_mm256_cvtepu16_epi32(bits_as<__m128i>(bits)));
#else
    return __builtin_convertvector(bits, words::part);
#endif
}

inline floats load(const bfloat16* from) {
    floats values;
    for (int64_t n = 0; n < values.PARTS; n++) {
        halves bits;
        std::memcpy(&bits, from + n * values.PART, sizeof bits);
        values.parts[n] = bits_as<floats::part>(widen(bits) << 16);
    }
    return values;
}

inline void store_part(float* to, floats::part values) { Lanes<float>::store(to, values); }

inline void store(float* to, const floats& values) {
    for (int64_t n = 0; n < values.PARTS; n++) store_part(to + n * values.PART, values.parts[n]);
}

// The elements `I` of two concatenated vectors. Compilers turn this into one shuffle in registers.
template <class To, class From, size_t... I>
inline To pick(const From& a, const From& b, std::index_sequence<I...>) {
    constexpr size_t width = sizeof(From) / sizeof(float);
    return To{(I < width ? a[I % width] : b[I % width])...};
}

template <class Half, class From, size_t... I>
inline Half fold(const From& values, std::index_sequence<I...>) {
    return Half{values[I]...} + Half{values[sizeof...(I) + I]...};
}

typedef float four __attribute__((vector_size(16)));

// Adds lanes that are 8 apart, then lanes that are 4 apart.
inline four sum_quarters(const floats& values) {
#if defined(__AVX512F__)
    typedef float eight __attribute__((vector_size(32)));
    return fold<four>(fold<eight>(values.parts[0], std::make_index_sequence<8>()), std::make_index_sequence<4>());
#elif defined(__AVX2__)
    return fold<four>(values.parts[0] + values.parts[1], std::make_index_sequence<4>());
#else
    return (values.parts[0] + values.parts[2]) + (values.parts[1] + values.parts[3]);
#endif
}

// The sum of all lanes, in a fixed order.
inline float sum_lanes(const floats& values) {
    const four rest = sum_quarters(values);
    return (rest[0] + rest[2]) + (rest[1] + rest[3]);
}

// The sums of all lanes of four vectors, in the order of `sum_lanes` above.
inline four sum_lanes(const floats& a, const floats& b, const floats& c, const floats& d) {
#if defined(__AVX512F__)
    typedef floats::part all;
    const std::index_sequence<0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23> halves{};
    const std::index_sequence<8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31> other_halves{};
    const std::index_sequence<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27> quarters{};
    const std::index_sequence<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31> other_quarters{};
    const std::index_sequence<2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13> pairs{};
    const std::index_sequence<1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14> neighbours{};
    const all ab = pick<all>(a.parts[0], b.parts[0], halves) + pick<all>(a.parts[0], b.parts[0], other_halves);
    const all cd = pick<all>(c.parts[0], d.parts[0], halves) + pick<all>(c.parts[0], d.parts[0], other_halves);
    all sums = pick<all>(ab, cd, quarters) + pick<all>(ab, cd, other_quarters);
    sums += pick<all>(sums, sums, pairs);
    sums += pick<all>(sums, sums, neighbours);
    return four{sums[0], sums[4], sums[8], sums[12]};
#else
    const std::index_sequence<0, 1, 4, 5> halves{};
    const std::index_sequence<2, 3, 6, 7> other_halves{};
    const four quarters[] = {sum_quarters(a), sum_quarters(b), sum_quarters(c), sum_quarters(d)};
    const four ab = pick<four>(quarters[0], quarters[1], halves) + pick<four>(quarters[0], quarters[1], other_halves);
    const four cd = pick<four>(quarters[2], quarters[3], halves) + pick<four>(quarters[2], quarters[3], other_halves);
    return four{ab[0], ab[2], cd[0], cd[2]} + four{ab[1], ab[3], cd[1], cd[3]};
#endif
}

// The sum of a[i] * b[i], in a fixed order.
template <class Number>
inline float dot(int64_t count, const float* a, const Number* b) {
    floats sums = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) sums += load(a + i) * load(b + i);
    float rest = 0;
    for (; i < count; i++) rest += a[i] * b[i];
    return sum_lanes(sums) + rest;
}

// The sum of term(i) for i below `count`, in a fixed order that the compiler can vectorise.
template <class Term>
inline float sum_of(int64_t count, Term term) {
    floats sums = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        float terms[LANES];
        for (int64_t lane = 0; lane < LANES; lane++) terms[lane] = term(i + lane);
        sums += load(terms);
    }
    float rest = 0;
    for (; i < count; i++) rest += term(i);
    return sum_lanes(sums) + rest;
}

// The largest of `count` numbers other than NaN, or -3e38 if all are less.
inline float largest(int64_t count, const float* x) {
    float most[LANES];
    for (float& lane : most) lane = -3.0e38f;
    const int64_t whole = count / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int64_t lane = 0; lane < LANES; lane++) most[lane] = x[i + lane] > most[lane] ? x[i + lane] : most[lane];
    for (int64_t i = whole; i < count; i++) most[0] = x[i] > most[0] ? x[i] : most[0];
    for (const float lane : most) most[0] = lane > most[0] ? lane : most[0];
    return most[0];
}

template <class From, class To>
inline void copy_numbers(int64_t count, const From* from, To* to) {
    for (int64_t i = 0; i < count; i++) to[i] = To(from[i]);
}

// Prefetches `count` numbers for reading.
template <class Number>
inline void prefetch(int64_t count, const Number* from) {
    for (int64_t i = 0; i < count; i += 64 / sizeof(Number)) __builtin_prefetch(from + i);
}

// Memory of this thread for `count` numbers, valid until the thread's next call with the same `Tag`.
template <class Tag, class Number = float>
inline Number* workspace(int64_t count) {
    static thread_local std::vector<char> memory;
    const size_t bytes = static_cast<size_t>(count) * sizeof(Number);
    if (memory.size() < bytes) memory.resize(bytes);
    return reinterpret_cast<Number*>(memory.data());
}

}  // namespace
