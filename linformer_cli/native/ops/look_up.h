// The vector of a token: embeddings of known values, of their position and class, and of combinations of values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../operation.h"

namespace {

// The value in `slot` of the ring of recent values, or `levels` if `slot` is -1.
inline int64_t value_at(const int16_t* ring, int32_t slot, int64_t levels) { return slot < 0 ? levels : ring[slot]; }

// The arguments of operations that read recent values: their result, the ring of recent values, and for each position
// the slots of the values that it reads.
struct Reader : Arguments {
    const int64_t output = buffer(), ring = buffer(), slots = buffer();

    // There are `rows` rows of `count` slots.
    void check_slots(Rules& rules, int64_t rows, int64_t count) const {
        rules.need(ring == rules.file.recent);
        rules.constant(slots, {rows, count}, Type::INT32);
        if (!rules.kept) return;
        const int32_t* found = rules.integers(slots);
        const int64_t reach = rules.file.buffers[ring].width;
        for (int64_t n = 0; n < rows * count; n++) rules.need(-1 <= found[n] && found[n] < reach);
    }
};

// output <- the vectors of the position, of each source's value, and of the class.
struct Embed : Reader {
    const int64_t table = buffer();
    const int64_t places = buffer_or_none(), label = buffer_or_none(), classes = buffer_or_none();
    const int64_t D = integer(), sources = integer(), levels = integer();
    // Above 0, there may be more than T positions. After the rows of slots for the first positions, one for each
    // source, there are `period` rows that repeat.
    const int64_t period = integer();

    void check(Rules& rules) const {
        const FileProgram& file = rules.file;
        rules.scratch(output, {D});
        check_slots(rules, period > 0 ? sources + period : rules.T, sources);
        rules.need(levels >= file.levels);
        rules.constant(table, {sources, levels + 1, D});
        if (places >= 0) rules.constant(places, {rules.T, D});
        rules.need(label < 0 || label == file.label);
        if (label >= 0) rules.constant(classes, {file.classes + file.is_class_optional(), D});
    }

    void run() const {
        pass.for_each(pass.rows, pass.rows * D * (sources + 2), [&](int64_t row) {
            const int64_t position = pass.position_of(row);
            const bool repeats = period > 0 && position > sources;
            const int64_t slot_row = repeats ? sources + (position - sources) % period : position;
            float* x = pass.at<float>(output, row);
            const int16_t* recent = pass.at<int16_t>(ring, row);
            const int32_t* slot = pass.at<int32_t>(slots, row) + slot_row * sources;
            const float* vectors = pass.at<float>(table, row);
            if (places < 0) std::fill_n(x, D, 0.0f);
            else std::memcpy(x, pass.at<float>(places, row) + position * D, D * sizeof(float));
            for (int64_t source = 0; source < sources; source++) {
                const float* vector = vectors + (source * (levels + 1) + value_at(recent, slot[source], levels)) * D;
                for (int64_t i = 0; i < D; i++) x[i] += vector[i];
            }
            if (label < 0) return;
            const float* vector = pass.at<float>(classes, row) + *pass.at<int64_t>(label, row) * D;
            for (int64_t i = 0; i < D; i++) x[i] += vector[i];
        });
    }
};
OPERATION("embed", Embed, STATELESS);

// The numbers of a colour: red, green, blue and opacity. In a window, two flags follow: whether it is the colour of the
// left and of the upper pixel.
constexpr int64_t COLOUR_NUMBERS = 4, WINDOW_NUMBERS = COLOUR_NUMBERS + 2;

// output <- the values around a position, scaled to [-1, 1], followed by flags that say whether each is above 0; or the
// numbers of their colours, each followed by its flags.
struct LookAround : Reader {
    const int64_t colours = buffer_or_none();
    const int64_t values = integer(), levels = integer();

    void check(Rules& rules) const {
        check_slots(rules, rules.T, values);
        rules.scratch(output, {colours < 0 ? 2 : WINDOW_NUMBERS, values});
        if (colours < 0) return;
        rules.need(levels >= rules.file.levels && values > UP_PLACE);
        rules.constant(colours, {levels + 1, COLOUR_NUMBERS});
    }

    void run() const {
        pass.for_each(pass.rows, pass.rows * values, [&](int64_t row) {
            float* numbers = pass.at<float>(output, row);
            const int16_t* recent = pass.at<int16_t>(ring, row);
            const int32_t* slot = pass.at<int32_t>(slots, row) + pass.position_of(row) * values;
            if (colours >= 0) {
                const float* table = pass.at<float>(colours, row);
                const int64_t left = value_at(recent, slot[LEFT_PLACE], levels);
                const int64_t up = value_at(recent, slot[UP_PLACE], levels);
                for (int64_t n = 0; n < values; n++, numbers += WINDOW_NUMBERS) {
                    const int64_t value = value_at(recent, slot[n], levels);
                    std::memcpy(numbers, table + value * COLOUR_NUMBERS, COLOUR_NUMBERS * sizeof(float));
                    numbers[COLOUR_NUMBERS] = value == left ? 1.0f : 0.0f;
                    numbers[COLOUR_NUMBERS + 1] = value == up ? 1.0f : 0.0f;
                }
                return;
            }
            for (int64_t n = 0; n < values; n++) {
                const bool known = slot[n] >= 0;
                const int64_t value = known ? recent[slot[n]] : 0;
                numbers[n] = known ? 2.0f * value / (levels - 1) - 1 : 0.0f;
                numbers[values + n] = known ? (value > 0 ? 1.0f : 0.0f) : 0.5f;
            }
        });
    }
};
OPERATION("look_around", LookAround, STATELESS);

// Reads differences of values from references, as in neighbours.py.
struct DifferenceReader : Reader {
    const int64_t values = integer(), levels = integer(), channels = integer();
    const int64_t own = integer(), left = integer(), up = integer();

