// x plus a branch after dropout, and the gradient, for the CPU; called by dropout.py.
//
// Whether element i is kept depends only on the seed and i. No mask is stored: the backward pass recomputes it.

#include <cmath>
#include <cstdint>

#include "numbers.h"
#include "threads.h"

namespace {

// A 32-bit hash in which every output bit depends on every input bit (the rounds of "lowbias32", Wellons 2018).
inline uint32_t mix(uint32_t word) {
    word = (word ^ (word >> 16)) * 0x7feb352du;
    word = (word ^ (word >> 15)) * 0x846ca68bu;
    return word ^ (word >> 16);
}

// The number of elements that share one 32-bit seed. Threads divide the work in blocks of this size.
constexpr int64_t BLOCK = 4096;

struct Dropout {
    int64_t threads, count;
    uint64_t seed;
    double probability;
};

// The arguments are copies, because the variables that a lambda captures could change with every store, as far as the
// compiler knows. It would then not vectorise the loop.
template <class F>
void visit_block(int64_t first, int64_t last, uint32_t key, uint32_t limit, float scale, F visit) {
    for (int64_t i = first; i < last; i++)
        visit(i, mix(key ^ static_cast<uint32_t>(i - first)) >= limit ? scale : 0.0f);
}

template <class F>
void for_kept(const Dropout& mask, F visit) {
    const int64_t count = mask.count;
    const uint64_t seed = mask.seed;
    const uint32_t limit = static_cast<uint32_t>(std::ldexp(mask.probability, 32));
    const float scale = static_cast<float>(1 / (1 - mask.probability));
    spread(count > 65536 ? mask.threads : 1, (count + BLOCK - 1) / BLOCK, [=](int64_t block) {
        const int64_t first = block * BLOCK, last = first + BLOCK < count ? first + BLOCK : count;
        const uint32_t low = mix(static_cast<uint32_t>(seed) + mix(static_cast<uint32_t>(block)));
        const uint32_t key = mix(low ^ mix(static_cast<uint32_t>(seed >> 32)));
        visit_block(first, last, key, limit, scale, visit);
    });
}

template <class E>
void add(const Dropout& mask, const float* x, const E* branch, float* sum) {
    for_kept(mask, [=](int64_t i, float scale) { sum[i] = x[i] + static_cast<float>(branch[i]) * scale; });
}

template <class E>
void differentiate(const Dropout& mask, const float* gradient, E* of_branch) {
    for_kept(mask, [=](int64_t i, float scale) { of_branch[i] = E(gradient[i] * scale); });
}

}  // namespace

extern "C" {

void lintx_dropout_add(const Dropout* mask, int64_t half, const float* x, const void* branch, float* sum) {
    if (half)
        add(*mask, x, static_cast<const bfloat16*>(branch), sum);
    else
        add(*mask, x, static_cast<const float*>(branch), sum);
}

void lintx_dropout_gradient(const Dropout* mask, int64_t half, const float* gradient, void* of_branch) {
    if (half)
        differentiate(*mask, gradient, static_cast<bfloat16*>(of_branch));
    else
        differentiate(*mask, gradient, static_cast<float*>(of_branch));
}
}
