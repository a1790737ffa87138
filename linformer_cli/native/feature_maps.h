// The compiled feature maps of linear attention, their slopes, and the division by the denominator.
#pragma once

#include <cmath>

enum FeatureMap { ELU = LINTX_MAP_ELU, RELU = LINTX_MAP_RELU };

template <class A>
inline A feature(A x, int map) {
    // NaN must stay NaN, or a damaged model would keep drawing values. The compiler may turn a choice between x and 0
    // into a maximum, which drops NaN. It does not do that to the expressions below.
    if (map == RELU) return A(0.5) * (x + std::abs(x));
    return x < 0 ? std::exp(x) : x + 1;
}

// The slope of the map where its value is `phi`.
template <class A>
inline A slope(A phi, int map) {
    if (map == RELU) return phi > 0 ? 1 : 0;
    return phi < 1 ? phi : 1;
}

// 1 / weight, or 0 if `weight` is 0. The result is a double, because the reciprocal of the smallest floats overflows a
// float even if the quotient does not.
inline double reciprocal(double weight) { return weight == 0 ? 0 : 1 / weight; }