    void check_shared(Rules& rules) const {
        rules.need(levels >= 2 && channels >= 1 && own < channels);
        for (const int64_t pixel : {left, up}) rules.need(own + (pixel + 1) * channels <= values);
        check_slots(rules, rules.T, values);
    }
};

// The values of the slots of one row.
struct Differences {
    const DifferenceReader& of;
    const int64_t row;
    const int16_t* recent = of.pass.at<int16_t>(of.ring, row);
    const int32_t* slots = of.pass.at<int32_t>(of.slots, row) + of.pass.position_of(row) * of.values;

    // Twice the reference of a channel.
    int64_t reference(int64_t channel) const {
        const int32_t l = slots[of.own + of.left * of.channels + channel];
        const int32_t u = slots[of.own + of.up * of.channels + channel];
        if (l < 0 && u < 0) return of.levels - 1;
        return static_cast<int64_t>(recent[l < 0 ? u : l]) + recent[u < 0 ? l : u];
    }
    // Twice the difference of the value in a slot from the reference of its channel, or 0 if there is no value.
    int64_t difference(int64_t slot) const {
        const int64_t channel = slot < of.own ? slot : (slot - of.own) % of.channels;
        return slots[slot] < 0 ? 0 : 2 * recent[slots[slot]] - reference(channel);
    }
    float scale(int64_t doubled) const { return static_cast<float>(doubled) / static_cast<float>(of.levels - 1) - 1; }
};

// output <- the differences of all values, then the references of all channels.
struct TakeDifferences : DifferenceReader {
    void check(Rules& rules) const { rules.scratch(output, {values + channels}); }

    void run() const {
        const float scale = static_cast<float>(DIFFERENCE_SCALE / (levels - 1.0));
        pass.for_each(pass.rows, pass.rows * values * 4, [&](int64_t row) {
            const Differences found{*this, row};
            float* numbers = pass.at<float>(output, row);
            for (int64_t n = 0; n < values; n++) numbers[n] = static_cast<float>(found.difference(n)) * scale;
            for (int64_t n = 0; n < channels; n++) numbers[values + n] = found.scale(found.reference(n));
        });
    }
};
OPERATION("take_differences", TakeDifferences, STATELESS);

// Adds the prediction of the position's channel to the means of a mixture head, whose parameters are the output.
struct AddPredictions : DifferenceReader {
    const int64_t means = integer();

    void check(Rules& rules) const {
        rules.need(own + 1 == channels);
        rules.scratch(output, {2, means});
    }

    void run() const {
        pass.for_each(pass.rows, pass.rows * means, [&](int64_t row) {
            const Differences found{*this, row};
            const int64_t channel = pass.position_of(row) % channels;
            const float prediction =
                found.scale(found.reference(channel) + (channel ? found.difference(channel - 1) : 0));
            float* parameters = pass.at<float>(output, row) + means;
            for (int64_t n = 0; n < means; n++) parameters[n] += prediction;
        });
    }
};
OPERATION("add_predictions", AddPredictions, STATELESS);

constexpr int64_t TABLES = sizeof TABLE_ROWS / sizeof *TABLE_ROWS;
static_assert(TABLES == NEIGHBOURS - 1, "one table for two neighbours, and one more for each further neighbour");

// output <- one row of each table, selected by a combination of neighbouring values as in neighbours.py.
struct LookUp : Reader {
    const int64_t tables = buffer();  // [channels, rows of all tables, ROW_WIDTH]
    const int64_t levels = integer(), channels = integer();

    static int64_t count_rows() {
        int64_t rows = 0;
        for (const int64_t count : TABLE_ROWS) rows += count;
        return rows;
    }

    void check(Rules& rules) const {
        rules.scratch(output, {TABLES, ROW_WIDTH});
        check_slots(rules, rules.T, NEIGHBOURS);
        rules.need(channels >= 1);
        rules.constant(tables, {channels, count_rows(), ROW_WIDTH});
    }

    void run() const {
        pass.for_each(pass.rows, pass.rows * TABLES * ROW_WIDTH, [&](int64_t row) {
            const int64_t position = pass.position_of(row);
            float* numbers = pass.at<float>(output, row);
            const int16_t* recent = pass.at<int16_t>(ring, row);
            const int32_t* slot = pass.at<int32_t>(slots, row) + position * NEIGHBOURS;
            uint64_t values[NEIGHBOURS], keys[TABLES], key = 0;
            for (int64_t n = 0; n < NEIGHBOURS; n++) values[n] = value_at(recent, slot[n], levels);
            const uint64_t most = PAIR_BASE - 1;
            keys[0] = std::min(values[0], most) * PAIR_BASE + std::min(values[1], most);
            for (int64_t n = 0; n < NEIGHBOURS; n++) {
                key = (key * HASH_BASE + values[n] + 1) * HASH_MULTIPLIER & HASH_MASK;
                key ^= key >> HASH_SHIFT;
                if (n >= 2) keys[n - 1] = (key ^ (key >> HASH_LAST_SHIFT)) & (TABLE_ROWS[n - 1] - 1);
            }
            const float* table = pass.at<float>(tables, row) + position % channels * count_rows() * ROW_WIDTH;
            for (int64_t n = 0; n < TABLES; n++) {
                std::memcpy(numbers + n * ROW_WIDTH, table + keys[n] * ROW_WIDTH, ROW_WIDTH * sizeof(float));
                table += TABLE_ROWS[n] * ROW_WIDTH;
            }
        });
    }
};
OPERATION("look_up", LookUp, STATELESS);

}  // namespace
