// Linear attention over whole sequences, forward and backward, for the CPU; linear.py calls it.
//
// Axes: B images, H heads, T positions, C features, V value width. Inputs and outputs have elements E: float, double or
// bfloat16. Sums have type A: double if E is double, otherwise float.

#include <algorithm>

#include "feature_maps.h"
#include "scan.h"
#include "threads.h"

namespace {

template <class A>
void apply_map(int64_t count, int64_t width, A* x, int map) {
    const int64_t padded = Lanes<A>::pad(width);
    if (width == padded) {
        for (int64_t i = 0; i < count * padded; i++) x[i] = feature(x[i], map);
        return;
    }
    for (int64_t t = 0; t < count; t++)
        for (int64_t i = 0; i < width; i++) x[t * padded + i] = feature(x[t * padded + i], map);
}

// A dense vector (null: zeros), padded with zeros to whole vectors.
template <class A>
std::vector<A> padded(const A* from, int64_t width) {
    std::vector<A> to(Lanes<A>::pad(width));
    if (from) std::copy_n(from, width, to.begin());
    return to;
}

struct Call {
    int64_t threads, B, H, T, C, V, map;
    View q, k, v, y;                 // y: the output, or its gradient
    View grad_q, grad_k, grad_v;
    void *s, *z;                     // before the positions (or null): [B, H, C, V], [B, H, C]
    void *total_s, *total_z;         // after the positions, or their gradients
    void *grad_s, *grad_z;           // gradients of s and z
    void* weights;                   // phi(q_t) . z_t [B, H, T]
};

template <class E, class A>
void forward(const Call& call) {
    const int64_t T = call.T, C = call.C, V = call.V, Cp = Lanes<A>::pad(C), Vp = Lanes<A>::pad(V);
    const int64_t heads = call.B * call.H;
    share(call.threads, heads, [&](auto next) {
        std::vector<A> q(BLOCK * Cp), k(BLOCK * Cp), v(BLOCK * Vp), out(BLOCK * Vp);
        Sum<A> S(C, V);
        for (int64_t index = next(); index < heads; index = next()) {
            const int64_t b = index / call.H, h = index % call.H;
            const Rows<E> queries(call.q, b, h), keys(call.k, b, h), values(call.v, b, h), results(call.y, b, h);
            A* weights = part<A>(call.weights, index, T);
            S.load(part<A>(call.s, index, C * V));
            std::vector<A> z = padded(part<A>(call.z, index, C), C);
            for (int64_t first = 0; first < T; first += BLOCK) {
                const int64_t count = std::min(BLOCK, T - first);
                read(queries, first, count, C, q.data());
                read(keys, first, count, C, k.data());
                read(values, first, count, V, v.data());
                apply_map(count, C, q.data(), call.map);
                apply_map(count, C, k.data(), call.map);
                scan<KEEP>(count, Positions<A>{{k.data()}, {v.data()}, {q.data()}, {out.data()}, nullptr}, S);
                for (int64_t t = 0; t < count; t++) {
                    for (int64_t i = 0; i < Cp; i++) z[i] += k[t * Cp + i];
                    const A weight = weights[first + t] = dot(C, &q[t * Cp], z.data());
                    const double scale = reciprocal(weight);
                    E* row = results.at(first + t);
                    for (int64_t j = 0; j < V; j++) row[j] = static_cast<E>(static_cast<A>(out[t * Vp + j] * scale));
                }
            }
            S.store(part<A>(call.total_s, index, C * V));
            std::copy_n(z.begin(), C, part<A>(call.total_z, index, C));
        }
    });
}

// Let n_t = phi(q_t) s_t and w_t = phi(q_t) . z_t, so y_t = n_t / w_t. The gradients of n_t and w_t are g_t = dy_t /
// w_t and c_t = -(dy_t . y_t) / w_t. Then d phi(q_t) = s_t g_t + c_t z_t. Let r_t be the sum of phi(q_j) g_j^T over j
// >= t, and x_t the sum of c_j phi(q_j). Then d phi(k_t) = r_t v_t + x_t and d v_t = phi(k_t) r_t. Nothing of size C V
// is stored per position: s is recomputed, and dy_t . y_t is phi(q_t) . s_t g_t.
template <class E, class A>
void backward(const Call& call) {
    const int64_t T = call.T, C = call.C, V = call.V, Cp = Lanes<A>::pad(C), Vp = Lanes<A>::pad(V), map = call.map;
    const int64_t heads = call.B * call.H;
    share(call.threads, heads, [&](auto next) {
        std::vector<A> q(BLOCK * Cp), k(BLOCK * Cp), out(BLOCK * Cp), v(BLOCK * Vp), g(BLOCK * Vp), grad_v(BLOCK * Vp);
        std::vector<A> c(T);
        Sum<A> S(C, V), S_turned(V, C);
        for (int64_t index = next(); index < heads; index = next()) {
            const int64_t b = index / call.H, h = index % call.H;
            const Rows<E> queries(call.q, b, h), keys(call.k, b, h), values(call.v, b, h), grads(call.y, b, h);
            const Rows<E> to_q(call.grad_q, b, h), to_k(call.grad_k, b, h), to_v(call.grad_v, b, h);
            const A* weights = part<A>(call.weights, index, T);
            auto read_block = [&](int64_t first, int64_t count) {
                read(queries, first, count, C, q.data());
                read(keys, first, count, C, k.data());
                read(values, first, count, V, v.data());
                read(grads, first, count, V, g.data());
                apply_map(count, C, q.data(), map);
                apply_map(count, C, k.data(), map);
                for (int64_t t = 0; t < count; t++) {
                    const double scale = reciprocal(weights[first + t]);
                    for (int64_t j = 0; j < Vp; j++) g[t * Vp + j] = static_cast<A>(g[t * Vp + j] * scale);
                }
            };
            S_turned.load(part<A>(call.s, index, C * V), true);
            std::vector<A> z = padded(part<A>(call.z, index, C), C);
            for (int64_t first = 0; first < T; first += BLOCK) {
                const int64_t count = std::min(BLOCK, T - first);
                read_block(first, count);
                scan<KEEP>(count, Positions<A>{{v.data()}, {k.data()}, {g.data()}, {out.data()}, nullptr}, S_turned);
                for (int64_t t = 0; t < count; t++) {
                    const A share = dot(C, &q[t * Cp], &out[t * Cp]);
                    const A of_weight = static_cast<A>(-share * reciprocal(weights[first + t]));
                    c[first + t] = of_weight;
                    for (int64_t i = 0; i < Cp; i++) {
                        z[i] += k[t * Cp + i];
                        out[t * Cp + i] = (out[t * Cp + i] + of_weight * z[i]) * slope(q[t * Cp + i], map);
                    }
                }
                write(out.data(), first, count, C, to_q);
            }
            S.load(part<A>(call.total_s, index, C * V));
            S_turned.load(part<A>(call.total_s, index, C * V), true);
            z = padded(part<A>(call.total_z, index, C), C);
            for (int64_t first = (T - 1) / BLOCK * BLOCK; first >= 0; first -= BLOCK) {
                const int64_t count = std::min(BLOCK, T - first);
                read_block(first, count);
                scan<KEEP>(count, Positions<A>{{g.data()}, {q.data()}, {v.data()}, {out.data()}, nullptr}, S_turned, true);
                scan<KEEP>(count, Positions<A>{{q.data()}, {g.data()}, {k.data()}, {grad_v.data()}, nullptr}, S, true);
                for (int64_t t = count - 1; t >= 0; t--) {
                    for (int64_t i = 0; i < Cp; i++) {
                        z[i] += c[first + t] * q[t * Cp + i];
                        out[t * Cp + i] = (out[t * Cp + i] + z[i]) * slope(k[t * Cp + i], map);
                    }
                }
                write(out.data(), first, count, C, to_k);
                write(grad_v.data(), first, count, V, to_v);
            }
            if (call.grad_s) S.store(part<A>(call.grad_s, index, C * V));
            if (call.grad_z) std::copy_n(z.begin(), C, part<A>(call.grad_z, index, C));
        }
    });
}

}  // namespace

extern "C" {

enum class Element : int64_t { FLOAT, DOUBLE, BFLOAT16 };

void lintx_linear_forward(const Call* call, Element element) {
    if (element == Element::FLOAT) forward<float, float>(*call);
    if (element == Element::DOUBLE) forward<double, double>(*call);
    if (element == Element::BFLOAT16) forward<bfloat16, float>(*call);
}

void lintx_linear_backward(const Call* call, Element element) {
    if (element == Element::FLOAT) backward<float, float>(*call);
    if (element == Element::DOUBLE) backward<double, double>(*call);
    if (element == Element::BFLOAT16) backward<bfloat16, float>(*call);
}
}
