// Solves the systems of a mesa layer by conjugate gradients, for the CPU; cpu_recurrences.py calls it.
//
//     h_t = a_t h_{t-1} + w_t k_t^T,    x_t near (h_t + Lambda)^-1 r_t
//
// w_t is a multiple of k_t, so h_t is symmetric. All iterations for a position run while its h_t is in the cache.
// Axes: B images, H heads, T positions, K width of a key.

#include <cmath>
#include <limits>

#include "scan.h"
#include "threads.h"

namespace {

struct MesaCall {
    int64_t threads, B, H, T, K, iterations;
    View right, keys, written, log_decay, x;
    void *carried, *penalty;  // h [B, H, K, K] before the positions, and the diagonal of Lambda [H, K]
};

// out <- the sum of weights[i] times row i, for N vectors of each row. Four sums at a time hide the latency of one.
template <int N, class A>
void combine_columns(int64_t count, const A* weights, const A* rows, int64_t width, A* out) {
    using L = Lanes<A>;
    typename L::type sums[4][N] = {};
    int64_t i = 0;
    for (; i + 4 <= count; i += 4)
        for (int64_t c = 0; c < 4; c++)
            for (int n = 0; n < N; n++) sums[c][n] += weights[i + c] * L::load(rows + (i + c) * width + n * L::count);
    for (; i < count; i++)
        for (int n = 0; n < N; n++) sums[0][n] += weights[i] * L::load(rows + i * width + n * L::count);
    for (int n = 0; n < N; n++) L::store(out + n * L::count, (sums[0][n] + sums[1][n]) + (sums[2][n] + sums[3][n]));
}

// The same for whole rows. `width` is a number of whole vectors.
template <class A>
void combine(int64_t count, const A* weights, const A* rows, int64_t width, A* out) {
    constexpr int64_t pair = 2 * Lanes<A>::count;
    int64_t m = 0;
    for (; m + pair <= width; m += pair) combine_columns<2>(count, weights, rows + m, width, out + m);
    if (m < width) combine_columns<1>(count, weights, rows + m, width, out + m);
}

template <class A>
A at_least_tiny(A x) {
    return x < std::numeric_limits<A>::min() ? std::numeric_limits<A>::min() : x;  // NaN stays NaN
}

// Vectors are padded with zeros to P numbers.
template <class A>
struct Solver {
    using L = Lanes<A>;
    const int64_t K, iterations, P = L::pad(K), I = L::pad(iterations);
    std::vector<A> residual, along, change, overlaps;
    std::vector<A> units, turned;  // residuals with length 1 as rows [iterations, P], and as columns [K, I]

    explicit Solver(const MesaCall& call)
        : K(call.K), iterations(call.iterations), residual(P), along(P), change(P), overlaps(I), units(iterations * P),
          turned(K * I) {}

    // to[i] <- term(i) for every vector.
    template <class Term>
    void set(A* to, Term term) const {
        for (int64_t i = 0; i < P; i += L::count) L::store(to + i, term(i));
    }

    // x <- near (h + Lambda)^-1 right. `product` holds h right at first. mesa.py has the same formulas and explains
    // them.
    void solve(const A* h, const A* penalty, const A* right, A* product, A* x) {
        A *residual = this->residual.data(), *along = this->along.data(), *change = this->change.data();
        const auto get = [](const A* from) { return L::load(from); };
        set(x, [](int64_t) { return typename L::type{}; });
        for (A* copy : {residual, along}) set(copy, [&](int64_t i) { return get(right + i); });
        const A first = dot(P, right, right);
        A square = first;
        for (int64_t n = 0;; n++) {
            A* unit = &units[n * P];
            const A inverse = 1 / std::sqrt(at_least_tiny(square));
            set(unit, [&](int64_t i) { return inverse * get(residual + i); });
            for (int64_t i = 0; i < K; i++) turned[i * I + n] = unit[i];
            if (n) combine(K, along, h, P, product);
            set(product, [&](int64_t i) { return get(product + i) + get(penalty + i) * get(along + i); });
            const A step = square / at_least_tiny(dot(P, along, product));
            set(x, [&](int64_t i) { return get(x + i) + step * get(along + i); });
            if (n + 1 == iterations) return;
            set(residual, [&](int64_t i) { return get(residual + i) - step * get(product + i); });
            // Columns that this solution has not set yet give overlaps that are not used.
            combine(K, residual, turned.data(), I, overlaps.data());
            combine(n + 1, overlaps.data(), units.data(), P, change);
            set(residual, [&](int64_t i) { return get(residual + i) - get(change + i); });
            const A before = square;
            square = dot(P, residual, residual);
            constexpr A epsilon = std::numeric_limits<A>::epsilon();
            if (square <= epsilon * epsilon * first) return;  // all later steps are 0
            const A kept = square / at_least_tiny(before);
            set(along, [&](int64_t i) { return get(residual + i) + kept * get(along + i); });
        }
    }
};

template <class A>
void solve_all(const MesaCall& call) {
    const int64_t K = call.K, P = Lanes<A>::pad(K), heads = call.B * call.H;
    share(call.threads, heads, [&](auto next) {
        Solver<A> solver(call);
        Sum<A> h(K, K, false);
        std::vector<A> right(SCAN_BLOCK * P), keys(SCAN_BLOCK * P), written(SCAN_BLOCK * P), x(SCAN_BLOCK * P),
            decay(SCAN_BLOCK), penalty(P), product(P);
        for (int64_t index = next(); index < heads; index = next()) {
            const int64_t b = index / call.H, head = index % call.H;
            h.load(part<A>(call.carried, index, K * K));
            std::copy_n(part<A>(call.penalty, head, K), K, penalty.data());
            for (int64_t first = 0; first < call.T; first += SCAN_BLOCK) {
                const int64_t count = std::min(SCAN_BLOCK, call.T - first);
                read(Rows<A>(call.right, b, head, SCAN_BLOCK), first, count, K, right.data());
                read(Rows<A>(call.keys, b, head, SCAN_BLOCK), first, count, K, keys.data());
                read(Rows<A>(call.written, b, head, SCAN_BLOCK), first, count, K, written.data());
                read_decays(Rows<A>(call.log_decay, b, head), first, count, call.T, 1, decay.data());
                for (int64_t t = 0; t < count; t++) {
                    const A* r = &right[t * P];
                    scan<ALL>(1, Positions<A>{{&written[t * P]}, {&keys[t * P]}, {r}, {product.data()}, &decay[t]}, h);
                    solver.solve(h.rows.data(), penalty.data(), r, product.data(), &x[t * P]);
                }
                write(x.data(), first, count, K, Rows<A>(call.x, b, head));
            }
        }
    });
}

}  // namespace

extern "C" void lintx_mesa_solve(const MesaCall* call, int64_t doubles) {
    if (doubles) return solve_all<double>(*call);
    solve_all<float>(*call);
}
