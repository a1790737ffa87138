// Causal sums with or without decay over sequences, forward and backward, for the CPU; cpu_recurrences.py calls them.
//
//     s_t = d_t s_{t-1} + k_t v_t^T,    y_t = scale q_t s_t
//
// Axes: B images, H heads, T positions, C features, V value width. d_t is absent, one number, or one number per
// feature. Everything has type A, double or float. If A is float, q, k, v and their gradients may be bfloat16.

#include "decay_gradients.h"
#include "sweep.h"

namespace {

struct SumsCall {
    int64_t threads, B, H, T, C, V, decays;  // decays: 0, 1 or C numbers per position
    double scale;
    View q, k, v, y, log_decay;  // y: the output, or its gradient
    View grad_q, grad_k, grad_v, grad_log_decay;
    void *carried, *total,
        *grad_carried;  // [B, H, C, V] before and after the positions; total: the sum or its gradient
    // Null for callers. [B, H, C]: s_T times its gradient, summed over V; [B, H, blocks, decays]: see `Block`.
    void *ends, *largest;
};

// The arrays of a block of positions.
template <class A>
struct Block : HeadPass<SumsCall> {
    const int64_t C, V, Cp = Lanes<A>::pad(C), Vp = Lanes<A>::pad(V);
    std::vector<A> q, k, v, y, decay;

    explicit Block(const SumsCall& call)
        : HeadPass(call), C(call.C), V(call.V), q(SCAN_BLOCK * Cp), k(SCAN_BLOCK * Cp), v(SCAN_BLOCK * Vp),
          y(SCAN_BLOCK * Vp), decay((SCAN_BLOCK + 1) * Cp) {}
    void read_queries(int64_t first, int64_t count) {
        const A scale = static_cast<A>(call.scale);
        read(rows<A>(call.q), first, count, C, q.data(), [=](A x) { return x * scale; });
    }
    void read_keys(int64_t first, int64_t count) { read(rows<A>(call.k), first, count, C, k.data()); }
    void read_values(int64_t first, int64_t count) { read(rows<A>(call.v), first, count, V, v.data()); }
    void read_gradients(int64_t first, int64_t count) { read(rows<A>(call.y), first, count, V, y.data()); }
    void read_decay(int64_t first, int64_t count) {
        if (call.decays) read_decays(rows<A>(call.log_decay), first, count, call.T, call.decays, decay.data());
    }
    // Multiplies `kept` by the decays of `count` positions of the block.
    void keep(int64_t first, int64_t count, std::vector<A>& kept) const {
        const int64_t stride = call.decays == 1 ? 1 : Cp;
        for (int64_t t = first; t < first + count; t++)
            for (int64_t i = 0; i < call.decays; i++) kept[i] *= decay[t * stride + i];
    }
    void write_scaled(std::vector<A>& gradient, int64_t first, int64_t count) {
        for (int64_t i = 0; i < count * Cp; i++) gradient[i] *= static_cast<A>(call.scale);
        write(gradient.data(), first, count, C, rows<A>(call.grad_q));
    }
    // The largest product of a key and its gradient in the block that begins at `first`.
    A* largest(int64_t first) const {
        return part<A>(call.largest, head * count_blocks(call.T) + first / SCAN_BLOCK, call.decays);
    }
    // The gradient of log d before it is summed over later positions: first the products of queries and their
    // gradients, and then also those of keys, with the other sign.
    void add_product(bool of_keys, const A* features, const A* gradient, int64_t first, int64_t count) {
        const Rows<A> to = rows<A>(call.grad_log_decay);
        A* most = largest(first);
        if (of_keys) std::fill_n(most, call.decays, A(0));
        for (int64_t t = 0; t < count; t++, features += Cp, gradient += Cp) {
            A* row = to.at(first + t);
            for (int64_t i = 0; i < call.decays; i++) {
                const A product = call.decays == 1 ? dot(Cp, features, gradient) : features[i] * gradient[i];
                row[i] = of_keys ? row[i] - product : product;
                if (of_keys) most[i] = std::max(most[i], std::abs(product));
            }
        }
    }
};

// Sums, and the product of the decays since they were zero: one number, one per feature, or none.
template <class A>
struct State {
    std::vector<Sum<A>> sums;
    std::vector<A> kept;

