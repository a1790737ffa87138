// Sums over the lanes of vectors, and memory for intermediate results.
#pragma once

#include <cstdint>
#include <cstring>
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

template <class Half, class Vector>
inline Half fold(Vector values) {
    Half low, high;
    std::memcpy(&low, &values, sizeof low);
    std::memcpy(&high, reinterpret_cast<const char*>(&values) + sizeof low, sizeof high);
    return low + high;
}

// The sum of all lanes, in a fixed order.
inline float sum_lanes(floats values) {
    typedef float eight __attribute__((vector_size(32)));
    typedef float four __attribute__((vector_size(16)));
    const four rest = fold<four>(fold<eight>(values));
    return (rest[0] + rest[2]) + (rest[1] + rest[3]);
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
