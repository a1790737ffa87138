// The vector of a token: embeddings of known values, of their position and class, and of combinations of values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../program.h"

namespace {

// The value in `slot` of the ring of recent values, or `levels` if `slot` is -1.
inline int64_t value_at(const int16_t* ring, int32_t slot, int64_t levels) { return slot < 0 ? levels : ring[slot]; }

// x <- the vectors of the position, of each source's value, and of the class. Buffers: x, ring, slots [T, sources],
// table [sources, levels + 1, D], places [T, D] or none, label or none, classes [labels, D] or none. Integers: D,
// sources, levels, period. With a period above 0, there may be more than T positions: slots [sources + period, sources]
// has a row for each of the first positions, and then rows that repeat.
void embed(const Pass& pass, const Operation& op) {
    const int64_t D = op.integer[0], sources = op.integer[1], levels = op.integer[2], period = op.integer[3];
    pass.for_each(pass.rows, pass.rows * D * (sources + 2), [&](int64_t row) {
        const int64_t position = pass.position_of(row);
        const bool repeats = period > 0 && position > sources;
        const int64_t slot_row = repeats ? sources + (position - sources) % period : position;
        float* x = pass.at<float>(op.buffer[0], row);
        const int16_t* ring = pass.at<int16_t>(op.buffer[1], row);
        const int32_t* slots = pass.at<int32_t>(op.buffer[2], row) + slot_row * sources;
        const float* table = pass.at<float>(op.buffer[3], row);
        if (op.buffer[4] < 0) std::fill_n(x, D, 0.0f);
        else std::memcpy(x, pass.at<float>(op.buffer[4], row) + position * D, D * sizeof(float));
        for (int64_t source = 0; source < sources; source++) {
            const float* vector = table + (source * (levels + 1) + value_at(ring, slots[source], levels)) * D;
            for (int64_t i = 0; i < D; i++) x[i] += vector[i];
        }
        if (op.buffer[5] < 0) return;
        const float* vector = pass.at<float>(op.buffer[6], row) + *pass.at<int64_t>(op.buffer[5], row) * D;
        for (int64_t i = 0; i < D; i++) x[i] += vector[i];
    });
}

// numbers <- the values around a position, scaled to [-1, 1], followed by flags that say whether each is above 0.
// Buffers: numbers, ring, slots [T, values]. Integers: values, levels.
void look_around(const Pass& pass, const Operation& op) {
    const int64_t values = op.integer[0], levels = op.integer[1];
    pass.for_each(pass.rows, pass.rows * values, [&](int64_t row) {
        float* numbers = pass.at<float>(op.buffer[0], row);
        const int16_t* ring = pass.at<int16_t>(op.buffer[1], row);
        const int32_t* slots = pass.at<int32_t>(op.buffer[2], row) + pass.position_of(row) * values;
        for (int64_t n = 0; n < values; n++) {
            const bool known = slots[n] >= 0;
            const int64_t value = known ? ring[slots[n]] : 0;
            numbers[n] = known ? 2.0f * value / (levels - 1) - 1 : 0.0f;
            numbers[values + n] = known ? (value > 0 ? 1.0f : 0.0f) : 0.5f;
        }
    });
}

constexpr int64_t NEIGHBOURS = LINTX_NEIGHBOURS, ROW_WIDTH = LINTX_ROW_WIDTH;
constexpr int64_t TABLE_ROWS[] = {LINTX_TABLE_ROWS}, TABLES = sizeof TABLE_ROWS / sizeof *TABLE_ROWS;
static_assert(TABLES == NEIGHBOURS - 1, "one table for two neighbours, and one more for each further neighbour");

// numbers <- one row of each table, selected by a combination of neighbouring values as in neighbour_tables.py.
// Buffers: numbers, ring, slots [T, NEIGHBOURS], rows [channels, rows of all tables, ROW_WIDTH]. Integers: levels,
// channels.
void look_up(const Pass& pass, const Operation& op) {
    const int64_t levels = op.integer[0], channels = op.integer[1];
    pass.for_each(pass.rows, pass.rows * TABLES * ROW_WIDTH, [&](int64_t row) {
        const int64_t position = pass.position_of(row);
        float* numbers = pass.at<float>(op.buffer[0], row);
        const int16_t* ring = pass.at<int16_t>(op.buffer[1], row);
        const int32_t* slots = pass.at<int32_t>(op.buffer[2], row) + position * NEIGHBOURS;
        uint64_t values[NEIGHBOURS], keys[TABLES], key = 0;
        for (int64_t n = 0; n < NEIGHBOURS; n++) values[n] = value_at(ring, slots[n], levels);
        const uint64_t most = LINTX_PAIR_BASE - 1;
        keys[0] = std::min(values[0], most) * LINTX_PAIR_BASE + std::min(values[1], most);
        for (int64_t n = 0; n < NEIGHBOURS; n++) {
            key = (key * LINTX_HASH_BASE + values[n] + 1) * LINTX_HASH_MULTIPLIER & LINTX_HASH_MASK;
            key ^= key >> LINTX_HASH_SHIFT;
            if (n >= 2) keys[n - 1] = (key ^ (key >> LINTX_HASH_LAST_SHIFT)) & (TABLE_ROWS[n - 1] - 1);
        }
        int64_t all = 0;
        for (const int64_t count : TABLE_ROWS) all += count;
        const float* table = pass.at<float>(op.buffer[3], row) + position % channels * all * ROW_WIDTH;
        for (int64_t n = 0; n < TABLES; n++) {
            std::memcpy(numbers + n * ROW_WIDTH, table + keys[n] * ROW_WIDTH, ROW_WIDTH * sizeof(float));
            table += TABLE_ROWS[n] * ROW_WIDTH;
        }
    });
}

}  // namespace
