// x plus a branch after dropout, and the gradient, for the CPU; called by dropout.py.
//
// Whether element i is kept depends only on the seed and i. No mask is stored: the backward pass recomputes it.

#include <cmath>
#include <cstdint>

#include "numbers.h"

namespace {

// A 32-bit hash in which every output bit depends on every input bit (the rounds of "lowbias32", Wellons 2018).
inline uint32_t mix(uint32_t word) {
    word = (word ^ (word >> 16)) * 0x7feb352du;
    word = (word ^ (word >> 15)) * 0x846ca68bu;
    return word ^ (word >> 16);
}

// The number of elements that share one 32-bit seed. Threads divide the work in blocks of this size.
constexpr int64_t BLOCK = 4096;

template <class F>
void for_kept(int64_t count, uint64_t seed, double probability, F visit) {
    const uint32_t limit = static_cast<uint32_t>(std::ldexp(probability, 32));
    const float scale = static_cast<float>(1 / (1 - probability));
#pragma omp parallel for schedule(static) if (count > 65536)
    for (int64_t block = 0; block < (count + BLOCK - 1) / BLOCK; block++) {
        const int64_t first = block * BLOCK, last = first + BLOCK < count ? first + BLOCK : count;
        const uint32_t low = mix(static_cast<uint32_t>(seed) + mix(static_cast<uint32_t>(block)));
        const uint32_t key = mix(low ^ mix(static_cast<uint32_t>(seed >> 32)));
        for (int64_t i = first; i < last; i++)
            visit(i, mix(key ^ static_cast<uint32_t>(i - first)) >= limit ? scale : 0.0f);
    }
}

template <class E>
void add(int64_t count, const float* x, const E* branch, float* sum, uint64_t seed, double probability) {
    for_kept(count, seed, probability,
             [=](int64_t i, float scale) { sum[i] = x[i] + static_cast<float>(branch[i]) * scale; });
}

template <class E>
void differentiate(int64_t count, const float* gradient, E* of_branch, uint64_t seed, double probability) {
    for_kept(count, seed, probability, [=](int64_t i, float scale) { of_branch[i] = E(gradient[i] * scale); });
}

}  // namespace

extern "C" {

void lintx_dropout_add(int64_t half, int64_t count, const float* x, const void* branch, float* sum, uint64_t seed,
                       double probability) {
    if (half)
        add(count, x, static_cast<const bfloat16*>(branch), sum, seed, probability);
    else
        add(count, x, static_cast<const float*>(branch), sum, seed, probability);
}

void lintx_dropout_gradient(int64_t half, int64_t count, const float* gradient, void* of_branch, uint64_t seed,
                            double probability) {
    if (half)
        differentiate(count, gradient, static_cast<bfloat16*>(of_branch), seed, probability);
    else
        differentiate(count, gradient, static_cast<float*>(of_branch), seed, probability);
}
}
