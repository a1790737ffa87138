// Linear attention over whole sequences, forward and backward, for the CPU; linear.py calls it.
//
// Axes: B images, H heads, T positions, C features, V value width. Inputs and outputs have elements E: float, double or
// bfloat16. Sums have type A: double if E is double, otherwise float.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "feature_maps.h"
#include "numbers.h"

namespace {

// For each of P positions in order: S <- S + a b^T, then out <- o^T S. S [N, M] is loaded and stored once for all P.
template <class A, int P>
void scan_positions(int64_t N, int64_t M, int64_t step_n, int64_t step_m, const A* a, const A* o, const A* b, A* out,
                    A* S) {
    using L = Lanes<A>;
    for (int64_t m = 0; m < M; m += L::count) {
        typename L::type values[P], sums[P] = {};
        for (int p = 0; p < P; p++) values[p] = L::load(b + p * step_m + m);
        for (int64_t n = 0; n < N; n++) {
            typename L::type row = L::load(S + n * M + m);
            for (int p = 0; p < P; p++) {
                row += a[p * step_n + n] * values[p];
                sums[p] += o[p * step_n + n] * row;
            }
            L::store(S + n * M + m, row);
        }
        for (int p = 0; p < P; p++) L::store(out + p * step_m + m, sums[p]);
    }
}

// out_t = o_t^T S_t, where S_t is S plus the sum of a_j b_j^T over all j up to t (reverse: from t on). Afterwards S is
// the total sum. a, o [T, N] and b, out [T, M] have rows padded to whole vectors.
template <class A>
void scan(int64_t T, int64_t N, int64_t M, const A* a, const A* o, const A* b, A* out, A* S, bool reverse) {
    M = Lanes<A>::pad(M);
    int64_t step_n = Lanes<A>::pad(N), step_m = M, t = 0;
    if (reverse) {
        a += (T - 1) * step_n, o += (T - 1) * step_n, b += (T - 1) * step_m, out += (T - 1) * step_m;
        step_n = -step_n, step_m = -step_m;
    }
    for (; t + 4 <= T; t += 4)
        scan_positions<A, 4>(N, M, step_n, step_m, a + t * step_n, o + t * step_n, b + t * step_m, out + t * step_m, S);
    for (; t < T; t++)
        scan_positions<A, 1>(N, M, step_n, step_m, a + t * step_n, o + t * step_n, b + t * step_m, out + t * step_m, S);
}

// The strides of a tensor [B, H, T, width] whose last dimension is contiguous.
struct View {
    void* data;
    int64_t image, head, position;
};

template <class E>
struct Rows {
    E* data;
    int64_t step;
    Rows(const View& view, int64_t b, int64_t h)
        : data(static_cast<E*>(view.data) + b * view.image + h * view.head), step(view.position) {}
    E* at(int64_t t) const { return data + t * step; }
};

template <class E, class A>
void read(const Rows<E>& rows, int64_t first, int64_t count, int64_t width, A* to) {
    const int64_t padded = Lanes<A>::pad(width);
    for (int64_t t = 0; t < count; t++) {
        const E* row = rows.at(first + t);
        for (int64_t i = 0; i < width; i++) to[t * padded + i] = static_cast<A>(row[i]);
        for (int64_t i = width; i < padded; i++) to[t * padded + i] = 0;
    }
}

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

// Copies a dense state [N, M] (null: zeros), or its transpose, to rows padded to whole vectors.
template <class A>
void read_state(const A* from, int64_t N, int64_t M, A* to, bool transpose) {
    const int64_t padded_n = Lanes<A>::pad(N), padded_m = Lanes<A>::pad(M);
    std::memset(to, 0, padded_n * padded_m * sizeof(A));
    if (!from) return;
    for (int64_t n = 0; n < N; n++)
        for (int64_t m = 0; m < M; m++) to[transpose ? m * padded_n + n : n * padded_m + m] = from[n * M + m];
}

template <class A>
void write_state(const A* from, int64_t N, int64_t M, A* to) {
    for (int64_t n = 0; n < N; n++) std::memcpy(to + n * M, from + n * Lanes<A>::pad(M), M * sizeof(A));
}

template <class A>
A* part(void* tensor, int64_t index, int64_t size) {
    return tensor ? static_cast<A*>(tensor) + index * size : nullptr;
}

// Positions per block, few enough for their data to stay in the cache.
constexpr int64_t BLOCK = 128;

struct Call {
    int64_t B, H, T, C, V, map;
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
#pragma omp parallel
    {
        std::vector<A> q(BLOCK * Cp), k(BLOCK * Cp), v(BLOCK * Vp), out(BLOCK * Vp), S(Cp * Vp), z(Lanes<A>::count * Cp);
#pragma omp for schedule(static)
        for (int64_t index = 0; index < call.B * call.H; index++) {
            const int64_t b = index / call.H, h = index % call.H;
            const Rows<E> queries(call.q, b, h), keys(call.k, b, h), values(call.v, b, h), results(call.y, b, h);
            A* weights = part<A>(call.weights, index, T);
            read_state(part<A>(call.s, index, C * V), C, V, S.data(), false);
            read_state(part<A>(call.z, index, C), 1, C, z.data(), false);
            for (int64_t first = 0; first < T; first += BLOCK) {
                const int64_t count = T - first < BLOCK ? T - first : BLOCK;
                read(queries, first, count, C, q.data());
                read(keys, first, count, C, k.data());
                read(values, first, count, V, v.data());
                apply_map(count, C, q.data(), call.map);
                apply_map(count, C, k.data(), call.map);
                scan(count, C, V, k.data(), q.data(), v.data(), out.data(), S.data(), false);
                for (int64_t t = 0; t < count; t++) {
                    A weight = 0;
                    for (int64_t i = 0; i < Cp; i++) {
                        z[i] += k[t * Cp + i];
                        weight += q[t * Cp + i] * z[i];
                    }
                    weights[first + t] = weight;
                    const double scale = reciprocal(weight);
                    E* row = results.at(first + t);
                    for (int64_t j = 0; j < V; j++) row[j] = static_cast<E>(static_cast<A>(out[t * Vp + j] * scale));
                }
            }
            write_state(S.data(), C, V, part<A>(call.total_s, index, C * V));
            write_state(z.data(), 1, C, part<A>(call.total_z, index, C));
        }
    }
}

// With n_t = phi(q_t) s_t, w_t = phi(q_t) . z_t, y_t = n_t / w_t, the gradients of n_t and w_t are g_t = dy_t / w_t and
// c_t = -(dy_t . y_t) / w_t. Then d phi(q_t) = s_t g_t + c_t z_t. Let r_t be the sum of phi(q_j) g_j^T over j >= t, and
// x_t the sum of c_j phi(q_j). Then d phi(k_t) = r_t v_t + x_t and d v_t = phi(k_t) r_t. Nothing of size C V is stored
// per position: s is recomputed, and dy_t . y_t is phi(q_t) . s_t g_t.
template <class E, class A>
void backward(const Call& call) {
    const int64_t T = call.T, C = call.C, V = call.V, Cp = Lanes<A>::pad(C), Vp = Lanes<A>::pad(V), map = call.map;
#pragma omp parallel
    {
        std::vector<A> q(BLOCK * Cp), k(BLOCK * Cp), out(BLOCK * Cp), v(BLOCK * Vp), g(BLOCK * Vp), grad_v(BLOCK * Vp);
        std::vector<A> S(Cp * Vp), S_transposed(Cp * Vp), z(Lanes<A>::count * Cp), c(T);
#pragma omp for schedule(static)
        for (int64_t index = 0; index < call.B * call.H; index++) {
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
            read_state(part<A>(call.s, index, C * V), C, V, S_transposed.data(), true);
            read_state(part<A>(call.z, index, C), 1, C, z.data(), false);
            for (int64_t first = 0; first < T; first += BLOCK) {
                const int64_t count = T - first < BLOCK ? T - first : BLOCK;
                read_block(first, count);
                scan(count, V, C, v.data(), g.data(), k.data(), out.data(), S_transposed.data(), false);
                for (int64_t t = 0; t < count; t++) {
                    A share = 0;
                    for (int64_t i = 0; i < Cp; i++) share += q[t * Cp + i] * out[t * Cp + i];
                    const A of_weight = static_cast<A>(-share * reciprocal(weights[first + t]));
                    c[first + t] = of_weight;
                    for (int64_t i = 0; i < Cp; i++) {
                        z[i] += k[t * Cp + i];
                        out[t * Cp + i] = (out[t * Cp + i] + of_weight * z[i]) * slope(q[t * Cp + i], map);
                    }
                    E* row = to_q.at(first + t);
                    for (int64_t i = 0; i < C; i++) row[i] = static_cast<E>(out[t * Cp + i]);
                }
            }
            read_state(part<A>(call.total_s, index, C * V), C, V, S.data(), false);
            read_state(part<A>(call.total_s, index, C * V), C, V, S_transposed.data(), true);
            read_state(part<A>(call.total_z, index, C), 1, C, z.data(), false);
            for (int64_t first = (T - 1) / BLOCK * BLOCK; first >= 0; first -= BLOCK) {
                const int64_t count = T - first < BLOCK ? T - first : BLOCK;
                read_block(first, count);
                scan(count, V, C, g.data(), v.data(), q.data(), out.data(), S_transposed.data(), true);
                scan(count, C, V, q.data(), k.data(), g.data(), grad_v.data(), S.data(), true);
                for (int64_t t = count - 1; t >= 0; t--) {
                    for (int64_t i = 0; i < Cp; i++) {
                        z[i] += c[first + t] * q[t * Cp + i];
                        out[t * Cp + i] = (out[t * Cp + i] + z[i]) * slope(k[t * Cp + i], map);
                    }
                    E *row_k = to_k.at(first + t), *row_v = to_v.at(first + t);
                    for (int64_t i = 0; i < C; i++) row_k[i] = static_cast<E>(out[t * Cp + i]);
                    for (int64_t j = 0; j < V; j++) row_v[j] = static_cast<E>(grad_v[t * Vp + j]);
                }
            }
            if (call.grad_s) write_state(S.data(), C, V, part<A>(call.grad_s, index, C * V));
            if (call.grad_z) write_state(z.data(), 1, C, part<A>(call.grad_z, index, C));
        }
    }
}

}  // namespace

extern "C" {

enum Element { FLOAT = 0, DOUBLE = 1, BFLOAT16 = 2 };

void lintx_linear_forward(const Call* call, int64_t element) {
    if (element == FLOAT) forward<float, float>(*call);
    if (element == DOUBLE) forward<double, double>(*call);
    if (element == BFLOAT16) forward<bfloat16, float>(*call);
}

void lintx_linear_backward(const Call* call, int64_t element) {
    if (element == FLOAT) backward<float, float>(*call);
    if (element == DOUBLE) backward<double, double>(*call);
    if (element == BFLOAT16) backward<bfloat16, float>(*call);
}
}
