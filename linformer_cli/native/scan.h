// Running sums that are updated and read position by position while they are in the cache, and the access to tensors.
//
// Kernels for whole sequences (attention/kernels) are made of these. A is the type of sums, float or double.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "maths.h"
#include "numbers.h"
#include "threads.h"

namespace {

// The address of a tensor [B, H, T, width] whose last dimension is contiguous, and its strides. Its elements have type
// A, or bfloat16 if it is narrow.
struct View {
    void* data;
    int64_t image, head, position, is_narrow;
};

template <class A>
struct Rows {
    void* data;
    int64_t start, step, ahead;  // `ahead`: how many positions later `read` is going to be called for a position
    bool is_narrow;
    Rows(const View& view, int64_t b, int64_t h, int64_t ahead = 0)
        : data(view.data), start(b * view.image + h * view.head), step(view.position), ahead(ahead),
          is_narrow(view.is_narrow) {}
    template <class E>
    E* row(int64_t t) const {
        return static_cast<E*>(data) + start + t * step;
    }
    A* at(int64_t t) const { return row<A>(t); }  // if the tensor is not narrow
};

// Rows of one head are far apart in memory, so processors do not guess the next address.
template <class E, class A, class Map>
void read_elements(const Rows<A>& rows, int64_t first, int64_t count, int64_t width, A* to, Map map) {
    const int64_t padded = Lanes<A>::pad(width);
    for (int64_t t = 0; t < count; t++) {
        const E* row = rows.template row<E>(first + t);
        for (int64_t i = 0; i < width; i += 64 / sizeof(E)) __builtin_prefetch(row + rows.ahead * rows.step + i);
        for (int64_t i = 0; i < width; i++) to[t * padded + i] = map(static_cast<A>(row[i]));
        for (int64_t i = width; i < padded; i++) to[t * padded + i] = 0;
    }
}

// Copies map(x) of `count` positions to rows that are padded with zeros to whole vectors.
template <class A, class Map>
void read(const Rows<A>& rows, int64_t first, int64_t count, int64_t width, A* to, Map map) {
    if (rows.is_narrow) return read_elements<bfloat16>(rows, first, count, width, to, map);
    read_elements<A>(rows, first, count, width, to, map);
}

template <class A>
void read(const Rows<A>& rows, int64_t first, int64_t count, int64_t width, A* to) {
    read(rows, first, count, width, to, [](A x) { return x; });
}

template <class E, class A>
void write_elements(const A* from, int64_t first, int64_t count, int64_t width, const Rows<A>& rows) {
    const int64_t padded = Lanes<A>::pad(width);
    for (int64_t t = 0; t < count; t++) {
        E* row = rows.template row<E>(first + t);
        for (int64_t i = 0; i < width; i++) row[i] = static_cast<E>(from[t * padded + i]);
    }
}

template <class A>
void write(const A* from, int64_t first, int64_t count, int64_t width, const Rows<A>& rows) {
    if (rows.is_narrow) return write_elements<bfloat16>(from, first, count, width, rows);
    write_elements<A>(from, first, count, width, rows);
}

template <class A>
A* part(void* tensor, int64_t index, int64_t size) {
    return tensor ? static_cast<A*>(tensor) + index * size : nullptr;
}

// The sum of a[i] * b[i] in a fixed order, for rows that are padded with zeros to whole vectors.
template <class A>
A dot(int64_t count, const A* a, const A* b) {
    typename Lanes<A>::type sums = {};
    for (int64_t i = 0; i < count; i += Lanes<A>::count) sums += Lanes<A>::load(a + i) * Lanes<A>::load(b + i);
    return Lanes<A>::total(sums);
}

// The numbers exp(log d) of `count` positions from `first` on, and 1 after the last position of the sequence.
template <class A>
void read_decays(const Rows<A>& logs, int64_t first, int64_t count, int64_t T, int64_t width, A* to) {
    const int64_t stride = width == 1 ? 1 : Lanes<A>::pad(width), known = std::min(count, T - first);
    for (int64_t t = 0; t < known; t++)
        for (int64_t i = 0; i < stride; i++) to[t * stride + i] = i < width ? logs.at(first + t)[i] : 0;
    for (int64_t i = 0; i < known * stride; i++) to[i] = exponential(to[i]);
    std::fill(to + known * stride, to + count * stride, A(1));
}

// The number of SIMD registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif

// Positions per block, few enough for their data to stay in the L1 cache.
constexpr int64_t SCAN_BLOCK = 32;
constexpr int64_t count_blocks(int64_t positions) { return (positions + SCAN_BLOCK - 1) / SCAN_BLOCK; }

// A running sum S [N, M]. A last column that would need a vector of its own, such as the one that sums weights, is kept
// apart, with its rows in the lanes of vectors.
template <class A>
struct Sum {
    int64_t N, M, whole;        // `whole` columns are in `rows`
    std::vector<A> rows, last;  // [N, pad(whole)], [pad(N)]

