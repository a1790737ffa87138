// Retention. Each coordinate of a key is multiplied by F factors. Sums decay at the first position of each row, so with
// rows of one position they decay at every position.
#pragma once

#include <cstdint>

#include "../operation.h"
#include "parts/scaling.h"
#include "parts/sums.h"

namespace {

struct Retention : Mix {
    const int64_t state = buffer();  // s
    const int64_t decay = buffer();
    const int64_t factors = buffer();  // of each column
    const int64_t F = integer();
    const int64_t columns = integer();  // of a row
    const bool gated = integer();       // whether there is an output gate
    const float scale = real();         // of queries

    void check(Rules& rules) const {
        rules.need(F >= 1 && columns >= 1);
        check_extra(rules, gated ? V : 0);
        rules.state(state, {H, F, K, V});
        rules.constant(decay, {H});
        rules.constant(factors, {columns, F});
    }

    void run() const {
        const int64_t C = F * K;
        const Part parts[] = {{state, C * V}};
        for_heads(parts, C * V, [&](int64_t row, int64_t head, float** held) {
            const int64_t column = pass.position_of(row) % columns;
            const float *q = q_at(row, head), *k = k_at(row, head), *value = v_at(row, head);
            const float* f_of = own<float>(factors, row, column, F);
            float *query = workspace<Mix>(2 * C), *key = query + C, *y = y_at(row, head);
            for (int64_t f = 0; f < F; f++) {
                for (int64_t i = 0; i < K; i++) query[f * K + i] = q[i] * scale * f_of[f];
                for (int64_t i = 0; i < K; i++) key[f * K + i] = k[i] * f_of[f];
            }
            if (column == 0) update_and_read<ALL>(C, V, query, key, value, own<float>(decay, row, head, 1), held[0], y);
            else update_and_read<KEEP>(C, V, query, key, value, nullptr, held[0], y);
            scale_output(V, 1e-6f, gated ? extra_at(row, head, V) : nullptr, y);
        });
    }
};
OPERATION("mix.retention", Retention, STATEFUL);

}  // namespace
