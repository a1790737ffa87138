// Learned vectors for combinations of neighbouring values, as in neighbour_tables.py.
#pragma once

#include <algorithm>
#include <cstdint>

namespace {  // local to the library that includes it: the compiler may inline all of it

// The tables of a model; `channels` is 0 for a model without tables.
struct Tables {
    int64_t channels, levels, reach;
    const int32_t* places;       // [T, NEIGHBOURS]: the slot of the ring that holds each value, -1 for none
    const int16_t* recent;       // [B, reach], the ring of values
    const float* rows;           // [channels, all rows of the tables, ROW_WIDTH]
    const float *weight, *bias;  // [TABLES * ROW_WIDTH, D] and [D], of the layer that reads a row of each table
};

constexpr int64_t NEIGHBOURS = LINTX_NEIGHBOURS, ROW_WIDTH = LINTX_ROW_WIDTH, PAIR_BASE = LINTX_PAIR_BASE;
constexpr int64_t TABLE_ROWS[] = {LINTX_TABLE_ROWS}, TABLES = sizeof TABLE_ROWS / sizeof *TABLE_ROWS;
static_assert(TABLES == NEIGHBOURS - 1, "a table for two neighbours, and one more for each further one");

// The rows selected by the values of a position, one per table.
inline void find_rows(const Tables& tables, const int32_t* places, const int16_t* recent, int64_t channel,
                      const float** rows) {
    uint64_t values[NEIGHBOURS], keys[TABLES], key = 0;
    for (int64_t n = 0; n < NEIGHBOURS; n++) values[n] = places[n] < 0 ? tables.levels : recent[places[n]];
    keys[0] = std::min<uint64_t>(values[0], PAIR_BASE - 1) * PAIR_BASE + std::min<uint64_t>(values[1], PAIR_BASE - 1);
    for (int64_t n = 0; n < NEIGHBOURS; n++) {
        key = (key * LINTX_HASH_BASE + values[n] + 1) * LINTX_HASH_MULTIPLIER & LINTX_HASH_MASK;
        key ^= key >> LINTX_HASH_SHIFT;
        if (n >= 2) keys[n - 1] = (key ^ (key >> LINTX_HASH_LAST_SHIFT)) & (TABLE_ROWS[n - 1] - 1);
    }
    const float* table = tables.rows + channel * (TABLE_ROWS[0] + TABLE_ROWS[1] + TABLE_ROWS[2]) * ROW_WIDTH;
    for (int64_t n = 0; n < TABLES; n++) {
        rows[n] = table + keys[n] * ROW_WIDTH;
        table += TABLE_ROWS[n] * ROW_WIDTH;
    }
}

}  // namespace