    Sum(int64_t N, int64_t M, bool apart = true)
        : N(N), M(M), whole(apart && M % Lanes<A>::count == 1 ? M - 1 : M), rows(N * stride()), last(Lanes<A>::pad(N)) {
    }
    int64_t stride() const { return Lanes<A>::pad(whole); }
    A& at(int64_t n, int64_t m) { return m < whole ? rows[n * stride() + m] : last[n]; }

    void clear() {
        std::fill(rows.begin(), rows.end(), A(0));
        std::fill(last.begin(), last.end(), A(0));
    }
    // From a dense tensor [N, M], or [M, N] if `transposed` (null: zeros).
    void load(const A* from, bool transposed = false) {
        clear();
        if (!from) return;
        const int64_t step_n = transposed ? 1 : M, step_m = transposed ? N : 1;
        for (int64_t n = 0; n < N; n++) {
            for (int64_t m = 0; m < whole; m++) rows[n * stride() + m] = from[n * step_n + m * step_m];
            if (whole < M) last[n] = from[n * step_n + whole * step_m];
        }
    }
    void store(A* to) const {
        for (int64_t n = 0; n < N; n++) {
            for (int64_t m = 0; m < whole; m++) to[n * M + m] = rows[n * stride() + m];
            if (whole < M) to[n * M + whole] = last[n];
        }
    }
};

// The factor of S before each position: none, one number, one number per row or one per column.
enum SequenceDecay { KEEP, ALL, ROWS, COLUMNS };

// S <- d before + S.
template <SequenceDecay D, class A>
void follow(const Sum<A>& before, const A* decay, Sum<A>& S) {
    const int64_t stride = S.stride();
    auto factor = [=](int64_t n, int64_t m) { return D == KEEP ? A(1) : decay[D == ROWS ? n : D == COLUMNS ? m : 0]; };
    for (int64_t n = 0; n < S.N; n++) {
        for (int64_t m = 0; m < S.whole; m++) S.rows[n * stride + m] += factor(n, m) * before.rows[n * stride + m];
        S.last[n] += factor(n, S.whole) * before.last[n];
    }
}

// For each position in order: S <- d S + sum over w of a_w b_w^T, then out_r <- o_r^T S. All arrays have a row of whole
// vectors per position; d has one number per position for ALL. If positions are visited in reverse, d of position t is
// the factor of the position after t.
template <class A, int WRITES = 1, int READS = 1>
struct Positions {
    const A *a[WRITES], *b[WRITES], *o[READS ? READS : 1];
    A* out[READS ? READS : 1];
    const A* decay;
};

// The rows of P positions.
template <class A, int P, int WRITES, int READS>
struct PositionRows {
    const A *a[WRITES][P], *o[READS ? READS : 1][P], *decay[P];
};

// Updates and reads the columns of S in `TOGETHER` vectors from column m on.
template <int TOGETHER, SequenceDecay D, class A, int P, int WRITES, int READS>
[[gnu::always_inline]] inline void scan_columns(const Positions<A, WRITES, READS>& x,
                                                const PositionRows<A, P, WRITES, READS>& at, int64_t t, int64_t step,
                                                int64_t m, Sum<A>& S) {
    using L = Lanes<A>;
    const int64_t width_m = L::pad(S.M), stride = S.stride();
    typename L::type values[WRITES][P][TOGETHER], sums[READS ? READS : 1][P][TOGETHER] = {}, factors[P][TOGETHER] = {};
    for (int p = 0; p < P; p++)
        for (int c = 0; c < TOGETHER; c++) {
            const int64_t place = m + c * L::count;
            for (int w = 0; w < WRITES; w++) values[w][p][c] = L::load(x.b[w] + (t + p * step) * width_m + place);
            if (D == ALL) factors[p][c] = factors[p][c] + *at.decay[p];
            if (D == COLUMNS) factors[p][c] = L::load(at.decay[p] + place);
        }
    A* rows = S.rows.data() + m;
    // All vectors are stored at the end, since the compiler loads a and o again after a store.
    for (int64_t n = 0; n < S.N; n++) {
        typename L::type row[TOGETHER];
        for (int c = 0; c < TOGETHER; c++) row[c] = L::load(rows + n * stride + c * L::count);
        for (int p = 0; p < P; p++) {
            for (int c = 0; c < TOGETHER; c++) {
                typename L::type added = at.a[0][p][n] * values[0][p][c];
                for (int w = 1; w < WRITES; w++) added += at.a[w][p][n] * values[w][p][c];
                row[c] = D == KEEP   ? row[c] + added
                         : D == ROWS ? row[c] * at.decay[p][n] + added
                                     : row[c] * factors[p][c] + added;
            }
            for (int r = 0; r < READS; r++)
                for (int c = 0; c < TOGETHER; c++) sums[r][p][c] += at.o[r][p][n] * row[c];
        }
        for (int c = 0; c < TOGETHER; c++) L::store(rows + n * stride + c * L::count, row[c]);
    }
    for (int r = 0; r < READS; r++)
        for (int p = 0; p < P; p++)
            for (int c = 0; c < TOGETHER; c++)
                L::store(x.out[r] + (t + p * step) * width_m + m + c * L::count, sums[r][p][c]);
}

template <class A, SequenceDecay D, int P, int WRITES, int READS>
void scan_positions(const Positions<A, WRITES, READS>& x, int64_t t, int64_t step, Sum<A>& S) {
    using L = Lanes<A>;
    const int64_t width_n = L::pad(S.N), width_m = L::pad(S.M);
    const int64_t width_d = D == ALL ? 1 : D == ROWS ? width_n : width_m;
    constexpr int R = READS ? READS : 1;
    PositionRows<A, P, WRITES, READS> at;
    for (int p = 0; p < P; p++) {
        for (int w = 0; w < WRITES; w++) at.a[w][p] = x.a[w] + (t + p * step) * width_n;
        for (int r = 0; r < READS; r++) at.o[r][p] = x.o[r] + (t + p * step) * width_n;
        at.decay[p] = D == KEEP ? nullptr : x.decay + (t + p * step + (step < 0)) * width_d;
    }
    // Vectors that are updated together share the loads of a and o. Their values and sums must fit into the registers.
    constexpr int TOGETHER = REGISTERS >= 32 && WRITES + READS <= 2 ? 2 : 1;
    int64_t m = 0;
    for (; m + (TOGETHER - 1) * L::count < S.whole; m += TOGETHER * L::count)
        scan_columns<TOGETHER, D>(x, at, t, step, m, S);
    if (m < S.whole) scan_columns<1, D>(x, at, t, step, m, S);
    if (S.whole == S.M) return;
    for (int p = 0; p < P; p++) {
        typename L::type sums[R] = {};
        const int64_t place = (t + p * step) * width_m + S.whole;
        for (int64_t n = 0; n < S.N; n += L::count) {
            typename L::type row = L::load(&S.last[n]);
            if (D == ALL) row *= *at.decay[p];
            if (D == ROWS) row *= L::load(at.decay[p] + n);
            if (D == COLUMNS) row *= at.decay[p][S.whole];
            for (int w = 0; w < WRITES; w++) row += L::load(at.a[w][p] + n) * x.b[w][place];
            for (int r = 0; r < READS; r++) sums[r] += L::load(at.o[r][p] + n) * row;
            L::store(&S.last[n], row);
        }
        for (int r = 0; r < READS; r++) x.out[r][place] = L::total(sums[r]);
    }
}

// Visits `count` positions, from the last to the first if `reverse`.
template <SequenceDecay D, class A, int WRITES, int READS>
void scan(int64_t count, const Positions<A, WRITES, READS>& x, Sum<A>& S, bool reverse = false) {
    const int64_t step = reverse ? -1 : 1;
    int64_t done = 0;
    // Four positions share one load and store of S.
    for (; done + 4 <= count; done += 4) scan_positions<A, D, 4>(x, reverse ? count - 1 - done : done, step, S);
    for (; done < count; done++) scan_positions<A, D, 1>(x, reverse ? count - 1 - done : done, step, S);
}

// The same without outputs if `outputs` is false.
template <SequenceDecay D, class A, int WRITES, int READS>
void scan(int64_t count, const Positions<A, WRITES, READS>& x, Sum<A>& S, bool reverse, bool outputs) {
    if (outputs) return scan<D>(count, x, S, reverse);
    Positions<A, WRITES, 0> writes{};
    std::copy_n(x.a, WRITES, writes.a);
    std::copy_n(x.b, WRITES, writes.b);
    writes.decay = x.decay;
    scan<D>(count, writes, S, reverse);
}

}  // namespace
