// Linear attention over whole sequences, forward and backward, for the CPU; cpu_linear.py calls it.
//
// Axes: B images, H heads, T positions, K width of queries and keys, C features, V value width. Everything has type A,
// double or float. If A is float, inputs and outputs may be bfloat16.

#include "linear_maps.h"

namespace {

// x / weight, or 0 if the weight is 0. The quotient may be finite where the reciprocal of the weight is not.
template <class A>
A divisor(A weight) {
    return weight == 0 ? static_cast<A>(INFINITY) : weight;
}

// The running sums s, transposed or not, and z.
template <class A>
struct Sums {
    Sum<A> S;
    std::vector<A> z;

    void clear() {
        S.clear();
        std::fill(z.begin(), z.end(), A(0));
    }
    void follow(const Sums& before) {
        ::follow<KEEP>(before.S, static_cast<const A*>(nullptr), S);
        for (size_t i = 0; i < z.size(); i++) z[i] += before.z[i];
    }
};

template <class A, class Map>
struct Forward : HeadPass<LinearCall> {
    typedef Sums<A> State;
    State state;
    const int64_t C, V, Cp = Lanes<A>::pad(C), Vp = Lanes<A>::pad(V);
    Map map;
    std::vector<A> q, k, v, out;

    explicit Forward(const LinearCall& call)
        : HeadPass(call), state{Sum<A>(call.C, call.V), std::vector<A>(Lanes<A>::pad(call.C))}, C(call.C), V(call.V),
          map(call), q(SCAN_BLOCK * Cp), k(SCAN_BLOCK * Cp), v(SCAN_BLOCK * Vp), out(SCAN_BLOCK * Vp) {}
    void load() {
        state.S.load(part<A>(call.s, head, C * V));
        load_row(part<A>(call.z, head, C), C, state.z);
    }
    void clear() { state.clear(); }
    void follow(const State& before) { state.follow(before); }
    void visit(int64_t first, int64_t count, bool outputs) {
        if (call.mode == ADD) outputs = false;
        if (call.mode != READ) {  // otherwise k and v are 0 and add nothing
            map.read_keys(*this, first, count, k.data());
            read(rows<A>(call.v), first, count, V, v.data());
        }
        if (outputs) map.read_queries(*this, first, count, q.data());
        scan<KEEP>(count, Positions<A>{{k.data()}, {v.data()}, {q.data()}, {out.data()}, nullptr}, state.S, false,
                   outputs);
        A* weights = part<A>(call.weights, head, call.T);
        for (int64_t t = 0; t < count; t++) {
            const A weight = add_and_read(Cp, &k[t * Cp], &q[t * Cp], state.z.data());
            if (!outputs) continue;
            weights[first + t] = weight;
            const A by = divisor(weight);
            for (int64_t j = 0; j < V; j++) out[t * Vp + j] /= by;
        }
        if (outputs) write(out.data(), first, count, V, rows<A>(call.y));
    }
    void leave() {
        state.S.store(part<A>(call.total_s, head, C * V));
        std::copy_n(state.z.begin(), C, part<A>(call.total_z, head, C));
    }
};

// Reads the gradients of the numerators: dy_t / w_t.
template <class A>
void read_gradients(const HeadPass<LinearCall>& pass, int64_t first, int64_t count, A* to) {
    const A* weights = part<A>(pass.call.weights, pass.head, pass.call.T);
    const int64_t V = pass.call.V, Vp = Lanes<A>::pad(V);
    read(pass.rows<A>(pass.call.y), first, count, V, to);
    for (int64_t t = 0; t < count; t++) {
        const A by = divisor(weights[first + t]);
        for (int64_t j = 0; j < Vp; j++) to[t * Vp + j] /= by;
    }
}

// Let n_t = phi(q_t) s_t and w_t = phi(q_t) . z_t, so y_t = n_t / w_t. The gradients of n_t and w_t are g_t = dy_t /
// w_t and c_t = -(dy_t . y_t) / w_t. Then d phi(q_t) = s_t g_t + c_t z_t. Let r_t be the sum of phi(q_j) g_j^T over j
// >= t, and x_t the sum of c_j phi(q_j). Then d phi(k_t) = r_t v_t + x_t and d v_t = phi(k_t) r_t. Nothing of size C V
// is stored per position: s is recomputed, and dy_t . y_t is phi(q_t) . s_t g_t.
template <class A, class Map>
struct OfQueries : HeadPass<LinearCall> {
    typedef Sums<A> State;
    State state;  // s is transposed: [V, C]
    const int64_t C, V, Cp = Lanes<A>::pad(C), Vp = Lanes<A>::pad(V);
    Map map;
    std::vector<A> q, k, v, g, out;

