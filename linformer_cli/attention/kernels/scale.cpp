// Sums divided by their root mean square, times the SiLU of a gate, forward and backward, for the CPU; called by scale.py.
//
// Axes: B images, H heads, T positions, V value width. The gate, the output and their gradients have elements E: float,
// double or bfloat16. Sums have type A: double if E is double, otherwise float.

#include <cmath>

#include "scan.h"
#include "threads.h"

namespace {

struct Call {
    int64_t threads, B, H, T, V;
    double epsilon;                       // added to the mean square
    View sums, gate, y;                   // y: the output, or its gradient
    View grad_sums, grad_gate;
};

// Visits the rows in the order of a projection, in which the heads of a position are adjacent. `visit` gets x, the
// reciprocal of its root mean square, and the gate's row, padded with zeros to whole vectors.
template <class E, class A, class Visit>
void for_rows(const Call& call, Visit visit) {
    const int64_t blocks = (call.T + BLOCK - 1) / BLOCK, width = Lanes<A>::pad(call.V);
    spread(call.threads, call.B * blocks, [&](int64_t index) {
        const int64_t b = index / blocks, first = index % blocks * BLOCK, last = std::min(first + BLOCK, call.T);
        std::vector<A> x(width), gate(width);
        for (int64_t t = first; t < last; t++) {
            for (int64_t h = 0; h < call.H; h++) {
                read(Rows<A>(call.sums, b, h), t, 1, call.V, x.data());
                read(Rows<E>(call.gate, b, h), t, 1, call.V, gate.data());
                const A mean = dot(width, x.data(), x.data()) / static_cast<A>(call.V);
                visit(b, h, t, x.data(), 1 / std::sqrt(mean + static_cast<A>(call.epsilon)), gate.data());
            }
        }
    });
}

template <class E, class A>
void forward(const Call& call) {
    for_rows<E, A>(call, [&](int64_t b, int64_t h, int64_t t, const A* x, A inverse, const A* gate) {
        E* y = Rows<E>(call.y, b, h).at(t);
        for (int64_t i = 0; i < call.V; i++) y[i] = static_cast<E>(x[i] * inverse * gate[i] / (1 + exponential(-gate[i])));
    });
}

// Let n = x / rms(x) and h = dy SiLU(gate). Then dx = (h - n mean(h n)) / rms(x) and dgate = dy n SiLU'(gate).
template <class E, class A>
void backward(const Call& call) {
    for_rows<E, A>(call, [&](int64_t b, int64_t h, int64_t t, const A* x, A inverse, const A* gate) {
        const E* from = Rows<E>(call.y, b, h).at(t);
        A* to_x = Rows<A>(call.grad_sums, b, h).at(t);
        E* to_gate = Rows<E>(call.grad_gate, b, h).at(t);
        std::vector<A> scaled(Lanes<A>::pad(call.V));
        for (int64_t i = 0; i < call.V; i++) {
            const A gradient = static_cast<A>(from[i]), sigmoid = 1 / (1 + exponential(-gate[i]));
            scaled[i] = gradient * gate[i] * sigmoid;
            to_gate[i] = static_cast<E>(gradient * x[i] * inverse * sigmoid * (1 + gate[i] * (1 - sigmoid)));
        }
        const A product = dot(Lanes<A>::pad(call.V), scaled.data(), x) / static_cast<A>(call.V) * inverse * inverse;
        for (int64_t i = 0; i < call.V; i++) to_x[i] = (scaled[i] - x[i] * product) * inverse;
    });
}

}  // namespace

extern "C" {

void lintx_scale_forward(const Call* call, Element element) {
    if (element == Element::FLOAT) forward<float, float>(*call);
    if (element == Element::DOUBLE) forward<double, double>(*call);
    if (element == Element::BFLOAT16) forward<bfloat16, float>(*call);
}

void lintx_scale_backward(const Call* call, Element element) {
    if (element == Element::FLOAT) backward<float, float>(*call);
    if (element == Element::DOUBLE) backward<double, double>(*call);
    if (element == Element::BFLOAT16) backward<bfloat16, float>(*call);
}
}
