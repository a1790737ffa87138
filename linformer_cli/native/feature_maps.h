// The feature maps of linear attention that the kernels have, and what they divide with.
#pragma once

#include <cmath>

enum FeatureMap { ELU = 0, RELU = 1 };

template <class A>
inline A feature(A x, int map) {
    const A positive = x > 0 ? x : 0;
    return map == RELU ? positive : std::exp(x < 0 ? x : 0) + positive;
}

// What a quotient by `weight` is multiplied with, 0 where there is no weight. In double, since the reciprocal of the
// smallest floats is no float, while the quotient may well be one.
inline double reciprocal(double weight) { return weight == 0 ? 0 : 1 / weight; }
