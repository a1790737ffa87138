// The arguments of linear attention's kernel, and the maps from rows of q and k to features and back.
#pragma once

#include <cmath>
#include <limits>

#include "feature_maps.h"
#include "sweep.h"

namespace {

enum { EXPONENTIAL_MAP = -1 };  // other numbers are `FeatureMap`

// In the bidirectional form, one sweep adds all positions to the sums, and another one reads the sums.
enum LinearMode { CAUSAL, ADD, READ };

struct LinearCall {
    int64_t threads, B, H, T, C, V, map, K, mode;
    View q, k, v, y;  // y: the output, or its gradient
    View grad_q, grad_k, grad_v;
    void *s, *z;                   // before the positions (or null): [B, H, C, V], [B, H, C]
    void *total_s, *total_z;       // after the positions, or their gradients
    void *grad_s, *grad_z;         // gradients of s and z
    void *weights, *grad_weights;  // w_t = phi(q_t) . z_t [B, H, T], and its gradient
    void *columns, *maxima;        // EXPONENTIAL_MAP: W [K, C] and c [B, H, C]
};

// A dense row (null: zeros), padded with zeros to whole vectors.
template <class A>
void load_row(const A* from, int64_t width, std::vector<A>& to) {
    std::fill(to.begin(), to.end(), A(0));
    if (from) std::copy_n(from, width, to.begin());
}

// z <- z + k; returns q . z. Vectors of one size throughout, since a load of a larger size than the last store stalls.
template <class A>
A add_and_read(int64_t width, const A* k, const A* q, A* z) {
    using L = Lanes<A>;
    typename L::type sums = {};
    for (int64_t i = 0; i < width; i += L::count) {
        const typename L::type row = L::load(z + i) + L::load(k + i);
        L::store(z + i, row);
        sums += L::load(q + i) * row;
    }
    return L::total(sums);
}

// z <- z + a x; y <- y + b z.
template <class A>
void add_and_apply(int64_t width, A a, const A* x, A b, A* z, A* y) {
    using L = Lanes<A>;
    for (int64_t i = 0; i < width; i += L::count) {
        const typename L::type row = L::load(z + i) + a * L::load(x + i);
        L::store(z + i, row);
        L::store(y + i, L::load(y + i) + b * row);
    }
}

// phi(x) computed element by element; C = K.
template <class A, int MAP>
struct Elementwise {
    explicit Elementwise(const LinearCall&) {}
    void read_queries(const HeadPass<LinearCall>& pass, int64_t first, int64_t count, A* to) {
        read(pass.rows<A>(pass.call.q), first, count, pass.call.C, to, [](A x) { return feature(x, MAP); });
    }
    void read_keys(const HeadPass<LinearCall>& pass, int64_t first, int64_t count, A* to) {
        read(pass.rows<A>(pass.call.k), first, count, pass.call.C, to, [](A x) { return feature(x, MAP); });
    }
    void write_queries(const HeadPass<LinearCall>& pass, int64_t first, int64_t count, const A* features, A* gradient) {
        differentiate(count * Lanes<A>::pad(pass.call.C), features, gradient);
        write(gradient, first, count, pass.call.C, pass.rows<A>(pass.call.grad_q));
    }
    void write_keys(const HeadPass<LinearCall>& pass, int64_t first, int64_t count, const A* features, A* gradient) {
        differentiate(count * Lanes<A>::pad(pass.call.C), features, gradient);
        write(gradient, first, count, pass.call.C, pass.rows<A>(pass.call.grad_k));
    }
    static void differentiate(int64_t count, const A* features, A* gradient) {
        for (int64_t i = 0; i < count; i++) gradient[i] *= slope(features[i], MAP);
    }
};

// out_t <- x_t W for P rows and the columns in J vectors from m on.
template <int P, int J, class A>
void multiply_columns(const A* x, int64_t step, int64_t inner, const A* W, int64_t width, int64_t m, A* out) {
    using L = Lanes<A>;
    typename L::type sums[P][J] = {};
    for (int64_t n = 0; n < inner; n++) {
        typename L::type row[J];
        for (int j = 0; j < J; j++) row[j] = L::load(W + n * width + m + j * L::count);
        for (int p = 0; p < P; p++)
            for (int j = 0; j < J; j++) sums[p][j] += x[p * step + n] * row[j];
    }
    for (int p = 0; p < P; p++)
        for (int j = 0; j < J; j++) L::store(out + p * width + m + j * L::count, sums[p][j]);
}

template <int P, class A>
void multiply_rows(const A* x, int64_t step, int64_t inner, const A* W, int64_t width, A* out) {
    constexpr int J = REGISTERS / 16;  // the sums must fit into the registers
    int64_t m = 0;
    for (; m + J * Lanes<A>::count <= width; m += J * Lanes<A>::count)
        multiply_columns<P, J>(x, step, inner, W, width, m, out);
    for (; m < width; m += Lanes<A>::count) multiply_columns<P, 1>(x, step, inner, W, width, m, out);
}

// out_t <- x_t W for `count` rows: x [count, step], W [inner, width], out [count, width]; rows are whole vectors.
template <class A>
void multiply(int64_t count, const A* x, int64_t step, int64_t inner, const A* W, int64_t width, A* out) {
    int64_t t = 0;
    for (; t + 8 <= count; t += 8) multiply_rows<8>(x + t * step, step, inner, W, width, out + t * width);
    for (; t < count; t++) multiply_rows<1>(x + t * step, step, inner, W, width, out + t * width);
}

// The features exp(q_t W - m_t) of queries and exp(k_j W - |k_j|^2 / (2 sqrt(K)) - c) of keys, where m_t makes the
// largest exponent 0. c [C], the maximum over all keys, is added to the exponents of queries, so it cancels in each
// product. m_t cancels in the output, and only products of features and their gradients are read.
template <class A>
struct Exponential {
    const int64_t K, C, Kp = Lanes<A>::pad(K), Cp = Lanes<A>::pad(C);
    const A root;
    std::vector<A> columns, turned, raw, products;  // [K, Cp], [C, Kp], and twice [SCAN_BLOCK, Kp]

