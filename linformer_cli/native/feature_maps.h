// The feature maps of linear attention that the kernels have, and what they divide with.
#pragma once

#include <cmath>

enum FeatureMap { ELU = 0, RELU = 1 };

template <class A>
inline A feature(A x, int map) {
    // What is no number stays none, or a damaged model would draw on as if it were whole: fast math may turn a choice
    // between x and 0 into a maximum, which drops it, but not one between two sums.
    if (map == RELU) return A(0.5) * (x + std::abs(x));
    return x < 0 ? std::exp(x) : x + 1;
}

// What a quotient by `weight` is multiplied with, 0 where there is no weight. In double, since the reciprocal of the
// smallest floats is no float, while the quotient may well be one.
inline double reciprocal(double weight) { return weight == 0 ? 0 : 1 / weight; }
