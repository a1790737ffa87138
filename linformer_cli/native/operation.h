// An operation is a struct that declares its arguments by name, in the order of a program:
//
//     struct Fold : Arguments {
//         const int64_t y = buffer(), x = buffer();
//         const int64_t width = integer(), chunks = integer();
//
//         void check(Rules& rules) const;  // what the operation of a file needs from its arguments
//         void run() const;                // computes the rows of a pass
//     };
//     OPERATION("fold", Fold, STATELESS);
//
// native/program.py reads these lines: a model's code gives an operation its arguments by name.
#pragma once

#include <cstdint>
#include <cstring>

#include "program.h"
#include "program_rules.h"

namespace {

// The declared arguments are read from an operation in order.
class Arguments {
public:
    Arguments(const Pass& pass, const Operation& op) : pass(pass), op(op) {}

    const Pass& pass;

    // The rule of the arguments that several operations share.
    void check_shared(Rules&) const {}

protected:
    int64_t buffer() { return op.buffer[buffers++]; }  // its index in the program
    int64_t buffer_or_none() { return buffer(); }      // -1 for none
    int64_t integer() { return op.integer[integers++]; }
    float real() { return static_cast<float>(op.real[reals++]); }
    float real_or_none() { return real(); }  // 0 for none

private:
    const Operation& op;
    int buffers = 0, integers = 0, reals = 0;
};

// A part of a state: a buffer with `width` floats for each head.
struct Part {
    int64_t buffer, width;
};

// The arguments of all mechanisms: the projections of a row, H heads of keys [K] and values [V], and the column at
// which each projection starts.
struct Mix : Arguments {
    const int64_t inputs = buffer(), outputs = buffer();
    const int64_t H = integer(), K = integer(), V = integer();
    const int64_t q_column = integer(), k_column = integer(), v_column = integer(), extra_column = integer();

    const float* q_at(int64_t row, int64_t head) const { return input(row, q_column) + head * K; }
    const float* k_at(int64_t row, int64_t head) const { return input(row, k_column) + head * K; }
    const float* v_at(int64_t row, int64_t head) const { return input(row, v_column) + head * V; }
    // The extra scalars of a head. Each head has `count` of them.
    const float* extra_at(int64_t row, int64_t head, int64_t count) const {
        return input(row, extra_column) + head * count;
    }
    float* y_at(int64_t row, int64_t head) const { return pass.at<float>(outputs, row) + head * V; }

    // The memory of a head in a buffer. Each head has `width` elements there.
    template <class A>
    A* own(int64_t buffer, int64_t row, int64_t head, int64_t width) const {
        return pass.at<A>(buffer, row) + head * width;
    }

    // Calls body(row, head, state) for every head of every row. Rows of one image are processed in order. `body`
    // updates state[n], the memory of part n, which is a copy in TRY. `work` counts the multiply-adds of one call.
    template <int N, class Body>
    void for_heads(const Part (&parts)[N], int64_t work, Body body) const {
        for_groups(H, parts, work, body);
    }

    // Does the same for `groups` groups of heads, for which `parts` has the widths.
    template <int N, class Body>
    void for_groups(int64_t groups, const Part (&parts)[N], int64_t work, Body body) const {
        if (pass.mode == STEP) {
            pass.for_each(pass.rows * groups, pass.rows * groups * work, [&](int64_t index) {
                const int64_t row = index / groups, group = index % groups;
                float* state[N];
                for (int n = 0; n < N; n++) state[n] = own<float>(parts[n].buffer, row, group, parts[n].width);
                body(row, group, state);
            });
            return;
        }
        pass.for_each(groups, pass.rows * groups * work, [&](int64_t group) {
            int64_t total = 0;
            for (const Part& part : parts) total += part.width;
            float *state[N], *next = workspace<Part>(total);
            for (int n = 0; n < N; n++) {
                state[n] = own<float>(parts[n].buffer, 0, group, parts[n].width);
                if (pass.mode == COMMIT) continue;
                std::memcpy(next, state[n], parts[n].width * sizeof(float));
                state[n] = next;
                next += parts[n].width;
            }
            for (int64_t row = 0; row < pass.rows; row++) body(row, group, state);
        });
    }

