// Distributions as integers, for the entropy coder of `lintx compress`; codec/predictor.py asks for them.
//
// Every value gets a frequency of at least 1, and the frequencies of a distribution add up to 2^24. The shares of the
// values are float64 in a fixed order of operations, as in sampling. They are rounded to 31 bits, and everything after
// that is integer arithmetic. The frequencies are therefore the same on every machine, and files depend on them: after
// a change here, older files cannot be decoded, and FORMAT in codec/header.py must be increased.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>

#include "inversion.h"
#include "threads.h"

namespace {

constexpr double LARGEST_WEIGHT = 2147483647;  // 2^31 - 1
constexpr int64_t FREQUENCIES = 1 << 24;

// Weights 0 .. 2^31 - 1 in proportion to softmax(logits); the largest is 2^31 - 1.
inline void weigh_logits(int64_t count, const float* logits, int32_t* weights) {
    const float most = *std::max_element(logits, logits + count);
    for (int64_t i = 0; i < count; i++)
        weights[i] = static_cast<int32_t>(exponential(static_cast<double>(logits[i] - most)) * LARGEST_WEIGHT);
}

// Weights of the values of a mixture of K logistics with parameters [3 K]: the differences of its cumulative
// distribution at the edges between values, in units of 2^-31. MixtureHead of heads.py has the formula.
inline void weigh_mixture(const Distribution& distribution, const float* parameters, int32_t* weights) {
    const int64_t K = distribution.mixtures, last = distribution.levels - 1;
    const double bin = 2.0 / static_cast<double>(last), most = *std::max_element(parameters, parameters + K);
    double cumulative[MOST_LEVELS] = {}, total = 0;
    for (int64_t n = 0; n < K; n++) {
        const double share = exponential(parameters[n] - most), mean = parameters[K + n];
        const double inverse = exponential(-distribution.bound(parameters[2 * K + n]));
        total += share;
        for (int64_t value = 0; value < last; value++) {
            const double edge = static_cast<double>(value) * bin - 1 + bin / 2;
            cumulative[value] += share / (1 + exponential((mean - edge) * inverse));
        }
    }
    int32_t below = 0;
    for (int64_t value = 0; value < last; value++) {
        // Rounding may make a number smaller than the one before it, or larger than the total.
        const double share = std::min(cumulative[value] / total, 1.0);
        const int32_t here = std::max(below, static_cast<int32_t>(share * LARGEST_WEIGHT));
        weights[value] = here - below;
        below = here;
    }
    weights[last] = static_cast<int32_t>(LARGEST_WEIGHT) - below;
}

// Writes the frequencies minus 1. What rounding leaves goes to the first of the likeliest values.
inline void scale_weights(int64_t count, const int32_t* weights, double* frequencies) {
    int64_t total = 0, rest = FREQUENCIES - count;
    for (int64_t i = 0; i < count; i++) total += weights[i];
    // The total is at least 2^31 - 1, so the factor has at most 32 bits and a product at most 63.
    const uint64_t factor = (static_cast<uint64_t>(rest) << 39) / static_cast<uint64_t>(total);
    for (int64_t i = 0; i < count; i++) {
        const int32_t scaled = static_cast<int32_t>(static_cast<uint64_t>(weights[i]) * factor >> 39);
        frequencies[i] = scaled;
        rest -= scaled;
    }
    frequencies[std::max_element(weights, weights + count) - weights] += static_cast<double>(rest);
}

// Writes the frequencies minus 1, float64 [rows, levels], of the distributions with parameters [rows, stride]. Returns
// the number of rows with NaN or infinity, whose frequencies are undefined.
inline int64_t find_frequencies(const Distribution& distribution, int64_t threads, int64_t rows,
                                const float* parameters, int64_t stride, double* frequencies) {
    const int64_t levels = distribution.levels;
    std::atomic<int64_t> damaged{0};
    spread(threads, rows, [&](int64_t row) {
        const float* own = parameters + row * stride;
        if (!are_finite(distribution.parameters(), own)) {
            damaged.fetch_add(1, std::memory_order_relaxed);
            return;
        }
        int32_t weights[MOST_LEVELS];
        distribution.mixtures ? weigh_mixture(distribution, own, weights) : weigh_logits(levels, own, weights);
        scale_weights(levels, weights, frequencies + row * levels);
    });
    return damaged.load(std::memory_order_relaxed);
}

}  // namespace