    explicit Exponential(const LinearCall& call)
        : K(call.K), C(call.C), root(static_cast<A>(1 / std::sqrt(static_cast<double>(call.K)))), columns(K * Cp),
          turned(C * Kp), raw(SCAN_BLOCK * Kp), products(SCAN_BLOCK * Kp) {
        const A* from = static_cast<const A*>(call.columns);
        for (int64_t n = 0; n < K; n++)
            for (int64_t i = 0; i < C; i++) turned[i * Kp + n] = columns[n * Cp + i] = from[n * C + i];
    }
    // The limit keeps the result finite if the squares overflow, because infinity minus infinity is NaN.
    A square(const A* row) const { return dot(Kp, row, row); }
    static constexpr A limit() { return std::numeric_limits<A>::max() / 4; }

    // The exponents of keys, without c.
    void read_exponents(const HeadPass<LinearCall>& pass, int64_t first, int64_t count, A* to) {
        read(pass.rows<A>(pass.call.k), first, count, K, raw.data());
        multiply(count, raw.data(), Kp, K, columns.data(), Cp, to);
        for (int64_t t = 0; t < count; t++) {
            const A length = square(&raw[t * Kp]), half = (length > limit() ? limit() : length) * (root / 2);
            for (int64_t i = 0; i < C; i++) to[t * Cp + i] -= half;
        }
    }
    void read_keys(const HeadPass<LinearCall>& pass, int64_t first, int64_t count, A* to) {
        const A* c = part<A>(pass.call.maxima, pass.head, C);
        read_exponents(pass, first, count, to);
        for (int64_t t = 0; t < count; t++)
            for (int64_t i = 0; i < C; i++) to[t * Cp + i] = exponential(to[t * Cp + i] - c[i]);
    }
    void read_queries(const HeadPass<LinearCall>& pass, int64_t first, int64_t count, A* to) {
        const A* c = part<A>(pass.call.maxima, pass.head, C);
        read(pass.rows<A>(pass.call.q), first, count, K, raw.data());
        multiply(count, raw.data(), Kp, K, columns.data(), Cp, to);
        for (int64_t t = 0; t < count; t++) {
            A* row = to + t * Cp;
            for (int64_t i = 0; i < C; i++) row[i] += c[i];
            const A highest = largest(C, row);
            for (int64_t i = 0; i < C; i++) row[i] = exponential(row[i] - highest);
        }
    }
    void write_queries(const HeadPass<LinearCall>& pass, int64_t first, int64_t count, const A* features, A* gradient) {
        for (int64_t i = 0; i < count * Cp; i++) gradient[i] *= features[i];
        multiply(count, gradient, Cp, C, turned.data(), Kp, raw.data());
        write(raw.data(), first, count, K, pass.rows<A>(pass.call.grad_q));
    }
    void write_keys(const HeadPass<LinearCall>& pass, int64_t first, int64_t count, const A* features, A* gradient) {
        std::vector<A>& keys = raw;
        read(pass.rows<A>(pass.call.k), first, count, K, keys.data());
        for (int64_t i = 0; i < count * Cp; i++) gradient[i] *= features[i];
        multiply(count, gradient, Cp, C, turned.data(), Kp, products.data());
        for (int64_t t = 0; t < count; t++) {
            const A* key = &keys[t * Kp];
            const A by = square(key) > limit() ? 0 : -root * total(Cp, gradient + t * Cp);
            for (int64_t n = 0; n < K; n++) products[t * Kp + n] += by * key[n];
        }
        write(products.data(), first, count, K, pass.rows<A>(pass.call.grad_k));
    }

