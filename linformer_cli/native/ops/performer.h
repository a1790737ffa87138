// Performer attention with positive features exp(w . x - |x|^2 / 2), for D directions w, or for w and -w, and with its
// trig map. Performer's relu map uses linear.h.
#pragma once

#include <cstdint>

#include "../maths.h"
#include "../operation.h"
#include "parts/features.h"
#include "parts/sums.h"

namespace {

struct Performer : Mix {
    const int64_t s = buffer(), z = buffer();
    const int64_t largest = buffer();     // exponents c
    const int64_t directions = buffer();  // w [K, D], which includes the scale of x
    const int64_t C = integer(), D = integer();

    void check(Rules& rules) const {
        rules.need(C >= 1 && D <= C && C <= 2 * D);
        rules.state(s, {H, C, V});
        rules.state(z, {H, C});
        rules.state(largest, {H, C});
        rules.constant(directions, {K, D});
    }

    void run() const {
        const Part parts[] = {{s, C * V}, {z, C}, {largest, C}};
        for_heads(parts, C * V, [&](int64_t row, int64_t head, float** held) {
            float *query = workspace<Mix>(3 * C), *key = query + C, *decay = key + C;
            float *c = held[2], *y = y_at(row, head);
            const float *q = q_at(row, head), *k = k_at(row, head);
            multiply_both(K, D, own<float>(directions, row, 0, 0), q, k, query, key);
            for (int64_t i = D; i < C; i++) query[i] = -query[i - D];
            for (int64_t i = D; i < C; i++) key[i] = -key[i - D];
            const float half = half_square(K, k);
            for (int64_t i = 0; i < C; i++) {
                const float exponent = key[i] - half, before = c[i];
                c[i] = exponent > before ? exponent : before;
                decay[i] = exponential(before - c[i]);
                key[i] = exponential(exponent - c[i]);
            }
            // All features of the query are divided by the largest one; the factor cancels in the quotient.
            for (int64_t i = 0; i < C; i++) query[i] += c[i];
            const float most = ::largest(C, query);
            for (int64_t i = 0; i < C; i++) query[i] = exponential(query[i] - most);
            divide(V, update_and_read<ROWS>(C, V, query, key, v_at(row, head), decay, held[0], held[1], y), y);
        });
    }
};
OPERATION("mix.performer", Performer, STATEFUL);

// Keys have weight exp(|x|^2 / 2), and sums are divided by the largest weight exp(c).
struct PerformerTrig : Mix {
    const int64_t s = buffer(), z = buffer();
    const int64_t c = buffer(), n = buffer();  // n: the total weight of the keys
    const int64_t directions = buffer();       // which include the scale of x
    const int64_t C = integer(), D = integer();

    void check(Rules& rules) const {
        rules.need(D >= 1 && C == 2 * D);
        rules.state(s, {H, C, V});
        rules.state(z, {H, C});
        rules.state(c, {H});
        rules.state(n, {H});
        rules.constant(directions, {K, D});
    }

    void run() const {
        const Part parts[] = {{s, C * V}, {z, C}, {c, 1}, {n, 1}};
        for_heads(parts, C * V, [&](int64_t row, int64_t head, float** held) {
            float *query = workspace<Mix>(2 * C), *key = query + C, &top = *held[2];
            const float *q = q_at(row, head), *k = k_at(row, head);
            multiply_both(K, D, own<float>(directions, row, 0, 0), q, k, query, key);
            const float exponent = half_square(K, k), before = top;
            top = exponent > before ? exponent : before;
            average_by_sines(C, V, query, key, v_at(row, head), exponential(before - top), exponential(exponent - top),
                             held[0], held[1], *held[3], y_at(row, head));
        });
    }
};
OPERATION("mix.performer_trig", PerformerTrig, STATEFUL);

}  // namespace
