// Adds a causal convolution of the values, with one kernel per head, to the output of the mechanism before it.
#pragma once

#include <cstdint>

#include "../operation.h"
#include "parts/lanes.h"

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

struct Convolution : Mix {
    const int64_t recent = buffer();   // the last values, oldest first
    const int64_t weights = buffer();  // the last of them for the new value
    const int64_t kernel = integer();

    void check(Rules& rules) const {
        rules.need(kernel >= 2);
        rules.state(recent, {H, kernel - 1, V});
        rules.constant(weights, {H, kernel});
    }

    void run() const {
        const Part parts[] = {{recent, (kernel - 1) * V}};
        for_heads(parts, kernel * V, [&](int64_t row, int64_t head, float** held) {
            const float *factors = own<float>(weights, row, head, kernel), *value = v_at(row, head);
            float* y = y_at(row, head);
            int64_t j = 0;
            for (; j + LANES <= V; j += LANES)
                convolve<floats>(
                    kernel, V, factors, value + j, held[0] + j, y + j, [](const float* from) { return load(from); },
                    store);
            for (; j < V; j++)
                convolve<float>(
                    kernel, V, factors, value + j, held[0] + j, y + j, [](const float* from) { return *from; },
                    [](float* to, float x) { *to = x; });
        });
    }
};
OPERATION("mix.convolution", Convolution, STATEFUL);

}  // namespace