    // The sum of a row of whole vectors.
    static A total(int64_t width, const A* row) {
        typename Lanes<A>::type sums = {};
        for (int64_t i = 0; i < width; i += Lanes<A>::count) sums += Lanes<A>::load(row + i);
        return Lanes<A>::total(sums);
    }
    static A largest(int64_t width, const A* row) {
        using L = Lanes<A>;
        typename L::type highest = typename L::type{} - static_cast<A>(INFINITY);
        int64_t i = 0;
        for (; i + L::count <= width; i += L::count) {
            const typename L::type values = L::load(row + i);
            highest = values > highest ? values : highest;  // NaN is never larger
        }
        A most = -static_cast<A>(INFINITY);
        for (; i < width; i++) most = row[i] > most ? row[i] : most;
        for (int64_t lane = 0; lane < L::count; lane++) most = highest[lane] > most ? highest[lane] : most;
        return most;
    }
};

// Raises c to the maximum of itself and the exponents of all keys.
template <class A>
struct Maxima : HeadPass<LinearCall> {
    typedef std::vector<A> State;
    State state;
    Exponential<A> map;
    std::vector<A> exponents;

    explicit Maxima(const LinearCall& call)
        : HeadPass(call), state(call.C), map(call), exponents(SCAN_BLOCK * map.Cp) {}
    void load() { load_row(part<A>(call.maxima, head, call.C), call.C, state); }
    void clear() { std::fill(state.begin(), state.end(), -static_cast<A>(INFINITY)); }
    void raise(const A* row) {
        for (int64_t i = 0; i < call.C; i++) state[i] = row[i] > state[i] ? row[i] : state[i];
    }
    void follow(const State& before) { raise(before.data()); }
    void visit(int64_t first, int64_t count, bool) {
        map.read_exponents(*this, first, count, exponents.data());
        for (int64_t t = 0; t < count; t++) raise(&exponents[t * map.Cp]);
    }
    void leave() { std::copy_n(state.begin(), call.C, part<A>(call.maxima, head, call.C)); }
};

}  // namespace
