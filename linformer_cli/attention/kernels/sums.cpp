// Causal sums with or without decay over whole sequences, forward and backward, for the CPU; sums.py calls it.
//
//     s_t = d_t s_{t-1} + k_t v_t^T,    y_t = q_t s_t
//
// Axes: B images, H heads, T positions, C features, V value width. d_t is absent, one number, or one number per feature.

#include <algorithm>
#include <cmath>

#include "scan.h"
#include "threads.h"

namespace {

struct Call {
    int64_t threads, B, H, T, C, V, decays;  // decays: 0, 1 or C numbers per position
    int64_t logarithms;             // whether gradients are those of the logarithms of q and k
    View q, k, v, y, log_decay;     // y: the output, or its gradient
    View grad_q, grad_k, grad_v, grad_log_decay;
    void *carried, *total, *grad_carried;  // [B, H, C, V] before and after the positions; total: the sum or its gradient
};

// Writes the gradient of features, or of their logarithms.
template <class A>
void write_gradient(const Call& call, A* gradient, const A* features, int64_t first, int64_t count, const Rows<A>& rows) {
    for (int64_t i = 0; call.logarithms && i < count * Lanes<A>::pad(call.C); i++) gradient[i] *= features[i];
    write(gradient, first, count, call.C, rows);
}

// `D` is the decay of a sum with features in its rows.
template <class A, Decay D>
void forward(const Call& call) {
    const int64_t T = call.T, C = call.C, V = call.V, Cp = Lanes<A>::pad(C), Vp = Lanes<A>::pad(V);
    const int64_t heads = call.B * call.H;
    share(call.threads, heads, [&](auto next) {
        std::vector<A> q(BLOCK * Cp), k(BLOCK * Cp), v(BLOCK * Vp), y(BLOCK * Vp), decay(BLOCK * Cp);
        Sum<A> S(C, V);
        for (int64_t index = next(); index < heads; index = next()) {
            const int64_t b = index / call.H, h = index % call.H;
            S.load(part<A>(call.carried, index, C * V));
            for (int64_t first = 0; first < T; first += BLOCK) {
                const int64_t count = std::min(BLOCK, T - first);
                read(Rows<A>(call.q, b, h), first, count, C, q.data());
                read(Rows<A>(call.k, b, h), first, count, C, k.data());
                read(Rows<A>(call.v, b, h), first, count, V, v.data());
                if (D != KEEP) read_decays(Rows<A>(call.log_decay, b, h), first, count, T, call.decays, decay.data());
                scan<D>(count, Positions<A>{{k.data()}, {v.data()}, {q.data()}, {y.data()}, decay.data()}, S);
                write(y.data(), first, count, V, Rows<A>(call.y, b, h));
            }
            S.store(part<A>(call.total, index, C * V));
        }
    });
}

// Let r_t = d_{t+1} r_{t+1} + q_t dy_t^T. Then the gradients are dq_t = s_t dy_t, dk_t = r_t v_t and dv_t = k_t r_t. s
// is recomputed. The gradient of log d_t is the sum of q_j dq_j - k_j dk_j over all j >= t, plus that of s_T ds_T. No
// product of two sums is needed.
template <class A, Decay D>
void backward(const Call& call) {
    constexpr Decay TURNED = D == ROWS ? COLUMNS : D;
    const int64_t T = call.T, C = call.C, V = call.V, Cp = Lanes<A>::pad(C), Vp = Lanes<A>::pad(V);
    const int64_t heads = call.B * call.H;
    share(call.threads, heads, [&](auto next) {
        std::vector<A> q(BLOCK * Cp), k(BLOCK * Cp), v(BLOCK * Vp), y(BLOCK * Vp), decay((BLOCK + 1) * Cp);
        std::vector<A> grad_q(BLOCK * Cp), grad_k(BLOCK * Cp), grad_v(BLOCK * Vp);
        std::vector<double> grad_log(C);
        Sum<A> S(V, C), R(C, V), R_turned(V, C);
        for (int64_t index = next(); index < heads; index = next()) {
            const int64_t b = index / call.H, h = index % call.H;
            auto read_block = [&](int64_t first, int64_t count) {
                read(Rows<A>(call.q, b, h), first, count, C, q.data());
                read(Rows<A>(call.k, b, h), first, count, C, k.data());
                read(Rows<A>(call.v, b, h), first, count, V, v.data());
                read(Rows<A>(call.y, b, h), first, count, V, y.data());
                if (D != KEEP)
                    read_decays(Rows<A>(call.log_decay, b, h), first, count + 1, T, call.decays, decay.data());
            };
            S.load(part<A>(call.carried, index, C * V), true);
            for (int64_t first = 0; first < T; first += BLOCK) {
                const int64_t count = std::min(BLOCK, T - first);
                read_block(first, count);
                Positions<A> positions{{v.data()}, {k.data()}, {y.data()}, {grad_q.data()}, decay.data()};
                scan<TURNED>(count, positions, S);
                write_gradient(call, grad_q.data(), q.data(), first, count, Rows<A>(call.grad_q, b, h));
            }
            const A* grad_total = part<A>(call.total, index, C * V);
            R.load(grad_total);
            R_turned.load(grad_total, true);
            for (int64_t i = 0; i < C; i++) {
                grad_log[i] = 0;
                for (int64_t j = 0; j < V; j++) grad_log[i] += S.at(j, i) * R.at(i, j);
            }
            for (int64_t first = (T - 1) / BLOCK * BLOCK; first >= 0; first -= BLOCK) {
                const int64_t count = std::min(BLOCK, T - first);
                read_block(first, count);
                Positions<A> to_k{{y.data()}, {q.data()}, {v.data()}, {grad_k.data()}, decay.data()};
                Positions<A> to_v{{q.data()}, {y.data()}, {k.data()}, {grad_v.data()}, decay.data()};
                scan<TURNED>(count, to_k, R_turned, true);
                scan<D>(count, to_v, R, true);
                write_gradient(call, grad_k.data(), k.data(), first, count, Rows<A>(call.grad_k, b, h));
                write(grad_v.data(), first, count, V, Rows<A>(call.grad_v, b, h));
                if (!call.grad_log_decay.data) continue;
                read(Rows<A>(call.grad_q, b, h), first, count, C, grad_q.data());
                for (int64_t t = count - 1; t >= 0; t--) {
                    A* to = Rows<A>(call.grad_log_decay, b, h).at(first + t);
                    double sum = 0;
                    for (int64_t i = 0; i < C; i++) {
                        const int64_t place = t * Cp + i;
                        grad_log[i] += call.logarithms ? grad_q[place] - grad_k[place]
                                                       : q[place] * grad_q[place] - k[place] * grad_k[place];
                        if (D == ROWS) to[i] = static_cast<A>(grad_log[i]);
                        sum += grad_log[i];
                    }
                    if (D == EACH) *to = static_cast<A>(sum);
                }
            }
            if (!call.grad_carried) continue;
            for (int64_t i = 0; i < C; i++)
                for (int64_t j = 0; j < V; j++) R.at(i, j) *= D == KEEP ? A(1) : decay[D == ROWS ? i : 0];
            R.store(part<A>(call.grad_carried, index, C * V));
        }
    });
}

// Raises c [heads, C] to the maximum of itself and all b. Then b <- exp(b - c) and a <- exp(a + c - m), where m is the
// maximum of a + c at a position. a and b, dense [heads, T, C], are the logarithms of the features of queries and keys.
template <class A>
void exponentiate(int64_t threads, int64_t heads, int64_t T, int64_t C, A* queries, A* keys, A* maxima) {
    spread(threads, heads, [=](int64_t head) {
        A *a = queries + head * T * C, *b = keys + head * T * C, *c = maxima + head * C;
        for (int64_t t = 0; t < T; t++)
            for (int64_t i = 0; i < C; i++) c[i] = b[t * C + i] > c[i] ? b[t * C + i] : c[i];
        for (int64_t t = 0; t < T; t++, a += C, b += C) {
            typename Lanes<A>::type highest = typename Lanes<A>::type{} - A(INFINITY);
            int64_t i = 0;
            A m = -INFINITY;
            for (; i + Lanes<A>::count <= C; i += Lanes<A>::count) {
                const typename Lanes<A>::type sum = Lanes<A>::load(a + i) + Lanes<A>::load(c + i);
                highest = sum > highest ? sum : highest;
            }
            for (; i < C; i++) m = a[i] + c[i] > m ? a[i] + c[i] : m;
            for (int64_t lane = 0; lane < Lanes<A>::count; lane++) m = highest[lane] > m ? highest[lane] : m;
            for (i = 0; i < C; i++) a[i] = exponential(a[i] + c[i] - m);
            for (i = 0; i < C; i++) b[i] = exponential(b[i] - c[i]);
        }
    });
}

template <class A>
void run(const Call& call, bool reverse) {
    if (call.decays == 0) return reverse ? backward<A, KEEP>(call) : forward<A, KEEP>(call);
    if (call.decays == 1) return reverse ? backward<A, EACH>(call) : forward<A, EACH>(call);
    return reverse ? backward<A, ROWS>(call) : forward<A, ROWS>(call);
}

}  // namespace

extern "C" {

void lintx_sums_exponentiate(int64_t threads, int64_t heads, int64_t T, int64_t C, void* a, void* b, void* c,
                             int64_t is_double) {
    if (is_double)
        exponentiate(threads, heads, T, C, static_cast<double*>(a), static_cast<double*>(b), static_cast<double*>(c));
    else
        exponentiate(threads, heads, T, C, static_cast<float*>(a), static_cast<float*>(b), static_cast<float*>(c));
}

void lintx_sums_forward(const Call* call, int64_t is_double) {
    is_double ? run<double>(*call, false) : run<float>(*call, false);
}

void lintx_sums_backward(const Call* call, int64_t is_double) {
    is_double ? run<double>(*call, true) : run<float>(*call, true);
}
}
