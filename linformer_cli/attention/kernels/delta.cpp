// The delta rule over whole sequences, forward and backward, for the CPU; cpu_recurrences.py calls it.
//
//     p_t = a_t * s_{t-1},    e_t = v_t - d_t^T p_t,    s_t = p_t + w_t e_t^T,    y_t = q_t s_t
//
// where w_t = b_t k_t. The decay a_t is one number, or one number per row of s. In the plain delta rule, d_t is k_t.
// Axes: B images, H heads, T positions, C width of a key, V value width.

#include "decay_gradients.h"
#include "threads.h"

namespace {

struct DeltaCall {
    int64_t threads, B, H, T, C, V, decays;      // decays: the numbers of a_t, 1 or C
    View q, k, v, d, y, error, beta, log_decay;  // d: null for k; y: the output, or its gradient; error: e
    View grad_q, grad_k, grad_v, grad_d, grad_beta, grad_log_decay;
    void *carried, *total,
        *grad_carried;  // [B, H, C, V] before and after the positions; total: the sum or its gradient
};

// Arrays with a row of whole vectors, or one decay, per position.
template <class A>
struct Rule {
    const A *q, *reads, *writes, *target, *y, *decay;
    A *error, *out;
};

// Let a be the decay before position t. Each step computes e_t = target_t - reads_t^T (a * S) and then S <- a * S +
// writes_t e_t^T. If a has C numbers, `reads` is already times a. Forward, out_t <- q_t S. Backward, positions are
// visited from the last to the first, S also gains q_t y_t^T, and a belongs to the position after t. The pass over S
// that writes it also reads it for the next position.
template <bool BACKWARD, SequenceDecay D, int TILES, class A>
void solve_columns(int64_t count, const Rule<A>& x, int64_t m, Sum<A>& S) {
    using L = Lanes<A>;
    const int64_t width_n = L::pad(S.N), width_m = S.stride(), width_d = D == ALL ? 1 : width_n;
    const int64_t step = BACKWARD ? -1 : 1;
    int64_t t = BACKWARD ? count - 1 : 0;
    typename L::type held[TILES] = {};
    for (int64_t n = 0; n < S.N; n++)
        for (int i = 0; i < TILES; i++)
            held[i] += x.reads[t * width_n + n] * L::load(&S.rows[n * width_m + m + i * L::count]);
    for (int64_t done = 0; done < count; done++, t += step) {
        const A *q = x.q + t * width_n, *write = x.writes + t * width_n;
        const A* next = x.reads + (done + 1 < count ? t + step : t) * width_n;
        const A *decay = x.decay + (t + BACKWARD) * width_d, single = *decay;
        typename L::type added[TILES], other[TILES], sums[TILES] = {};
        for (int i = 0; i < TILES; i++) {
            const int64_t place = t * width_m + m + i * L::count;
            added[i] = L::load(x.target + place) - (D == ALL ? single * held[i] : held[i]);
            L::store(x.error + place, added[i]);
            if (BACKWARD) other[i] = L::load(x.y + place);
            held[i] = typename L::type{};
        }
        A* rows = S.rows.data() + m;
        for (int64_t n = 0; n < S.N; n++) {
            const A factor = D == ALL ? single : decay[n];
            for (int i = 0; i < TILES; i++) {
                typename L::type row = factor * L::load(rows + n * width_m + i * L::count) + write[n] * added[i];
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

template <bool BACKWARD, SequenceDecay D, class A>
void solve(int64_t count, const Rule<A>& x, Sum<A>& S) {
    constexpr int64_t pair = 2 * Lanes<A>::count;
    int64_t m = 0;
    for (; m + pair <= S.stride(); m += pair) solve_columns<BACKWARD, D, 2>(count, x, m, S);
    if (m < S.stride()) solve_columns<BACKWARD, D, 1>(count, x, m, S);
}

// The inputs of a block of positions of one head. Rows are padded with zeros to whole vectors.
template <class A>
struct Block {
    const DeltaCall& call;
    const int64_t Cp = Lanes<A>::pad(call.C), Vp = Lanes<A>::pad(call.V), Dp = call.decays == 1 ? 1 : Cp;
    std::vector<A> q, k, v, y, error, d, w, reads, beta, decay;

    explicit Block(const DeltaCall& call)
        : call(call), q(SCAN_BLOCK * Cp), k(SCAN_BLOCK * Cp), v(SCAN_BLOCK * Vp), y(SCAN_BLOCK * Vp),
          error(SCAN_BLOCK * Vp), d(SCAN_BLOCK * Cp), w(SCAN_BLOCK * Cp), reads(SCAN_BLOCK * Cp), beta(SCAN_BLOCK),
          decay((SCAN_BLOCK + 1) * Dp) {}

    // Reads all inputs but v, y and e. `ahead`: see `Rows`.
    void load(int64_t b, int64_t h, int64_t first, int64_t count, int64_t ahead) {
        read(Rows<A>(call.q, b, h, ahead), first, count, call.C, q.data());
        read(Rows<A>(call.k, b, h, ahead), first, count, call.C, k.data());
        if (call.d.data) read(Rows<A>(call.d, b, h, ahead), first, count, call.C, d.data());
        for (int64_t t = 0; t < count; t++) beta[t] = *Rows<A>(call.beta, b, h).at(first + t);
        read_decays(Rows<A>(call.log_decay, b, h), first, count + 1, call.T, call.decays, decay.data());
        for (int64_t t = 0; t < count; t++) {
            const A factor = beta[t], *from = &k[t * Cp];
            for (int64_t i = 0; i < Cp; i++) w[t * Cp + i] = factor * from[i];
        }
    }
    // The vectors that read the state before position t: d_t, or w_t in `reverse`. They are times a if a has C numbers.
    const A* readers(int64_t count, bool reverse = false) {
        const A *from = reverse ? w.data() : erase(), *factors = &decay[reverse * Dp];
        if (Dp == 1) return from;
        for (int64_t i = 0; i < count * Cp; i++) reads[i] = factors[i] * from[i];
        return reads.data();
    }
    void load_gradients(int64_t b, int64_t h, int64_t first, int64_t count, int64_t ahead) {
        read(Rows<A>(call.y, b, h, ahead), first, count, call.V, y.data());
        read(Rows<A>(call.error, b, h, ahead), first, count, call.V, error.data());
    }
    const A* erase() const { return call.d.data ? d.data() : k.data(); }
};

template <SequenceDecay D, class A>
void forward(const DeltaCall& call) {
    const int64_t T = call.T, C = call.C, V = call.V;
    const int64_t heads = call.B * call.H;
    share(call.threads, heads, [&](auto next) {
        Block<A> x(call);
        Sum<A> S(C, V, false);
        for (int64_t index = next(); index < heads; index = next()) {
            const int64_t b = index / call.H, h = index % call.H;
            S.load(part<A>(call.carried, index, C * V));
            for (int64_t first = 0; first < T; first += SCAN_BLOCK) {
                const int64_t count = std::min(SCAN_BLOCK, T - first);
                x.load(b, h, first, count, SCAN_BLOCK);
                read(Rows<A>(call.v, b, h, SCAN_BLOCK), first, count, V, x.v.data());
                const Rule<A> rule{x.q.data(), x.readers(count), x.w.data(),     x.v.data(),
                                   nullptr,    x.decay.data(),   x.error.data(), x.y.data()};
                solve<false, D>(count, rule, S);
                write(x.y.data(), first, count, V, Rows<A>(call.y, b, h));
                write(x.error.data(), first, count, V, Rows<A>(call.error, b, h));
            }
            S.store(part<A>(call.total, index, C * V));
        }
    });
}

// Let g_t be the gradient of s_t, G_t that of p_t, and r_t that of e_t:
//
//     g_t = a_{t+1} * G_{t+1} + q_t dy_t^T,    r_t = g_t^T w_t,    G_t = g_t - d_t r_t^T
//     dq_t = s_t dy_t,    dw_t = g_t e_t = G_t e_t + (r_t . e_t) d_t,    dd_t = -p_t r_t = (e_t . r_t) w_t - s_t r_t
//     dv_t = r_t,         dk_t = b_t dw_t,                               db_t = k_t . dw_t
//
// G follows the delta rule in reverse, with the error -r. Once r is known, the other gradients are computed from sums
// that have C in the lanes of vectors. Where a decay is nearly closed, dd_t is the product of p_t and -r_t, because the
// difference would have a rounding error that does not fade with p_t. The gradient of log a_t is the sum of q_j * dq_j
// + d_j * dd_j - w_j * dw_j over all j >= t, plus the row sums of s_T * ds_T; see decay_gradients.h.
template <SequenceDecay D, class A>
void backward(const DeltaCall& call) {
    const int64_t T = call.T, C = call.C, V = call.V, decays = call.decays;
    const int64_t heads = call.B * call.H;
    share(call.threads, heads, [&](auto next) {
        using L = Lanes<A>;
        Block<A> x(call);
        const int64_t Cp = x.Cp, Vp = x.Vp;
        std::vector<A> target(SCAN_BLOCK * Vp), grad_q(SCAN_BLOCK * Cp), grad_w(SCAN_BLOCK * Cp),
            grad_d(SCAN_BLOCK * Cp), r((T + SCAN_BLOCK) * Vp);
        std::vector<double> sums(decays);
        std::vector<A> largest(count_blocks(T) * decays);
        constexpr SequenceDecay TURNED = D == ALL ? ALL : COLUMNS;
        Sum<A> G(C, V, false), G_turned(V, C), S(V, C);
        for (int64_t index = next(); index < heads; index = next()) {
            const int64_t b = index / call.H, h = index % call.H;
            const A* grad_total = part<A>(call.total, index, C * V);
            const Rows<A> to_q(call.grad_q, b, h), to_k(call.grad_k, b, h), to_v(call.grad_v, b, h),
                to_d(call.grad_d, b, h);
            const Rows<A> to_beta(call.grad_beta, b, h), to_decay(call.grad_log_decay, b, h);
            G.load(grad_total);
            G_turned.load(grad_total, true);
            for (int64_t first = (T - 1) / SCAN_BLOCK * SCAN_BLOCK; first >= 0; first -= SCAN_BLOCK) {
                const int64_t count = std::min(SCAN_BLOCK, T - first);
                A* minus_r = &r[first * Vp];
                x.load(b, h, first, count, -SCAN_BLOCK);
                x.load_gradients(b, h, first, count, -SCAN_BLOCK);
                for (int64_t t = 0; t < count; t++) {
                    const A product = dot(C, &x.w[t * Cp], &x.q[t * Cp]);
                    for (int64_t j = 0; j < Vp; j++) target[t * Vp + j] = -product * x.y[t * Vp + j];
                }
                const Rule<A> rule{x.q.data(), x.readers(count, true), x.erase(), target.data(),
                                   x.y.data(), x.decay.data(),         minus_r,   nullptr};
                solve<true, D>(count, rule, G);
                const Positions<A, 2, 1> positions{
                    {x.y.data(), minus_r}, {x.q.data(), x.erase()}, {x.error.data()}, {grad_w.data()}, x.decay.data()};
                scan<TURNED>(count, positions, G_turned, true);
                write(grad_w.data(), first, count, C, to_k);
                for (int64_t i = 0; i < count * Vp; i++) target[i] = -minus_r[i];
                write(target.data(), first, count, V, to_v);
            }
            if (call.grad_carried) {
                for (int64_t n = 0; n < C; n++)
                    for (int64_t j = 0; j < Vp; j++) G.rows[n * Vp + j] *= x.decay[D == ALL ? 0 : n];
                G.store(part<A>(call.grad_carried, index, C * V));
            }
            S.load(part<A>(call.carried, index, C * V), true);
            for (int64_t first = 0; first < T; first += SCAN_BLOCK) {
                const int64_t count = std::min(SCAN_BLOCK, T - first);
                const A* minus_r = &r[first * Vp];
                x.load(b, h, first, count, SCAN_BLOCK);
                x.load_gradients(b, h, first, count, SCAN_BLOCK);
                read(to_k, first, count, C, grad_w.data());
                const Positions<A, 1, 2> positions{{x.error.data()},
                                                   {x.w.data()},
                                                   {x.y.data(), minus_r},
                                                   {grad_q.data(), grad_d.data()},
                                                   x.decay.data()};
                scan<TURNED>(count, positions, S);
                for (int64_t t = 0; t < count; t++) {
                    const A product = dot(V, &x.error[t * Vp], minus_r + t * Vp);
                    typename L::type change_sum = {}, beta_sum = {}, written_sum = {};
                    for (int64_t i = t * Cp; i < (t + 1) * Cp; i += L::count) {
                        const auto k = L::load(&x.k[i]), d = L::load(x.erase() + i), w = L::load(&x.w[i]);
                        const auto own_w = L::load(&grad_w[i]) - product * d, own_d = L::load(&grad_d[i]) - product * w;
                        const auto written = w * own_w;
                        const auto change = L::load(&x.q[i]) * L::load(&grad_q[i]) + d * own_d - written;
                        change_sum += change;
                        written_sum += written;
                        beta_sum += k * own_w;
                        L::store(&grad_d[i], own_d);
                        L::store(&grad_w[i], call.d.data ? x.beta[t] * own_w : x.beta[t] * own_w + own_d);
                        if (D == ROWS) L::store(&x.reads[i], change);
                        if (D == ROWS) L::store(&x.w[i], written);
                    }
                    *to_beta.at(first + t) = L::total(beta_sum);
                    if (D == ALL) *to_decay.at(first + t) = L::total(change_sum);
                    if (D == ALL) x.w[t * Cp] = L::total(written_sum);
                }
                A* most = &largest[first / SCAN_BLOCK * decays];
                std::fill_n(most, decays, A(0));
                raise_largest(count, Cp, decays, x.w.data(), most);
                if (D == ROWS) write(x.reads.data(), first, count, C, to_decay);
                write(grad_q.data(), first, count, C, to_q);
                write(grad_w.data(), first, count, C, to_k);
                if (call.d.data) write(grad_d.data(), first, count, C, to_d);
            }
            std::fill(sums.begin(), sums.end(), 0.0);
            for (int64_t i = 0; grad_total && i < C * V; i++)
                sums[D == ALL ? 0 : i / V] += grad_total[i] * S.at(i % V, i / V);
            const auto load = [&](int64_t first, int64_t count) {
                x.load(b, h, first, count, 0);
                x.load_gradients(b, h, first, count, 0);
                return DecayBlock<A, 2>{
                    x.w.data(), x.error.data(), {x.q.data(), x.erase()}, {x.y.data(), &r[first * Vp]}, x.decay.data()};
            };
            sum_decay_gradient<D, 2>(T, C, V, sums, largest.data(), part<A>(call.carried, index, C * V), grad_total,
                                     Rows<A>(call.log_decay, b, h), to_decay, load, call.d.data ? &to_d : nullptr);
        }
    });
}

template <class A>
void run(const DeltaCall& call, bool reverse) {
    if (call.decays == 1) reverse ? backward<ALL, A>(call) : forward<ALL, A>(call);
    else reverse ? backward<ROWS, A>(call) : forward<ROWS, A>(call);
}

}  // namespace

extern "C" {

void lintx_delta_forward(const DeltaCall* call, int64_t is_double) {
    is_double ? run<double>(*call, false) : run<float>(*call, false);
}

void lintx_delta_backward(const DeltaCall* call, int64_t is_double) {
    is_double ? run<double>(*call, true) : run<float>(*call, true);
}
}
