// The gated delta rule over whole sequences, forward and backward, for the CPU; delta.py calls it.
//
//     s_t = a_t s_{t-1} + b_t k_t e_t^T,    e_t = v_t - a_t s_{t-1}^T k_t,    y_t = q_t s_t
//
// Axes: B images, H heads, T positions, C width of a key, V value width.

#include "scan.h"
#include "threads.h"

namespace {

struct Call {
    int64_t threads, B, H, T, C, V;
    View q, k, v, y, error, rate, log_decay;  // y: the output, or its gradient; error: e; rate: b; log_decay: log a
    View grad_q, grad_k, grad_v, grad_rate, grad_log_decay;
    void *carried, *total, *grad_carried;  // [B, H, C, V] before and after the positions; total: the sum or its gradient
};

// Arrays with a row of whole vectors, or one number, per position.
template <class A>
struct Rule {
    const A *q, *k, *target, *y, *rate, *decay;
    A *error, *out;
};

// Let d be the decay before position t. Each step computes S <- d S + b_t k_t e_t^T, where e_t = target_t - d S^T k_t.
// Forward, out_t <- q_t S. Backward, positions are visited from the last to the first, S also gains q_t y_t^T, and d
// belongs to the position after t. The pass over S that writes it also reads it with the next key.
template <bool BACKWARD, int TILES, class A>
void solve_columns(int64_t count, const Rule<A>& x, int64_t m, Sum<A>& S) {
    using L = Lanes<A>;
    const int64_t width_n = L::pad(S.N), width_m = S.stride(), step = BACKWARD ? -1 : 1;
    int64_t t = BACKWARD ? count - 1 : 0;
    typename L::type held[TILES] = {};
    for (int64_t n = 0; n < S.N; n++)
        for (int i = 0; i < TILES; i++)
            held[i] += x.k[t * width_n + n] * L::load(&S.rows[n * width_m + m + i * L::count]);
    for (int64_t done = 0; done < count; done++, t += step) {
        const A *q = x.q + t * width_n, *k = x.k + t * width_n, *next = done + 1 < count ? k + step * width_n : k;
        const A decay = x.decay[t + BACKWARD];
        typename L::type added[TILES], other[TILES], sums[TILES] = {};
        for (int i = 0; i < TILES; i++) {
            const int64_t place = t * width_m + m + i * L::count;
            const typename L::type error = L::load(x.target + place) - decay * held[i];
            L::store(x.error + place, error);
            added[i] = x.rate[t] * error;
            if (BACKWARD) other[i] = L::load(x.y + place);
            held[i] = typename L::type{};
        }
        A* rows = S.rows.data() + m;
        for (int64_t n = 0; n < S.N; n++) {
            for (int i = 0; i < TILES; i++) {
                typename L::type row = decay * L::load(rows + n * width_m + i * L::count) + k[n] * added[i];
                if (BACKWARD) row += q[n] * other[i];
                if (!BACKWARD) sums[i] += q[n] * row;
                held[i] += next[n] * row;
                L::store(rows + n * width_m + i * L::count, row);
            }
        }
        if (BACKWARD) continue;
        for (int i = 0; i < TILES; i++) L::store(x.out + t * width_m + m + i * L::count, sums[i]);
    }
}

template <bool BACKWARD, class A>
void solve(int64_t count, const Rule<A>& x, Sum<A>& S) {
    constexpr int64_t pair = 2 * Lanes<A>::count;
    int64_t m = 0;
    for (; m + pair <= S.stride(); m += pair) solve_columns<BACKWARD, 2>(count, x, m, S);
    if (m < S.stride()) solve_columns<BACKWARD, 1>(count, x, m, S);
}

template <class A>
void forward(const Call& call) {
    const int64_t T = call.T, C = call.C, V = call.V, Cp = Lanes<A>::pad(C), Vp = Lanes<A>::pad(V);
    const int64_t heads = call.B * call.H;
    share(call.threads, heads, [&](auto next) {
        std::vector<A> q(BLOCK * Cp), k(BLOCK * Cp), v(BLOCK * Vp), y(BLOCK * Vp), error(BLOCK * Vp);
        std::vector<A> rate(BLOCK), decay(BLOCK);
        Sum<A> S(C, V, false);
        for (int64_t index = next(); index < heads; index = next()) {
            const int64_t b = index / call.H, h = index % call.H;
            S.load(part<A>(call.carried, index, C * V));
            for (int64_t first = 0; first < T; first += BLOCK) {
                const int64_t count = std::min(BLOCK, T - first);
                read(Rows<A>(call.q, b, h, BLOCK), first, count, C, q.data());
                read(Rows<A>(call.k, b, h, BLOCK), first, count, C, k.data());
                read(Rows<A>(call.v, b, h, BLOCK), first, count, V, v.data());
                for (int64_t t = 0; t < count; t++) rate[t] = *Rows<A>(call.rate, b, h).at(first + t);
                read_decays(Rows<A>(call.log_decay, b, h), first, count, T, 1, decay.data());
                const Rule<A> rule{q.data(), k.data(), v.data(), nullptr, rate.data(), decay.data(), error.data(), y.data()};
                solve<false>(count, rule, S);
                write(y.data(), first, count, V, Rows<A>(call.y, b, h));
                write(error.data(), first, count, V, Rows<A>(call.error, b, h));
            }
            S.store(part<A>(call.total, index, C * V));
        }
    });
}

// Let g_t be the gradient of s_t, and r_t that of b_t e_t. Up to the decay, g_{t-1} receives G_t = g_t - b_t k_t r_t^T:
//
//     g_t = a_{t+1} G_{t+1} + q_t dy_t^T,    r_t = g_t^T k_t,    dv_t = b_t r_t,    db_t = r_t . e_t,    dq_t = s_t dy_t
//     dk_t = b_t (g_t e_t - a_t s_{t-1} r_t) = b_t (G_t e_t - s_t r_t + 2 b_t (e_t . r_t) k_t)
//
// G follows the delta rule in reverse, with the error -r. Once r is known, the other gradients are computed from sums
// that have C in the lanes of vectors. The gradient of log a_t is the sum of q_j dq_j - v_j dv_j over all j >= t, plus
// that of s_T ds_T.
template <class A>
void backward(const Call& call) {
    const int64_t T = call.T, C = call.C, V = call.V, Cp = Lanes<A>::pad(C), Vp = Lanes<A>::pad(V);
    const int64_t heads = call.B * call.H;
    share(call.threads, heads, [&](auto next) {
        std::vector<A> q(BLOCK * Cp), k(BLOCK * Cp), v(BLOCK * Vp), y(BLOCK * Vp), error(BLOCK * Vp), target(BLOCK * Vp);
        std::vector<A> rate(BLOCK), decay(BLOCK + 1), grad_q(BLOCK * Cp), grad_k(BLOCK * Cp), grad_v(BLOCK * Vp);
        std::vector<A> other(BLOCK * Cp), r((T + BLOCK) * Vp);
        std::vector<double> changes(T);
        Sum<A> G(C, V, false), G_turned(V, C), S(V, C);
        for (int64_t index = next(); index < heads; index = next()) {
            const int64_t b = index / call.H, h = index % call.H;
            const A* grad_total = part<A>(call.total, index, C * V);
            const Rows<A> to_q(call.grad_q, b, h), to_k(call.grad_k, b, h), to_v(call.grad_v, b, h);
            const Rows<A> to_rate(call.grad_rate, b, h), to_decay(call.grad_log_decay, b, h);
            auto read_block = [&](int64_t first, int64_t count, int64_t ahead) {
                read(Rows<A>(call.q, b, h, ahead), first, count, C, q.data());
                read(Rows<A>(call.k, b, h, ahead), first, count, C, k.data());
                read(Rows<A>(call.y, b, h, ahead), first, count, V, y.data());
                read(Rows<A>(call.error, b, h, ahead), first, count, V, error.data());
                for (int64_t t = 0; t < count; t++) rate[t] = *Rows<A>(call.rate, b, h).at(first + t);
                read_decays(Rows<A>(call.log_decay, b, h), first, count + 1, T, 1, decay.data());
            };
            G.load(grad_total);
            G_turned.load(grad_total, true);
            for (int64_t first = (T - 1) / BLOCK * BLOCK; first >= 0; first -= BLOCK) {
                const int64_t count = std::min(BLOCK, T - first);
                A* minus_r = &r[first * Vp];
                read_block(first, count, -BLOCK);
                for (int64_t t = 0; t < count; t++) {
                    const A product = dot(C, &k[t * Cp], &q[t * Cp]);
                    for (int64_t j = 0; j < Vp; j++) target[t * Vp + j] = -product * y[t * Vp + j];
                }
                solve<true>(count, Rule<A>{q.data(), k.data(), target.data(), y.data(), rate.data(), decay.data(), minus_r, nullptr}, G);
                for (int64_t t = 0; t < count; t++) {
                    *to_rate.at(first + t) = -dot(V, minus_r + t * Vp, &error[t * Vp]);
                    for (int64_t j = 0; j < Vp; j++) grad_v[t * Vp + j] = rate[t] * minus_r[t * Vp + j];
                }
                const Positions<A, 2, 1> positions{
                    {y.data(), grad_v.data()}, {q.data(), k.data()}, {error.data()}, {grad_k.data()}, decay.data()};
                scan<EACH>(count, positions, G_turned, true);
                for (int64_t i = 0; i < count * Vp; i++) grad_v[i] = -grad_v[i];
                write(grad_k.data(), first, count, C, to_k);
                write(grad_v.data(), first, count, V, to_v);
            }
            if (call.grad_carried) {
                for (A& x : G.rows) x *= decay[0];
                G.store(part<A>(call.grad_carried, index, C * V));
            }
            S.load(part<A>(call.carried, index, C * V), true);
            for (int64_t first = 0; first < T; first += BLOCK) {
                const int64_t count = std::min(BLOCK, T - first);
                const A* minus_r = &r[first * Vp];
                read_block(first, count, BLOCK);
                read(Rows<A>(call.v, b, h, BLOCK), first, count, V, v.data());
                read(to_k, first, count, C, grad_k.data());
                for (int64_t t = 0; t < count; t++)
                    for (int64_t j = 0; j < Vp; j++) target[t * Vp + j] = rate[t] * error[t * Vp + j];
                const Positions<A, 1, 2> positions{
                    {target.data()}, {k.data()}, {y.data(), minus_r}, {grad_q.data(), other.data()}, decay.data()};
                scan<EACH>(count, positions, S);
                for (int64_t t = 0; t < count; t++) {
                    const A twice = -2 * dot(V, &target[t * Vp], minus_r + t * Vp);
                    for (int64_t i = t * Cp; i < (t + 1) * Cp; i++)
                        grad_k[i] = rate[t] * (grad_k[i] + other[i] + twice * k[i]);
                    changes[first + t] = dot(C, &q[t * Cp], &grad_q[t * Cp]) + rate[t] * dot(V, &v[t * Vp], minus_r + t * Vp);
                }
                write(grad_q.data(), first, count, C, to_q);
                write(grad_k.data(), first, count, C, to_k);
            }
            if (!to_decay.data) continue;
            double sum = 0;
            for (int64_t i = 0; grad_total && i < C * V; i++) sum += grad_total[i] * S.at(i % V, i / V);
            for (int64_t t = T - 1; t >= 0; t--) *to_decay.at(t) = static_cast<A>(sum += changes[t]);
        }
    });
}

}  // namespace

extern "C" {

void lintx_delta_forward(const Call* call, int64_t is_double) {
    is_double ? forward<double>(*call) : forward<float>(*call);
}

void lintx_delta_backward(const Call* call, int64_t is_double) {
    is_double ? backward<double>(*call) : backward<float>(*call);
}
}