    void check_shared(Rules& rules) const {
        rules.need(H >= 1 && K >= 1 && V >= 1);
        rules.scratch(inputs, {H, K}, Type::FLOAT32, q_column);
        rules.scratch(inputs, {H, K}, Type::FLOAT32, k_column);
        rules.scratch(inputs, {H, V}, Type::FLOAT32, v_column);
        check_extra(rules, 0);
        rules.scratch(outputs, {H, V});
    }
    // Each head has `count` extra scalars.
    void check_extra(Rules& rules, int64_t count) const {
        rules.scratch(inputs, {H, count}, Type::FLOAT32, extra_column);
    }

private:
    const float* input(int64_t row, int64_t column) const { return pass.at<float>(inputs, row) + column; }
};

// The arguments of a mechanism with a cache of keys [capacity, K] and values [capacity, V] of each head, whose numbers
// have the format `format`.
struct CachedMix : Mix {
    const int64_t keys = buffer(), values = buffer();

    template <class Number>
    Number* cached_keys(int64_t row, int64_t head, int64_t capacity) const {
        return own<Number>(keys, row, head, capacity * K);
    }
    template <class Number>
    Number* cached_values(int64_t row, int64_t head, int64_t capacity) const {
        return own<Number>(values, row, head, capacity * V);
    }

    void check_cache(Rules& rules, int64_t capacity, int64_t format) const {
        rules.state(keys, {H, capacity, K}, type_of(format));
        rules.state(values, {H, capacity, V}, type_of(format));
    }
};

// A multiple of LANES, so that the division into blocks does not change results.
constexpr int64_t COLUMNS = 64;

// Calls body(row, first, width) for blocks of the columns of every row. Rows of one image are processed in order.
// `work` counts the multiply-adds of a row.
template <class Body>
void for_columns(const Pass& pass, int64_t columns, int64_t work, Body body) {
    const int64_t width = pass.together ? COLUMNS : columns, blocks = (columns + width - 1) / width;
    const auto call = [&](int64_t row, int64_t block) {
        const int64_t first = block * width, left = columns - first;
        body(row, first, left < width ? left : width);
    };
    if (pass.mode == STEP)
        pass.for_each(pass.rows * blocks, pass.rows * work, [&](int64_t i) { call(i / blocks, i % blocks); });
    else
        pass.for_each(blocks, pass.rows * work, [&](int64_t block) {
            for (int64_t row = 0; row < pass.rows; row++) call(row, block);
        });
}

// Whether an operation also runs in COMMIT, to update a state.
enum Statefulness { STATELESS, STATEFUL };

struct Entry {
    const char* name;
    Statefulness statefulness;
    void (*run)(const Pass&, const Operation&);
    void (*check)(Rules&, const Operation&);
};

#ifdef __clang__
#pragma clang diagnostic ignored "-Wmissing-braces"  // `Op{...}` has no braces for the bases between Op and Arguments
#endif

template <class Op>
void run_operation(const Pass& pass, const Operation& op) {
    Op{Arguments(pass, op)}.run();
}

// For operations that are checked but do not run.
constexpr LoadedProgram NO_PROGRAM{};
constexpr Pass NO_PASS{NO_PROGRAM, 0, 0, 0, STEP, false};

template <class Op>
void check_operation(Rules& rules, const Operation& op) {
    const Op found{Arguments(NO_PASS, op)};
    found.check_shared(rules);
    if (rules.kept) found.check(rules);
}

// The operations are numbered in the order in which a source file includes them.
template <int NUMBER>
struct Listed;
constexpr int BEFORE_FIRST = __COUNTER__;
#define OPERATION(NAME, STRUCT, STATEFULNESS)                                                             \
    template <>                                                                                           \
    struct Listed<__COUNTER__ - BEFORE_FIRST - 1> {                                                       \
        static constexpr Entry entry{NAME, STATEFULNESS, run_operation<STRUCT>, check_operation<STRUCT>}; \
    }

}  // namespace