    void clear() {
        for (Sum<A>& sum : sums) sum.clear();
        std::fill(kept.begin(), kept.end(), A(1));
    }
};

// `D` is the decay of a sum with features in its rows.
template <class A, SequenceDecay D>
struct Forward : Block<A> {
    typedef ::State<A> State;
    State state;
    using Block<A>::call;

    explicit Forward(const SumsCall& call)
        : Block<A>(call), state{{Sum<A>(call.C, call.V)}, std::vector<A>(call.decays)} {}
    void load() { state.sums[0].load(part<A>(call.carried, this->head, call.C * call.V)); }
    void clear() { state.clear(); }
    void follow(const State& before) { ::follow<D>(before.sums[0], state.kept.data(), state.sums[0]); }
    void visit(int64_t first, int64_t count, bool outputs) {
        this->read_keys(first, count);
        this->read_values(first, count);
        this->read_decay(first, count);
        if (outputs) this->read_queries(first, count);
        Positions<A> x{{this->k.data()}, {this->v.data()}, {this->q.data()}, {this->y.data()}, this->decay.data()};
        scan<D>(count, x, state.sums[0], false, outputs);
        if (!outputs) return this->keep(0, count, state.kept);
        write(this->y.data(), first, count, call.V, this->template rows<A>(call.y));
    }
    void leave() { state.sums[0].store(part<A>(call.total, this->head, call.C * call.V)); }
};

// Let r_t = d_{t+1} r_{t+1} + q_t dy_t^T. Then the gradients are dq_t = s_t dy_t, dk_t = r_t v_t and dv_t = k_t r_t. s
// is recomputed. The gradient of log d_t is the sum of q_j dq_j - k_j dk_j over all j >= t, plus that of s_T ds_T. A
// product of two sums is needed only where this is mostly rounding errors; see decay_gradients.h.
template <class A, SequenceDecay D>
struct OfQueries : Block<A> {
    typedef ::State<A> State;
    State state;  // s, transposed: [V, C]
    std::vector<A> out;
    static constexpr SequenceDecay TURNED = D == ROWS ? COLUMNS : D;
    using Block<A>::call;

    explicit OfQueries(const SumsCall& call)
        : Block<A>(call), state{{Sum<A>(call.V, call.C)}, std::vector<A>(call.decays)}, out(SCAN_BLOCK * this->Cp) {}
    void load() { state.sums[0].load(part<A>(call.carried, this->head, call.C * call.V), true); }
    void clear() { state.clear(); }
    void follow(const State& before) { ::follow<TURNED>(before.sums[0], state.kept.data(), state.sums[0]); }
    void visit(int64_t first, int64_t count, bool outputs) {
        this->read_keys(first, count);
        this->read_values(first, count);
        this->read_decay(first, count);
        if (outputs) this->read_gradients(first, count);
        Positions<A> x{{this->v.data()}, {this->k.data()}, {this->y.data()}, {out.data()}, this->decay.data()};
        scan<TURNED>(count, x, state.sums[0], false, outputs);
        if (!outputs) return this->keep(0, count, state.kept);
        if (call.grad_log_decay.data) {
            this->read_queries(first, count);
            this->add_product(false, this->q.data(), out.data(), first, count);
        }
        this->write_scaled(out, first, count);
    }
    void leave() {
        const A* grad_total = part<A>(call.total, this->head, call.C * call.V);
        A* ends = part<A>(call.ends, this->head, call.C);
        for (int64_t i = 0; ends && i < call.C; i++) {
            double sum = 0;
            for (int64_t j = 0; grad_total && j < call.V; j++)
                sum += state.sums[0].at(j, i) * grad_total[i * call.V + j];
            ends[i] = static_cast<A>(sum);
        }
    }
};

template <class A, SequenceDecay D>
struct OfKeys : Block<A> {
    typedef ::State<A> State;
    State state;  // r, and r transposed
    std::vector<A> grad_k, grad_v;
    static constexpr SequenceDecay TURNED = D == ROWS ? COLUMNS : D;
    using Block<A>::call;