    explicit OfQueries(const LinearCall& call)
        : HeadPass(call), state{Sum<A>(call.V, call.C), std::vector<A>(Lanes<A>::pad(call.C))}, C(call.C), V(call.V),
          map(call), q(SCAN_BLOCK * Cp), k(SCAN_BLOCK * Cp), v(SCAN_BLOCK * Vp), g(SCAN_BLOCK * Vp),
          out(SCAN_BLOCK * Cp) {}
    void load() {
        state.S.load(part<A>(call.s, head, C * V), true);
        load_row(part<A>(call.z, head, C), C, state.z);
    }
    void clear() { state.clear(); }
    void follow(const State& before) { state.follow(before); }
    void visit(int64_t first, int64_t count, bool outputs) {
        if (call.mode != READ) {
            map.read_keys(*this, first, count, k.data());
            read(rows<A>(call.v), first, count, V, v.data());
        }
        if (outputs) {
            map.read_queries(*this, first, count, q.data());
            read_gradients(*this, first, count, g.data());
        }
        scan<KEEP>(count, Positions<A>{{v.data()}, {k.data()}, {g.data()}, {out.data()}, nullptr}, state.S, false,
                   outputs);
        const A* weights = part<A>(call.weights, head, call.T);
        for (int64_t t = 0; t < count; t++) {
            const A share = outputs ? dot(Cp, &q[t * Cp], &out[t * Cp]) : 0;
            const A of_weight = -share / divisor(weights[first + t]);
            add_and_apply(Cp, A(1), &k[t * Cp], of_weight, state.z.data(), &out[t * Cp]);
            if (outputs) part<A>(call.grad_weights, head, call.T)[first + t] = of_weight;
        }
        if (outputs) map.write_queries(*this, first, count, q.data(), out.data());
    }
    void leave() {}
};

template <class A, class Map>
struct OfKeys : HeadPass<LinearCall> {
    struct State {
        Sum<A> R, R_turned;
        std::vector<A> x;
    } state;
    const int64_t C, V, Cp = Lanes<A>::pad(C), Vp = Lanes<A>::pad(V);
    Map map;
    std::vector<A> q, k, v, g, out, grad_v;

    explicit OfKeys(const LinearCall& call)
        : HeadPass(call), state{Sum<A>(call.C, call.V), Sum<A>(call.V, call.C), std::vector<A>(Lanes<A>::pad(call.C))},
          C(call.C), V(call.V), map(call), q(SCAN_BLOCK * Cp), k(SCAN_BLOCK * Cp), v(SCAN_BLOCK * Vp),
          g(SCAN_BLOCK * Vp), out(SCAN_BLOCK * Cp), grad_v(SCAN_BLOCK * Vp) {}
    void load() {
        state.R.load(part<A>(call.total_s, head, C * V));
        state.R_turned.load(part<A>(call.total_s, head, C * V), true);
        load_row(part<A>(call.total_z, head, C), C, state.x);
    }
    void clear() {
        state.R.clear();
        state.R_turned.clear();
        std::fill(state.x.begin(), state.x.end(), A(0));
    }
    void follow(const State& before) {
        ::follow<KEEP>(before.R, static_cast<const A*>(nullptr), state.R);
        ::follow<KEEP>(before.R_turned, static_cast<const A*>(nullptr), state.R_turned);
        for (int64_t i = 0; i < C; i++) state.x[i] += before.x[i];
    }
    void visit(int64_t first, int64_t count, bool outputs) {
        if (call.mode == ADD) outputs = false;
        if (call.mode != READ) {
            map.read_queries(*this, first, count, q.data());
            read_gradients(*this, first, count, g.data());
        }
        if (outputs) {
            map.read_keys(*this, first, count, k.data());
            read(rows<A>(call.v), first, count, V, v.data());
        }
        const Positions<A> to_k{{g.data()}, {q.data()}, {v.data()}, {out.data()}, nullptr};
        const Positions<A> to_v{{q.data()}, {g.data()}, {k.data()}, {grad_v.data()}, nullptr};
        scan<KEEP>(count, to_k, state.R_turned, true, outputs);
        scan<KEEP>(count, to_v, state.R, true, outputs);
        const A* of_weights = part<A>(call.grad_weights, head, call.T);
        for (int64_t t = count - 1; t >= 0; t--)
            add_and_apply(Cp, of_weights[first + t], &q[t * Cp], A(1), state.x.data(), &out[t * Cp]);
        if (!outputs) return;
        map.write_keys(*this, first, count, k.data(), out.data());
        write(grad_v.data(), first, count, V, rows<A>(call.grad_v));
    }
    void leave() {
        if (call.grad_s) state.R.store(part<A>(call.grad_s, head, C * V));
        if (call.grad_z) std::copy_n(state.x.begin(), C, part<A>(call.grad_z, head, C));
    }
};

// With one sum for all positions, r and x of the keys' gradients are sums over all positions, too.
template <class A, class Map>
void run_whole(const LinearCall& call, bool reverse) {
    LinearCall add = call, read = call;
    add.mode = ADD;
    read.mode = READ;
    if (reverse) {
        sweep<OfQueries<A, Map>>(read, false);
        read.total_s = call.grad_s;
        read.total_z = call.grad_z;
        sweep<OfKeys<A, Map>>(add, true);
        sweep<OfKeys<A, Map>>(read, true);
    } else {
        read.s = call.total_s;
        read.z = call.total_z;
        sweep<Forward<A, Map>>(add, false);
        sweep<Forward<A, Map>>(read, false);
    }
}

template <class A, class Map>
void run_map(const LinearCall& call, bool reverse) {
    if (call.mode != CAUSAL) return run_whole<A, Map>(call, reverse);
    if (!reverse) return sweep<Forward<A, Map>>(call, false);
    sweep<OfQueries<A, Map>>(call, false);
    sweep<OfKeys<A, Map>>(call, true);
}

template <class A>
void run(const LinearCall& call, bool reverse) {
    if (call.map == ELU_MAP) run_map<A, Elementwise<A, ELU_MAP>>(call, reverse);
    if (call.map == RELU_MAP) run_map<A, Elementwise<A, RELU_MAP>>(call, reverse);
    if (call.map == EXPONENTIAL_MAP) run_map<A, Exponential<A>>(call, reverse);
}

}  // namespace

extern "C" {

void lintx_linear_forward(const LinearCall* call, int64_t is_double) {
    is_double ? run<double>(*call, false) : run<float>(*call, false);
}

void lintx_linear_backward(const LinearCall* call, int64_t is_double) {
    is_double ? run<double>(*call, true) : run<float>(*call, true);
}

void lintx_linear_maxima(const LinearCall* call, int64_t is_double) {
    is_double ? sweep<Maxima<double>>(*call, false) : sweep<Maxima<float>>(*call, false);
}
}
