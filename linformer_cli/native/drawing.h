// Draws values with or without filters.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>

#include "inversion.h"
#include "numbers.h"

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
//
// Value 16 n + j is lane n of row j. Its lower edge is the upper edge of the same lane, one row before.
constexpr double LARGEST_EDGE = 580, TINY = 1e-250;
inline void find_mixture_shares(const Distribution& distribution, const float* parameters, double* shares) {
    typedef Lanes<double> Numbers;
    constexpr int64_t ROWS = 16, WIDTH = MOST_LEVELS / ROWS;
    const int64_t K = distribution.mixtures, last = distribution.levels - 1,
                  lanes = Numbers::pad((last - 1) / ROWS + 1);
    const double bin = 2.0 / static_cast<double>(last);
    const float most = *std::max_element(parameters, parameters + K);
    double sums[ROWS][WIDTH], odds[ROWS][WIDTH], lowest = 0, highest = 0;
    for (auto& row : sums) std::fill_n(row, lanes, 0.0);
    double inverses[MOST_LEVELS], weights[MOST_LEVELS], inner[MOST_LEVELS];
    for (int64_t n = 0; n < K; n++) {
        inverses[n] = -distribution.bound(parameters[2 * K + n]);
        weights[n] = static_cast<double>(parameters[n] - most);
    }
    for (int64_t n = 0; n < K; n++) {
        inverses[n] = exponential(inverses[n]);
        weights[n] = exponential(weights[n]);
        const double width = bin * inverses[n], mass = 1 - exponential(-width);
        // For a small width, 1 - exp(-width) would lose digits.
        inner[n] = weights[n] * (width < 1e-5 ? width * (1 - width / 2) : mass);
    }
    for (int64_t n = 0; n < K; n++) {
        const double mean = parameters[K + n], inverse = inverses[n], width = bin * inverse, factor = inner[n];
        // Powers of a large number would overflow, so the odds of each edge are then computed alone.
        const bool wide = width >= 8;
        for (int32_t j = 0; j < (wide ? ROWS : 1); j++)
            for (int32_t lane = 0; lane < lanes; lane++) {
                const double edge = (static_cast<double>(lane * ROWS + j) * bin - 1 + bin / 2 - mean) * inverse;
                odds[j][lane] = exponential(edge < LARGEST_EDGE ? edge : LARGEST_EDGE);
            }
        double powers[ROWS], below[WIDTH], above[WIDTH + 1] = {};  // the mass below the first row and above the last
        for (int32_t j = 0; j < ROWS; j++) powers[j] = exponential(j * width);
        for (int64_t lane = 0; lane < lanes; lane += Numbers::count) {
            Numbers::type rest{};
            for (int64_t j = 0; j < ROWS; j++) {
                const auto here = wide ? Numbers::load(odds[j] + lane) : Numbers::load(odds[0] + lane) * powers[j];
                const auto next = 1 / (1 + here), less = here * next;
                double* to = sums[j] + lane;
                if (j) Numbers::store(to, Numbers::load(to) + factor * (less * rest));
                else Numbers::store(below + lane, less);
                rest = next;
            }
            Numbers::store(above + 1 + lane, rest);
        }
        for (int64_t lane = 0; lane < lanes; lane++) sums[0][lane] += factor * (below[lane] * above[lane]);
        lowest += weights[n] * below[0];
        const double edge = odds[wide ? (last - 1) % ROWS : 0][(last - 1) / ROWS];
        highest += weights[n] * (1 / (1 + edge * (wide ? 1 : powers[(last - 1) % ROWS])));
    }
    for (int64_t value = 0; value < last; value += ROWS)
        for (int64_t j = 0; j < std::min(ROWS, last - value); j++) shares[value + j] = sums[j][value / ROWS];
    shares[0] = lowest;
    shares[last] = highest;
}

