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

// The values of some slots, and differences from references, as in differences.py. Integers: values, levels, channels,
// own, left, up.
struct Differences {
    const int64_t values, levels, channels, own, left, up;
    const int16_t* ring;
    const int32_t* slots;

    Differences(const Pass& pass, const Operation& op, int64_t row)
        : values(op.integer[0]), levels(op.integer[1]), channels(op.integer[2]), own(op.integer[3]),
          left(op.integer[4]), up(op.integer[5]), ring(pass.at<int16_t>(op.buffer[1], row)),
          slots(pass.at<int32_t>(op.buffer[2], row) + pass.position_of(row) * values) {}

    // Twice the reference of a channel.
    int64_t reference(int64_t channel) const {
        const int32_t l = slots[own + left * channels + channel], u = slots[own + up * channels + channel];
        if (l < 0 && u < 0) return levels - 1;
        return static_cast<int64_t>(ring[l < 0 ? u : l]) + ring[u < 0 ? l : u];
    }
    // Twice the difference of the value in a slot from the reference of its channel, or 0 if there is no value.
    int64_t difference(int64_t slot) const {
        const int64_t channel = slot < own ? slot : (slot - own) % channels;
        return slots[slot] < 0 ? 0 : 2 * ring[slots[slot]] - reference(channel);
    }
    float scale(int64_t doubled) const { return static_cast<float>(doubled) / static_cast<float>(levels - 1) - 1; }
};

// numbers <- the differences of all values, then the references of all channels. Buffers: numbers, ring, slots
// [T, values]. Integers: those of `Differences`.
void take_differences(const Pass& pass, const Operation& op) {
    const float scale = static_cast<float>(LINTX_DIFFERENCE_SCALE / (op.integer[1] - 1.0));
    pass.for_each(pass.rows, pass.rows * op.integer[0] * 4, [&](int64_t row) {
        const Differences found(pass, op, row);
        float* numbers = pass.at<float>(op.buffer[0], row);
        for (int64_t n = 0; n < found.values; n++) numbers[n] = static_cast<float>(found.difference(n)) * scale;
        for (int64_t n = 0; n < found.channels; n++) numbers[found.values + n] = found.scale(found.reference(n));
    });
}

// Adds the prediction of the position's channel to the means of a mixture head's parameters. Buffers: parameters, ring,
// slots [T, values]. Integers: those of `Differences`, and the number of means.
void add_predictions(const Pass& pass, const Operation& op) {
    const int64_t means = op.integer[6];
    pass.for_each(pass.rows, pass.rows * means, [&](int64_t row) {
        const Differences found(pass, op, row);
        const int64_t channel = pass.position_of(row) % found.channels;
        const float prediction = found.scale(found.reference(channel) + (channel ? found.difference(channel - 1) : 0));
        float* parameters = pass.at<float>(op.buffer[0], row) + means;
        for (int64_t n = 0; n < means; n++) parameters[n] += prediction;
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
