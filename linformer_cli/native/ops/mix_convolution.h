// Adds a causal convolution of the values, with one kernel per head, to the output of the mixing operation before it.
//
// State of each head: the last values [kernel - 1, V], oldest first. Constants of each head: weights [kernel], the last
// of them for the new value. Integers: kernel, at least 2.
#pragma once

#include <cstdint>

#include "../program.h"
#include "lanes.h"

namespace {

// Adds to y [V] the convolution of `value` [V] and the values [kernel - 1, V] before it. In the same pass over memory,
// each value moves one place towards the oldest.
template <class Vector, class Load, class Store>
inline void convolve(int64_t kernel, int64_t V, const float* weights, const float* value, float* values, float* y,
                     Load load, Store store) {
    Vector sum = load(y), now = load(values);
    for (int64_t n = 0; n + 1 < kernel; n++) {
        const Vector next = load(n + 2 < kernel ? values + (n + 1) * V : value);
        __builtin_prefetch(values + (kernel - 1 + n) * V, 1);  // the values of the next head
        sum += weights[n] * now;
        store(values + n * V, next);
        now = next;
    }
    store(y, sum + weights[kernel - 1] * now);
}

void mix_convolution(const Pass& pass, const Operation& op) {
    const Mix mix{pass, op};
    const int64_t V = mix.value_width, kernel = mix.integer(0);
    const Part parts[] = {{0, (kernel - 1) * V}};
    for_heads(mix, parts, kernel * V, [&](int64_t row, int64_t head, float** state) {
        const float *weights = mix.own<float>(1, row, head, kernel), *value = mix.value(row, head);
        float* y = mix.output(row, head);
        int64_t j = 0;
        for (; j + LANES <= V; j += LANES)
            convolve<floats>(
                kernel, V, weights, value + j, state[0] + j, y + j, [](const float* from) { return load(from); },
                store);
        for (; j < V; j++)
            convolve<float>(
                kernel, V, weights, value + j, state[0] + j, y + j, [](const float* from) { return *from; },
                [](float* to, float x) { *to = x; });
    });
}

}  // namespace
