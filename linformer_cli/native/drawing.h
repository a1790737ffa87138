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

// The probabilities [levels] of all values of a mixture, up to a constant; MixtureHead of heads.py has the formula.
// With the edges of a value's bin, divided by the scale, as a < b, a logistic has the mass
//
//     sigmoid(b) - sigmoid(a) = sigmoid(b) sigmoid(-a) (1 - exp(a - b)).
//
// The product loses no digits. The first bin has no lower edge, and the last has no upper edge. The edges of a logistic
// are equally far apart, so the odds exp(b) of every sixteenth edge give those of all others. Results below TINY may be
// wrong, because edges above LARGEST_EDGE are moved there to keep all odds finite.
constexpr double LARGEST_EDGE = 580, TINY = 1e-250;
inline void find_mixture_shares(const Head& head, const float* parameters, double* shares) {
    constexpr int64_t GROUP = 16;
    const int64_t K = head.mixtures, last = head.levels - 1;
    const double bin = 2.0 / static_cast<double>(last);
    const float most = *std::max_element(parameters, parameters + K);
    double below[MOST_LEVELS + GROUP], above[MOST_LEVELS + GROUP];  // the mass on both sides of a value's upper edge
    std::fill_n(shares, head.levels, 0.0);
    for (int64_t n = 0; n < K; n++) {
        const double mean = parameters[K + n], inverse = exponential(-head.bound(parameters[2 * K + n]));
        const double width = bin * inverse, weight = exponential(static_cast<double>(parameters[n] - most));
        double powers[GROUP];
        for (int32_t j = 0; j < GROUP; j++) powers[j] = exponential(j * width);
        // Powers of a large number would overflow, so a group then has one edge.
        const int64_t step = width < 8 ? GROUP : 1;
        for (int64_t first = 0; first < last; first += step) {
            const double edge = (static_cast<double>(first) * bin - 1 + bin / 2 - mean) * inverse;
            const double start = exponential(edge < LARGEST_EDGE ? edge : LARGEST_EDGE);
            for (int64_t j = 0; j < GROUP; j++) {
                const double odds = start * powers[j], rest = 1 / (1 + odds);
                below[first + j] = odds * rest;
                above[first + j] = rest;
            }
        }
        // For a small width, 1 - exp(-width) would lose digits.
        const double inner = weight * (width < 1e-5 ? width * (1 - width / 2) : 1 - exponential(-width));
        shares[0] += weight * below[0];
        for (int64_t value = 1; value < last; value++) shares[value] += inner * (below[value] * above[value - 1]);
        shares[last] += weight * above[last - 1];
    }
}

// The logarithms of the probabilities [levels] of all values of a mixture, up to a constant, however small they are.
// The mass of a logistic, with A = exp(-|a|) and B = exp(-|b|), is
//
//     exp(min(b, 0) + min(-a, 0)) (1 - exp(a - b)) / ((1 + A) (1 + B)),
//
// and the sum over the logistics is taken relative to the largest exponent.
inline void find_mixture_logs(const Head& head, const float* parameters, double* logs) {
    const int64_t K = head.mixtures, last = head.levels - 1;
    const double bin = 2.0 / static_cast<double>(last), infinite = 1e300;
    double lower[MOST_LEVELS + 1], tails[MOST_LEVELS + 1], sums[MOST_LEVELS];
    // Finds the lower edges of all values for a logistic, and the logarithm of (1 - exp(a - b)).
    const auto find_edges = [&](int64_t n) {
        const double mean = parameters[K + n], inverse = exponential(-head.bound(parameters[2 * K + n]));
        const double width = bin * inverse;
        for (int32_t v = 1; v <= last; v++) lower[v] = (v * bin - 1 - bin / 2 - mean) * inverse;
        lower[0] = -infinite, lower[last + 1] = infinite;
        return logarithm(width < 1e-5 ? width * (1 - width / 2) : 1 - exponential(-width));
    };
    const auto exponent = [&](int64_t n, int64_t v, double inside) {
        const double upper = lower[v + 1], edge = -lower[v];
        return parameters[n] + (v == 0 || v == last ? 0 : inside) + (upper < 0 ? upper : 0) + (edge < 0 ? edge : 0);
    };
    std::fill_n(logs, head.levels, -infinite);
    std::fill_n(sums, head.levels, 0.0);
    for (int64_t n = 0; n < K; n++) {
        const double inside = find_edges(n);
        for (int64_t v = 0; v <= last; v++) logs[v] = std::max(logs[v], exponent(n, v, inside));
    }
    for (int64_t n = 0; n < K; n++) {
        const double inside = find_edges(n);
        for (int64_t v = 0; v <= last + 1; v++) tails[v] = 1 + exponential(-std::fabs(lower[v]));
        for (int64_t v = 0; v <= last; v++)
            sums[v] += exponential(exponent(n, v, inside) - logs[v]) / (tails[v] * tails[v + 1]);
    }
    for (int64_t v = 0; v <= last; v++) logs[v] += logarithm(sums[v]);
}

