// Checks that an operation of a program file does not leave its buffers. operation_rules.h has the rule of each
// operation.
//
// Sizes are doubles, because products of damaged integers would overflow an int64. Sizes below 2^53 are exact; larger
// ones need not be, because no buffer is so large.
#pragma once

#include <algorithm>
#include <cstdint>

#include "program_file.h"

namespace {

class Rules {
public:
    Rules(const FileProgram& file, const Operation& op, int64_t positions)
        : file(file), op(op), T(static_cast<double>(positions)) {}

    const FileProgram& file;
    const Operation& op;
    const double T;  // positions of an image, as this operation counts them
    bool kept = true;

    void need(bool condition) { kept = kept && condition; }
    double integer(int64_t n) const { return static_cast<double>(op.integer[n]); }
    bool has(int64_t n) const { return op.buffer[n] >= 0; }

    // Buffer `n` of the operation must be of this kind and hold `count` numbers of this type.
    void constant(int64_t n, double count, Type type = Type::FLOAT32) { hold(n, SHARED, type, count); }
    void state(int64_t n, double count, Type type = Type::FLOAT32) { hold(n, STATE, type, count); }
    void scratch(int64_t n, double count, Type type = Type::FLOAT32) { hold(n, SCRATCH, type, count); }

    // Buffer `n` holds numbers for each row of a pass. A state holds them only if a row is an image.
    void row(int64_t n, double count) {
        const bool image = file.window == 1 && has(n) && file.buffers[op.buffer[n]].kind == STATE;
        image ? state(n, count) : scratch(n, count);
    }

    // Buffers 1 and 2 of the operation are the ring of recent values, and `count` slots of the ring in each of `rows`.
    void ring_and_slots(double count, double rows) {
        need(op.buffer[1] == file.recent);
        constant(2, rows * count, Type::INT32);
        const int64_t reach = file.buffers[file.recent].width;
        for (int64_t n = 0; kept && n < rows * count; n++) need(-1 <= shared(2)[n] && shared(2)[n] < reach);
    }

    // No buffer that an operation may write to appears twice; in a `join`, x may also be the output.
    void distinct(bool join) {
        for (int64_t a = 0; a < LINTX_BUFFERS; a++)
            for (int64_t b = a + 1; b < LINTX_BUFFERS; b++)
                need(!has(a) || op.buffer[a] != op.buffer[b] || file.buffers[op.buffer[a]].kind == SHARED ||
                     (join && a == 0 && b == 2));
    }

    // The numbers of a shared buffer of int32.
    const int32_t* shared(int64_t n) const { return reinterpret_cast<const int32_t*>(file.buffers[op.buffer[n]].data); }

private:
    void hold(int64_t n, int64_t kind, Type type, double count) {
        if (!has(n)) return need(false);
        const FileBuffer& found = file.buffers[op.buffer[n]];
        need(found.kind == kind && found.type == type && static_cast<double>(found.width) >= count);
    }
};

// The rules of a mixing operation, whose own buffers and integers follow the common ones.
class MixRules : public Rules {
public:
    explicit MixRules(const Rules& rules)
        : Rules(rules), H(Rules::integer(0)), K(Rules::integer(1)), V(Rules::integer(2)) {
        need(H >= 1 && K >= 1 && V >= 1);
        inputs(0);
        Rules::scratch(1, H * V);
    }

    const double H, K, V;

    // The projections of a row, with `extra` scalars for each head.
    void inputs(double extra) {
        const double ends[] = {H * K, H * K, H * V, H * extra};
        for (int64_t n = 0; n < 4; n++) Rules::scratch(0, Rules::integer(3 + n) + ends[n]);
    }
    double integer(int64_t n) const { return Rules::integer(7 + n); }
    // An integer that is a divisor, a number of rows, or another number that cannot be 0.
    double positive(int64_t n) {
        need(integer(n) >= 1);
        return std::max(integer(n), 1.0);
    }
    bool has(int64_t n) const { return Rules::has(2 + n); }
    void constant(int64_t n, double count, Type type = Type::FLOAT32) { Rules::constant(2 + n, count, type); }
    void state(int64_t n, double count, Type type = Type::FLOAT32) { Rules::state(2 + n, count, type); }
    void scratch(int64_t n, double count, Type type = Type::FLOAT32) { Rules::scratch(2 + n, count, type); }
    // State `n` holds `count` numbers in the format that integer `format` names.
    void rows(int64_t n, double count, int64_t format) {
        state(n, count, is_bfloat16(static_cast<int64_t>(integer(format))) ? Type::BFLOAT16 : Type::FLOAT32);
    }
    // A cache of keys and values.
    void cache(double capacity, int64_t format) {
        rows(0, H * capacity * K, format);
        rows(1, H * capacity * V, format);
    }
    // The sums of linear attention with C features.
    void sums(double C) {
        state(0, H * C * V);
        state(1, H * C);
    }
};

}  // namespace
