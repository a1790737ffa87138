// Sums divided by their root mean square, times the SiLU of a gate, forward and backward, for the CPU; called by
// cpu_scale.py.
//
// Axes: B images, H heads, T positions, V value width. Everything has type A, double or float. If A is float, the gate,
// the output and their gradients may be bfloat16.

#include <cmath>

#include "scan.h"
#include "threads.h"

namespace {

struct ScaleCall {
    int64_t threads, B, H, T, V;
    double epsilon;      // added to the mean square
    View sums, gate, y;  // y: the output, or its gradient
    View grad_sums, grad_gate;
};

// Visits the rows in the order of a projection, in which the heads of a position are adjacent. `visit` gets x, the
// reciprocal of its root mean square, and the gate's row, padded with zeros to whole vectors.
template <class A, class Visit>
void for_rows(const ScaleCall& call, Visit visit) {
    const int64_t blocks = (call.T + SCAN_BLOCK - 1) / SCAN_BLOCK, width = Lanes<A>::pad(call.V);
    spread(call.threads, call.B * blocks, [&](int64_t index) {
        const int64_t b = index / blocks, first = index % blocks * SCAN_BLOCK,
                      last = std::min(first + SCAN_BLOCK, call.T);
        std::vector<A> x(width), gate(width);
        for (int64_t t = first; t < last; t++) {
            for (int64_t h = 0; h < call.H; h++) {
                read(Rows<A>(call.sums, b, h), t, 1, call.V, x.data());
                read(Rows<A>(call.gate, b, h), t, 1, call.V, gate.data());
                const A mean = dot(width, x.data(), x.data()) / static_cast<A>(call.V);
                visit(b, h, t, x.data(), 1 / std::sqrt(mean + static_cast<A>(call.epsilon)), gate.data());
            }
        }
    });
}

template <class A>
void forward(const ScaleCall& call) {
    for_rows<A>(call, [&](int64_t b, int64_t h, int64_t t, const A* x, A inverse, const A* gate) {
        std::vector<A> y(call.V);
        for (int64_t i = 0; i < call.V; i++) y[i] = x[i] * inverse * gate[i] / (1 + exponential(-gate[i]));
        write(y.data(), t, 1, call.V, Rows<A>(call.y, b, h));
    });
}

// Let n = x / rms(x) and h = dy SiLU(gate). Then dx = (h - n mean(h n)) / rms(x) and dgate = dy n SiLU'(gate).
template <class A>
void backward(const ScaleCall& call) {
    for_rows<A>(call, [&](int64_t b, int64_t h, int64_t t, const A* x, A inverse, const A* gate) {
        const int64_t width = Lanes<A>::pad(call.V);
        std::vector<A> gradient(width), scaled(width), grad_gate(width);
        read(Rows<A>(call.y, b, h), t, 1, call.V, gradient.data());
        for (int64_t i = 0; i < call.V; i++) {
            const A sigmoid = 1 / (1 + exponential(-gate[i]));
            scaled[i] = gradient[i] * gate[i] * sigmoid;
            grad_gate[i] = gradient[i] * x[i] * inverse * sigmoid * (1 + gate[i] * (1 - sigmoid));
        }
        write(grad_gate.data(), t, 1, call.V, Rows<A>(call.grad_gate, b, h));
        A* to_x = Rows<A>(call.grad_sums, b, h).at(t);
        const A product = dot(width, scaled.data(), x) / static_cast<A>(call.V) * inverse * inverse;
        for (int64_t i = 0; i < call.V; i++) to_x[i] = (scaled[i] - x[i] * product) * inverse;
    });
}

}  // namespace

extern "C" {

void lintx_scale_forward(const ScaleCall* call, int64_t is_double) {
    is_double ? forward<double>(*call) : forward<float>(*call);
}

void lintx_scale_backward(const ScaleCall* call, int64_t is_double) {
    is_double ? backward<double>(*call) : backward<float>(*call);
}
}