// The logarithms of the probabilities [levels] of all values, up to a constant.
inline void find_logs(const Head& head, const float* parameters, double* logs) {
    if (!head.mixtures) return void(std::copy_n(parameters, head.levels, logs));
    find_mixture_shares(head, parameters, logs);
    // Only guidance or a high temperature can make up for such a small probability.
    const bool small = *std::min_element(logs, logs + head.levels) < TINY;
    if (small && (head.is_guided() || head.temperature > 8)) return find_mixture_logs(head, parameters, logs);
    for (int64_t value = 0; value < head.levels; value++) logs[value] = logarithm(std::max(logs[value], TINY));
}

// Replaces the logarithms [levels] of an image with its class by others + guidance (logs - others), where `others` are
// those of the image without a class, from the parameters `free`.
inline void guide(const Head& head, const float* free, double* logs) {
    double others[MOST_LEVELS];
    find_logs(head, free, others);
    for (int64_t n = 0; n < head.levels; n++) logs[n] = others[n] + head.guidance * (logs[n] - others[n]);
}

// Moves the likeliest of `count` values to the front of `order` until their weights reach `limit`, and returns how many
// these are. Of equally likely values, the smaller ones are first. If shares are NaN, the result is still at most
// `count`.
template <class Weigh>
inline int64_t select_likeliest(const double* shares, int64_t* order, int64_t count, double limit, Weigh weigh) {
    double before = 0;  // the weights of order[0 .. first - 1], which are kept
    int64_t first = 0, end = count;
    while (first < end) {
        std::swap(order[first + (end - first) / 2], order[end - 1]);
        const int64_t pivot = order[end - 1];
        int64_t middle = first;
        double likelier = before;
        for (int64_t i = first; i < end - 1; i++) {
            const int64_t value = order[i];
            const bool more = shares[value] > shares[pivot] || (shares[value] == shares[pivot] && value < pivot);
            likelier += more ? weigh(value) : 0;
            order[i] = order[middle];
            order[middle] = value;
            middle += more;
        }
        std::swap(order[middle], order[end - 1]);
        const bool kept = likelier < limit;
        before = kept ? likelier + weigh(pivot) : before;
        first = kept ? middle + 1 : first;
        end = kept ? end : middle;
    }
    return first;
}

// Sets the shares [levels] of the values that top-k and top-p drop to 0. Of equal shares, those of smaller values stay.
inline void drop_shares(const Head& head, double* shares) {
    int64_t order[MOST_LEVELS], kept = head.levels;
    std::iota(order, order + kept, 0);
    const double most = static_cast<double>(head.top_k);
    if (head.top_k) kept = select_likeliest(shares, order, kept, most, [](int64_t) { return 1.0; });
    double total = 0;
    for (int64_t n = 0; n < kept; n++) total += shares[order[n]];
    const auto weigh = [&](int64_t value) { return shares[value]; };
    if (head.top_p > 0) kept = select_likeliest(shares, order, kept, head.top_p * total, weigh);
    for (int64_t n = kept; n < head.levels; n++) shares[order[n]] = 0;
}

// Draws a value after the filters. With guidance, `free` are the parameters without the class.
inline int64_t draw_filtered(const Head& head, const float* parameters, const float* free, double uniform) {
    double shares[MOST_LEVELS];
    if (head.mixtures && !head.is_guided() && head.temperature == 1) find_mixture_shares(head, parameters, shares);
    else {
        find_logs(head, parameters, shares);
        if (head.is_guided()) guide(head, free, shares);
        exponentiate(head.levels, shares, head.temperature);
    }
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
