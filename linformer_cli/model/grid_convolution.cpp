// The convolution of grid_convolution.py over whole sequences, forward and backward, for the CPU.
//
// x [B, N, W] is what a position may see, of which the last N - first are those that y [B, N - first, W] is for. Index i
// of it is position i - first + position; rows are as long as `row`. Tap n looks `back[n]` indices back and `left[n]` columns.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "numbers.h"

namespace {

struct Grid {
    int64_t B, N, W, first, position, row, taps;
    const int64_t *back, *left;

    // Whether index i has something at this tap: neither before everything nor beyond an edge.
    bool sees(int64_t i, int64_t tap) const {
        const int64_t column = (position + i - first) % row - left[tap];
        return i >= back[tap] && column >= 0 && column < row;
    }
};

// Pairs of rows, whose products are added up.
template <class A>
struct Terms {
    std::vector<const A*> a, b;
    int64_t count = 0;
    explicit Terms(int64_t most) : a(most), b(most) {}
    void add(const A* row, const A* other) { a[count] = row, b[count++] = other; }
};

// The columns from w on, as many vectors as stay in registers; returns the first column that is left.
template <class A, int VECTORS>
int64_t add_vectors(int64_t W, int64_t w, const A* from, const Terms<A>& terms, A* to) {
    using L = Lanes<A>;
    for (; w + VECTORS * L::count <= W; w += VECTORS * L::count) {
        typename L::type sums[VECTORS] = {};
        if (from)
            for (int v = 0; v < VECTORS; v++) sums[v] = L::load(from + w + v * L::count);
        for (int64_t n = 0; n < terms.count; n++)
            for (int v = 0; v < VECTORS; v++)
                sums[v] += L::load(terms.a[n] + w + v * L::count) * L::load(terms.b[n] + w + v * L::count);
        for (int v = 0; v < VECTORS; v++) L::store(to + w + v * L::count, sums[v]);
    }
    return w;
}

// to [W] = from, if there is any, and the products of all terms, added up.
template <class A>
void add_products(int64_t W, const A* from, const Terms<A>& terms, A* to) {
    int64_t w = add_vectors<A, 8>(W, 0, from, terms, to);
    w = add_vectors<A, 1>(W, w, from, terms, to);
    for (; w < W; w++) {
        A sum = from ? from[w] : 0;
        for (int64_t n = 0; n < terms.count; n++) sum += terms.a[n][w] * terms.b[n][w];
        to[w] = sum;
    }
}

template <class A>
void convolve(const Grid& grid, const A* x, const A* weight, A* y) {
    const int64_t W = grid.W, T = grid.N - grid.first;
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < grid.B; b++) {
        Terms<A> terms(grid.taps);
        for (int64_t i = grid.first; i < grid.N; i++) {
            const A* here = x + (b * grid.N + i) * W;
            terms.count = 0;
            for (int64_t tap = 0; tap < grid.taps; tap++)
                if (grid.sees(i, tap)) terms.add(here - grid.back[tap] * W, weight + tap * W);
            add_products(W, here, terms, y + (b * T + i - grid.first) * W);
        }
    }
}

// of_weight [B, taps, W] is that of each image; the caller adds them up.
template <class A>
void differentiate(const Grid& grid, const A* x, const A* weight, const A* of_y, A* of_x, A* of_weight) {
    const int64_t W = grid.W, T = grid.N - grid.first;
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < grid.B; b++) {
        Terms<A> terms(std::max(grid.taps, T));
        const A* rows = x + b * grid.N * W;
        const A* gradients = of_y + (b * T - grid.first) * W;  // that of index i at i * W
        // What each index was seen by.
        for (int64_t i = 0; i < grid.N; i++) {
            terms.count = 0;
            for (int64_t tap = 0; tap < grid.taps; tap++) {
                const int64_t later = i + grid.back[tap];
                if (later >= grid.first && later < grid.N && grid.sees(later, tap))
                    terms.add(gradients + later * W, weight + tap * W);
            }
            add_products(W, i >= grid.first ? gradients + i * W : nullptr, terms, of_x + (b * grid.N + i) * W);
        }
        // And what each tap saw.
        for (int64_t tap = 0; tap < grid.taps; tap++) {
            terms.count = 0;
            for (int64_t i = grid.first; i < grid.N; i++)
                if (grid.sees(i, tap)) terms.add(rows + (i - grid.back[tap]) * W, gradients + i * W);
            add_products<A>(W, nullptr, terms, of_weight + (b * grid.taps + tap) * W);
        }
    }
}

}  // namespace

extern "C" {

void lintx_grid_convolution(int64_t wide, int64_t B, int64_t N, int64_t W, int64_t first, int64_t position, int64_t row,
                            int64_t taps, const int64_t* back, const int64_t* left, const void* x, const void* weight,
                            void* y) {
    const Grid grid{B, N, W, first, position, row, taps, back, left};
    if (wide)
        convolve(grid, static_cast<const double*>(x), static_cast<const double*>(weight), static_cast<double*>(y));
    else
        convolve(grid, static_cast<const float*>(x), static_cast<const float*>(weight), static_cast<float*>(y));
}

void lintx_grid_convolution_gradient(int64_t wide, int64_t B, int64_t N, int64_t W, int64_t first, int64_t position,
                                     int64_t row, int64_t taps, const int64_t* back, const int64_t* left, const void* x,
                                     const void* weight, const void* of_y, void* of_x, void* of_weight) {
    const Grid grid{B, N, W, first, position, row, taps, back, left};
    if (wide)
        differentiate(grid, static_cast<const double*>(x), static_cast<const double*>(weight),
                      static_cast<const double*>(of_y), static_cast<double*>(of_x), static_cast<double*>(of_weight));
    else
        differentiate(grid, static_cast<const float*>(x), static_cast<const float*>(weight),
                      static_cast<const float*>(of_y), static_cast<float*>(of_x), static_cast<float*>(of_weight));
}
}
