// Draws values with or without filters.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>

#include "inversion.h"

namespace {  // local to the library that includes it: the compiler may inline all of it

// Replaces numbers x by exp(x / temperature), divided by the largest result.
inline void exponentiate(int64_t count, double* numbers, double temperature) {
    const double most = *std::max_element(numbers, numbers + count);
    for (int64_t i = 0; i < count; i++) numbers[i] = exponential((numbers[i] - most) / temperature);
}

// The logarithms of the probabilities [levels] of all values of a mixture, up to a constant; MixtureHead of heads.py
// has the formula. With the edges of a value's bin, divided by the scale, as a < b, a logistic has the mass
//
//     sigmoid(b) sigmoid(-a) (1 - exp(a - b)) = exp(min(b, 0) + min(-a, 0)) (1 - exp(a - b)) / ((1 + B) (1 + A))
//
// with A = exp(-|a|) and B = exp(-|b|). The first bin has no lower edge, and the last has no upper edge. The sum over
// the logistics is taken relative to the largest exponent, so no digits are lost where all of them are tiny.
inline void find_mixture_logs(const Head& head, const float* parameters, double* logs) {
    const int64_t K = head.mixtures, last = head.levels - 1;
    const double bin = 2.0 / static_cast<double>(last), infinite = 1e300;
    // Edge number v is the lower edge of value v.
    double edges[MOST_LEVELS + 1], tails[MOST_LEVELS + 1], sums[MOST_LEVELS];
    const auto find_edges = [&](int64_t n, double& inside) {
        const double mean = parameters[K + n], inverse = exponential(-head.bound(parameters[2 * K + n]));
        const double width = bin * inverse;
        edges[0] = -infinite;
        for (int64_t v = 1; v <= last; v++) edges[v] = (static_cast<double>(v) * bin - 1 - bin / 2 - mean) * inverse;
        edges[last + 1] = infinite;
        // For a small width, 1 - exp(-width) would lose digits.
        inside = logarithm(width < 1e-5 ? width * (1 - width / 2) : 1 - exponential(-width));
    };
    const auto exponent = [&](int64_t v, double logit) {
        const double upper = edges[v + 1], lower = -edges[v];
        return logit + (upper < 0 ? upper : 0) + (lower < 0 ? lower : 0);
    };
    for (int64_t v = 0; v <= last; v++) logs[v] = -infinite, sums[v] = 0;
    double inside;
    for (int64_t n = 0; n < K; n++) {
        find_edges(n, inside);
        for (int64_t v = 0; v <= last; v++) {
            const double found = exponent(v, parameters[n] + (v == 0 || v == last ? 0 : inside));
            logs[v] = found > logs[v] ? found : logs[v];
        }
    }
    for (int64_t n = 0; n < K; n++) {
        find_edges(n, inside);
        for (int64_t v = 0; v <= last + 1; v++) tails[v] = 1 + exponential(-std::fabs(edges[v]));
        for (int64_t v = 0; v <= last; v++) {
            const double found = exponent(v, parameters[n] + (v == 0 || v == last ? 0 : inside));
            sums[v] += exponential(found - logs[v]) / (tails[v] * tails[v + 1]);
        }
    }
    for (int64_t v = 0; v <= last; v++) logs[v] += logarithm(sums[v]);
}

// The logarithms of the probabilities [levels] of all values, up to a constant.
inline void find_logs(const Head& head, const float* parameters, double* logs) {
    if (head.mixtures) return find_mixture_logs(head, parameters, logs);
    for (int64_t value = 0; value < head.levels; value++) logs[value] = parameters[value];
}

// Replaces the logarithms [levels] of an image with its class by others + guidance (logs - others), where `others` are
// those of the image without a class, from the parameters `free`.
inline void guide(const Head& head, const float* free, double* logs) {
    double others[MOST_LEVELS];
    find_logs(head, free, others);
    for (int64_t n = 0; n < head.levels; n++) logs[n] = others[n] + head.guidance * (logs[n] - others[n]);
}

// Sets the shares [levels] of the values that top-k and top-p drop to 0. Of equal shares, those of smaller values stay.
inline void drop_shares(const Head& head, double* shares) {
    const int64_t levels = head.levels, most = head.top_k ? std::min(head.top_k, levels) : levels;
    int64_t order[MOST_LEVELS];
    std::iota(order, order + levels, 0);
    // Of two values, the less likely one. A heap stays in its memory even if shares are NaN, unlike a sort.
    const auto less = [&](int64_t a, int64_t b) { return shares[a] < shares[b] || (shares[a] == shares[b] && a > b); };
    std::make_heap(order, order + levels, less);
    double total = 0, before = 0;
    for (int64_t n = levels - 1; n >= levels - most; n--) {
        std::pop_heap(order, order + n + 1, less);  // moves the likeliest of the first n + 1 values to place n
        total += shares[order[n]];
    }
    for (int64_t n = levels - 1; n >= 0; n--) {
        double& share = shares[order[n]];
        const bool kept = n >= levels - most && (head.top_p <= 0 || before < head.top_p * total);
        before += share;
        if (!kept) share = 0;
    }
}

// Draws a value after the filters. With guidance, `free` are the parameters without the class.
inline int64_t draw_filtered(const Head& head, const float* parameters, const float* free, double uniform) {
    double shares[MOST_LEVELS];
    find_logs(head, parameters, shares);
    if (head.is_guided()) guide(head, free, shares);
    exponentiate(head.levels, shares, head.temperature);
    if (head.top_k || head.top_p > 0) drop_shares(head, shares);
    return find_share(head.levels, shares, uniform, nullptr);
}

// Draws a value from the parameters of an image. With guidance, `free` are its parameters without the class.
inline int64_t draw(const Head& head, const float* parameters, const float* free, double uniform) {
    return head.is_filtered() ? draw_filtered(head, parameters, free, uniform)
           : head.mixtures    ? draw_mixture(head, parameters, uniform)
                              : invert(head.levels, parameters, uniform, nullptr);
}

}  // namespace