    explicit OfKeys(const SumsCall& call)
        : Block<A>(call), state{{Sum<A>(call.C, call.V), Sum<A>(call.V, call.C)}, std::vector<A>(call.decays)},
          grad_k(SCAN_BLOCK * this->Cp), grad_v(SCAN_BLOCK * this->Vp) {}
    void load() {
        const A* grad_total = part<A>(call.total, this->head, call.C * call.V);
        state.sums[0].load(grad_total);
        state.sums[1].load(grad_total, true);
    }
    void clear() { state.clear(); }
    void follow(const State& before) {
        ::follow<D>(before.sums[0], state.kept.data(), state.sums[0]);
        ::follow<TURNED>(before.sums[1], state.kept.data(), state.sums[1]);
    }
    void visit(int64_t first, int64_t count, bool outputs) {
        this->read_queries(first, count);
        this->read_gradients(first, count);
        this->read_decay(first, count + 1);
        if (outputs) {
            this->read_keys(first, count);
            this->read_values(first, count);
        }
        A *q = this->q.data(), *y = this->y.data(), *decay = this->decay.data();
        scan<TURNED>(count, Positions<A>{{y}, {q}, {this->v.data()}, {grad_k.data()}, decay}, state.sums[1], true,
                     outputs);
        scan<D>(count, Positions<A>{{q}, {y}, {this->k.data()}, {grad_v.data()}, decay}, state.sums[0], true, outputs);
        if (!outputs) return this->keep(1, count, state.kept);
        if (call.grad_log_decay.data) this->add_product(true, this->k.data(), grad_k.data(), first, count);
        write(grad_k.data(), first, count, call.C, this->template rows<A>(call.grad_k));
        write(grad_v.data(), first, count, call.V, this->template rows<A>(call.grad_v));
    }
    void leave() {
        if (!call.grad_carried) return;
        this->read_decay(0, 1);  // the last visit may have been to another head
        Sum<A>& R = state.sums[0];
        for (int64_t i = 0; i < call.C; i++)
            for (int64_t j = 0; j < call.V; j++) R.at(i, j) *= D == KEEP ? A(1) : this->decay[D == ROWS ? i : 0];
        R.store(part<A>(call.grad_carried, this->head, call.C * call.V));
    }
};

// Sums the products of features and gradients over later positions.
template <class A, SequenceDecay D>
void sum_later(const SumsCall& call) {
    share(call.threads, call.B * call.H, [&](auto next) {
        Block<A> x(call);
        for (int64_t head = next(); head < call.B * call.H; head = next()) {
            x.enter(head);
            const A* ends = part<A>(call.ends, head, call.C);
            std::vector<double> sums(call.decays);
            for (int64_t i = 0; i < call.C; i++) sums[call.decays == 1 ? 0 : i] += ends[i];
            const auto load = [&](int64_t first, int64_t count) {
                x.read_queries(first, count);
                x.read_keys(first, count);
                x.read_values(first, count);
                x.read_gradients(first, count);
                x.read_decay(first, count + 1);
                return DecayBlock<A, 1>{x.k.data(), x.v.data(), {x.q.data()}, {x.y.data()}, x.decay.data()};
            };
            sum_decay_gradient<D, 1>(call.T, call.C, call.V, sums, x.largest(0),
                                     part<A>(call.carried, head, call.C * call.V),
                                     part<A>(call.total, head, call.C * call.V), x.template rows<A>(call.log_decay),
                                     x.template rows<A>(call.grad_log_decay), load);
        }
    });
}

template <class A, SequenceDecay D>
void run_decay(SumsCall call, bool reverse) {
    if (!reverse) return sweep<Forward<A, D>>(call, false);
    std::vector<A> ends, largest;
    const bool of_decay = D != KEEP && call.grad_log_decay.data;
    if (of_decay) {
        ends.resize(call.B * call.H * call.C);
        largest.resize(call.B * call.H * count_blocks(call.T) * call.decays);
        call.ends = ends.data();
        call.largest = largest.data();
    }
    sweep<OfQueries<A, D>>(call, false);
    sweep<OfKeys<A, D>>(call, true);
    if constexpr (D != KEEP)
        if (of_decay) sum_later<A, D>(call);
}

template <class A>
void run(const SumsCall& call, bool reverse) {
    if (call.decays == 0) return run_decay<A, KEEP>(call, reverse);
    if (call.decays == 1) return run_decay<A, ALL>(call, reverse);
    return run_decay<A, ROWS>(call, reverse);
}

}  // namespace

extern "C" {

void lintx_sums_forward(const SumsCall* call, int64_t is_double) {
    is_double ? run<double>(*call, false) : run<float>(*call, false);
}

void lintx_sums_backward(const SumsCall* call, int64_t is_double) {
    is_double ? run<double>(*call, true) : run<float>(*call, true);
}
}
