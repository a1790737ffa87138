// The gradient of log d_t in a sum with decay, s_t = d_t s_{t-1} + k_t v_t^T, where it is much smaller than its terms.
//
// Let g_t be the gradient of d_t s_{t-1}, which is a sum with decay in reverse. The gradient of log d_t is the product
// d_t s_{t-1} g_t, summed over rows. Kernels compute it faster, as a sum of k_j dk_j - q_j dq_j over later positions.
// In that sum, everything that does not pass position t cancels but for rounding errors, which do not shrink with d_t.
#pragma once

#include <cmath>
#include <limits>

#include "scan.h"

namespace {

// The positions of a block of one head: what each adds to s, and what it adds to g.
template <class A, int WRITES>
struct DecayBlock {
    const A *k, *v, *g_k[WRITES], *g_v[WRITES], *decay;
};

// Raises `largest` to the largest |x| of each decay, for `count` rows of `stride` numbers that begin with the decays.
template <class A>
void raise_largest(int64_t count, int64_t stride, int64_t decays, const A* x, A* largest) {
    for (int64_t t = 0; t < count; t++)
        for (int64_t i = 0; i < decays; i++) largest[i] = std::max(largest[i], std::abs(x[t * stride + i]));
}

// Sums the rows of `gradient` [T, decays] over later positions, starting with `sums`. Blocks with a nearly closed gate,
// and blocks whose sums are hardly above the rounding errors of their terms, are then computed again as products of
// states. `largest` [blocks, decays] has the sizes of the terms, and `logs` are log d. `load(first, count)` returns a
// `DecayBlock`. `carried` and `grad_total` are s before, and g after, all positions [C, V] (null: 0). In these blocks,
// the products of d_t s_{t-1} and the last `g_v` replace the rows of `read`, if it is given.
template <SequenceDecay D, int WRITES, class A, class Load>
void sum_decay_gradient(int64_t T, int64_t C, int64_t V, std::vector<double>& sums, const A* largest, const A* carried,
                        const A* grad_total, const Rows<A>& logs, const Rows<A>& gradient, Load load,
                        const Rows<A>* read = nullptr) {
    using L = Lanes<A>;
    const int64_t decays = sums.size(), blocks = count_blocks(T), Cp = L::pad(C), Vp = L::pad(V);
    const int64_t width = D == ALL ? 1 : Cp;
    constexpr SequenceDecay TURNED = D == ALL ? ALL : COLUMNS;  // features are in the lanes of vectors
    constexpr A LEAST = 8192 * std::numeric_limits<A>::epsilon();
    const A closed = static_cast<A>(logarithm(LEAST));
    std::vector<A> terms(decays), found(decays);
    raise_largest(blocks, decays, decays, largest, terms.data());
    std::vector<int64_t> places(blocks, -1);  // of the states before the blocks that are computed again
    int64_t again = 0;
    for (int64_t n = blocks - 1; n >= 0; n--) {
        bool is_inexact = false;
        std::fill(found.begin(), found.end(), A(0));
        for (int64_t t = std::min(T, (n + 1) * SCAN_BLOCK) - 1; t >= n * SCAN_BLOCK; t--) {
            A *row = gradient.at(t), *log_decay = logs.at(t);
            for (int64_t i = 0; i < decays; i++) row[i] = static_cast<A>(sums[i] += row[i]);
            for (int64_t i = 0; i < decays; i++) is_inexact |= log_decay[i] < closed;
            raise_largest(1, decays, decays, row, found.data());
        }
        for (int64_t i = 0; i < decays; i++) is_inexact |= found[i] > 0 && found[i] < LEAST * terms[i];
        if (is_inexact) places[n] = again++;
    }
    if (again == 0) return;
    Sum<A> S(V, C, false), G(V, C, false);
    const int64_t size = S.rows.size();
    std::vector<A> starts(again * size), before(SCAN_BLOCK * size);
    S.load(carried, true);
    G.load(grad_total, true);
    for (int64_t n = 0; n < blocks; n++) {
        const int64_t first = n * SCAN_BLOCK, count = std::min(SCAN_BLOCK, T - first);
        if (places[n] >= 0) std::copy(S.rows.begin(), S.rows.end(), &starts[places[n] * size]);
        const DecayBlock<A, WRITES> x = load(first, count);
        scan<TURNED>(count, Positions<A, 1, 0>{{x.v}, {x.k}, {}, {}, x.decay}, S);
    }
    for (int64_t n = blocks - 1; n >= 0; n--) {
        const int64_t first = n * SCAN_BLOCK, count = std::min(SCAN_BLOCK, T - first);
        const DecayBlock<A, WRITES> x = load(first, count);
        const auto at = [&](int64_t t) {
            Positions<A, WRITES, 0> writes{};
            for (int w = 0; w < WRITES; w++) writes.a[w] = x.g_v[w] + t * Vp, writes.b[w] = x.g_k[w] + t * Cp;
            writes.decay = x.decay + t * width;
            return writes;
        };
        if (places[n] < 0) {
            scan<TURNED>(count, at(0), G, true);
            continue;
        }
        std::copy_n(&starts[places[n] * size], size, S.rows.begin());
        for (int64_t t = 0; t < count; t++) {
            std::copy(S.rows.begin(), S.rows.end(), &before[t * size]);
            scan<TURNED>(1, Positions<A, 1, 0>{{x.v + t * Vp}, {x.k + t * Cp}, {}, {}, x.decay + t * width}, S);
        }
        for (int64_t t = count - 1; t >= 0; t--) {
            scan<TURNED>(1, at(t), G, true);
            A* row = gradient.at(first + t);
            for (int64_t i = 0; read && i < C; i++) {
                A sum = 0;
                for (int64_t j = 0; j < V; j++) sum += before[t * size + j * Cp + i] * x.g_v[WRITES - 1][t * Vp + j];
                read->at(first + t)[i] = x.decay[t * width + (D == ALL ? 0 : i)] * sum;
            }
            if (D == ALL) row[0] = x.decay[t] * dot(size, &before[t * size], G.rows.data());
            if (D == ALL) continue;
            std::fill(row, row + C, A(0));
            for (int64_t j = 0; j < V; j++)
                for (int64_t i = 0; i < C; i++) row[i] += before[t * size + j * Cp + i] * G.rows[j * Cp + i];
            for (int64_t i = 0; i < C; i++) row[i] *= x.decay[t * width + i];
        }
    }
}

}  // namespace
