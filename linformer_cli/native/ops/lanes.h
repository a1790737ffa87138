// Sums over the lanes of vectors, and memory for intermediate results.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace {

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

inline floats load(const float* from) {
    floats values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

inline void store(float* to, floats values) { std::memcpy(to, &values, sizeof values); }

// The elements `I` of two vectors side by side. Compilers make one shuffle of this, without memory.
template <class To, class Vector, size_t... I>
inline To pick(const Vector& a, const Vector& b, std::index_sequence<I...>) {
    constexpr size_t width = sizeof(Vector) / sizeof(float);
    return To{(I < width ? a[I % width] : b[I % width])...};
}

template <class Half, class Vector, size_t... I>
inline Half fold(const Vector& values, std::index_sequence<I...>) {
    return Half{values[I]...} + Half{values[sizeof...(I) + I]...};
}

typedef float four __attribute__((vector_size(16)));

// The sum of all lanes, in a fixed order.
inline float sum_lanes(floats values) {
    typedef float eight __attribute__((vector_size(32)));
    const four rest = fold<four>(fold<eight>(values, std::make_index_sequence<8>()), std::make_index_sequence<4>());
    return (rest[0] + rest[2]) + (rest[1] + rest[3]);
}

// The same sums of four vectors.
inline four sum_lanes(const floats& a, const floats& b, const floats& c, const floats& d) {
    const std::index_sequence<0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23> halves{};
    const std::index_sequence<8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31> other_halves{};
    const std::index_sequence<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27> quarters{};
    const std::index_sequence<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31> other_quarters{};
    const std::index_sequence<2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13> pairs{};
    const std::index_sequence<1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14> neighbours{};
    const floats ab = pick<floats>(a, b, halves) + pick<floats>(a, b, other_halves);
    const floats cd = pick<floats>(c, d, halves) + pick<floats>(c, d, other_halves);
    floats sums = pick<floats>(ab, cd, quarters) + pick<floats>(ab, cd, other_quarters);
    sums += pick<floats>(sums, sums, pairs);
    sums += pick<floats>(sums, sums, neighbours);
    return four{sums[0], sums[4], sums[8], sums[12]};
}

// The sum of a[i] * b[i], in a fixed order.
inline float dot(int64_t count, const float* a, const float* b) {
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
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int64_t lane = 0; lane < LANES; lane++) most[lane] = x[i + lane] > most[lane] ? x[i + lane] : most[lane];
    for (; i < count; i++) most[0] = x[i] > most[0] ? x[i] : most[0];
    for (const float lane : most) most[0] = lane > most[0] ? lane : most[0];
    return most[0];
}

// Uninitialised memory of this thread for `count` floats, valid until the thread's next call with the same `Tag`.
template <class Tag>
inline float* workspace(int64_t count) {
    static thread_local std::vector<float> memory;
    if (static_cast<int64_t>(memory.size()) < count) memory.resize(count);
    return memory.data();
}

}  // namespace