// The logarithms of the probabilities [levels] of all values of a mixture, up to a constant, however small they are.
// The mass of a logistic, with A = exp(-|a|) and B = exp(-|b|), is
//
//     exp(min(b, 0) + min(-a, 0)) (1 - exp(a - b)) / ((1 + A) (1 + B)),
//
// and the sum over the logistics is taken relative to the largest exponent.
inline void find_mixture_logs(const Distribution& distribution, const float* parameters, double* logs) {
    const int64_t K = distribution.mixtures, last = distribution.levels - 1;
    const double bin = 2.0 / static_cast<double>(last), infinite = 1e300;
    double lower[MOST_LEVELS + 1], tails[MOST_LEVELS + 1], sums[MOST_LEVELS];
    // Finds the lower edges of all values for a logistic, and the logarithm of (1 - exp(a - b)).
    const auto find_edges = [&](int64_t n) {
        const double mean = parameters[K + n], inverse = exponential(-distribution.bound(parameters[2 * K + n]));
        const double width = bin * inverse;
        for (int32_t v = 1; v <= last; v++) lower[v] = (v * bin - 1 - bin / 2 - mean) * inverse;
        lower[0] = -infinite, lower[last + 1] = infinite;
        return logarithm(width < 1e-5 ? width * (1 - width / 2) : 1 - exponential(-width));
    };
    const auto exponent = [&](int64_t n, int64_t v, double inside) {
        const double upper = lower[v + 1], edge = -lower[v];
        return parameters[n] + (v == 0 || v == last ? 0 : inside) + (upper < 0 ? upper : 0) + (edge < 0 ? edge : 0);
    };
    std::fill_n(logs, distribution.levels, -infinite);
    std::fill_n(sums, distribution.levels, 0.0);
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
inline void find_logs(const Distribution& distribution, const float* parameters, double* logs) {
    if (!distribution.mixtures) return void(std::copy_n(parameters, distribution.levels, logs));
    find_mixture_shares(distribution, parameters, logs);
    // Only guidance or a high temperature can make up for such a small probability.
    if ((distribution.is_guided() || distribution.temperature > 8) &&
        *std::min_element(logs, logs + distribution.levels) < TINY)
        return find_mixture_logs(distribution, parameters, logs);
    for (int64_t value = 0; value < distribution.levels; value++) logs[value] = logarithm(std::max(logs[value], TINY));
}

// Replaces the logarithms [levels] of an image with its class by others + guidance (logs - others), where `others` are
// those of the image without a class, from the parameters `free`.
inline void guide(const Distribution& distribution, const float* free, double* logs) {
    double others[MOST_LEVELS];
    find_logs(distribution, free, others);
    for (int64_t n = 0; n < distribution.levels; n++)
        logs[n] = others[n] + distribution.guidance * (logs[n] - others[n]);
}

// The logarithm of the probability of a value, with guidance but before the other filters. With guidance, `free` are
// the parameters of the image without a class.
inline double find_log(const Distribution& distribution, const float* parameters, const float* free, int64_t value) {
    double numbers[MOST_LEVELS];
    const bool shares = distribution.mixtures && !free;
    if (shares) find_mixture_shares(distribution, parameters, numbers);
    else find_logs(distribution, parameters, numbers);
    if (free) guide(distribution, free, numbers);
    const double own = shares ? logarithm(std::max(numbers[value], TINY)) : numbers[value];
    const double most = shares ? 0 : *std::max_element(numbers, numbers + distribution.levels);
    if (!shares) exponentiate(distribution.levels, numbers, 1);
    return own - most - logarithm(std::accumulate(numbers, numbers + distribution.levels, 0.0));
}

// Moves the likeliest of `count` values to the front of `order` until their shares, or their number if `counts`, reach
// `limit`, and returns how many these are. Of equally likely values, the smaller ones are first. If shares are NaN, the
// result is still at most `count`.
inline int64_t select_likeliest(const double* shares, int64_t* order, int64_t count, double limit, bool counts) {
    const auto weigh = [=](int64_t value) { return counts ? 1 : shares[value]; };
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
inline void drop_shares(const Distribution& distribution, double* shares) {
    int64_t order[MOST_LEVELS], count = distribution.levels;
    std::iota(order, order + count, 0);
    const auto keep = [&](double limit, bool counts) {
        const int64_t kept = select_likeliest(shares, order, count, limit, counts);
        for (int64_t n = kept; n < count; n++) shares[order[n]] = 0;
        count = kept;
    };
    if (distribution.top_k) keep(static_cast<double>(distribution.top_k), true);
    if (!(distribution.top_p > 0)) return;
    double total = 0;
    for (int64_t n = 0; n < count; n++) total += shares[order[n]];
    // Values with at most this share have less than 1 - top_p together, so others reach the limit.
    const double least = (1 - distribution.top_p) * total / static_cast<double>(count + 1);
    int64_t likely = 0;
    for (int64_t n = 0; n < count; n++) {
        const int64_t value = order[n];
        const bool more = shares[value] > least;
        order[likely] = value;
        likely += more;
        shares[value] = more ? shares[value] : 0;
    }
    count = likely;
    keep(distribution.top_p * total, false);
}

// Draws a value after the filters. With guidance, `free` are the parameters without the class.
inline int64_t draw_filtered(const Distribution& distribution, const float* parameters, const float* free,
                             double uniform) {
    double shares[MOST_LEVELS];
    if (distribution.mixtures && !distribution.is_guided() && distribution.temperature == 1)
        find_mixture_shares(distribution, parameters, shares);
    else {
        find_logs(distribution, parameters, shares);
        if (distribution.is_guided()) guide(distribution, free, shares);
        exponentiate(distribution.levels, shares, distribution.temperature);
    }
    if (distribution.top_k || distribution.top_p > 0) drop_shares(distribution, shares);
    return find_share(distribution.levels, shares, uniform, nullptr);
}

// Draws a value from the parameters of an image. With guidance, `free` are its parameters without the class.
inline int64_t draw(const Distribution& distribution, const float* parameters, const float* free, double uniform) {
    return distribution.is_filtered() ? draw_filtered(distribution, parameters, free, uniform)
           : distribution.mixtures    ? draw_mixture(distribution, parameters, uniform)
                                      : invert(distribution.levels, parameters, uniform, nullptr);
}

}  // namespace
