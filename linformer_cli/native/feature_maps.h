// The compiled feature maps of linear attention, their slopes, and the division by the denominator.
#pragma once

#include <cmath>

#include "maths.h"

template <class A>
inline A feature(A x, int map) {
    // NaN must stay NaN, or a damaged model would keep drawing values. Comparisons with NaN are false.
    if (map == RELU_MAP) return x < 0 ? 0 : x;
    const A power = exponential(x);  // computed even if unused, so that the loop around it is vectorised
    return x < 0 ? power : x + 1;
}

// The slope of the map where its value is `phi`.
template <class A>
inline A slope(A phi, int map) {
    if (map == RELU_MAP) return phi > 0 ? 1 : 0;
    return phi < 1 ? phi : 1;
}

// 1 / weight, or 0 if `weight` is 0. The result is a double, because the reciprocal of the smallest floats overflows a
// float even if the quotient does not.
inline double reciprocal(double weight) { return weight == 0 ? 0 : 1 / weight; }
