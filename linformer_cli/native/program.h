// A recurrent step as data: buffers, and operations on them. model/program.py builds it, and runner.cpp gives it
// memory.
#pragma once

#include <cstdint>
#include <cstring>

#include "ops/lanes.h"
#include "threads.h"

namespace {  // local to the library that includes it: the compiler may inline all of it

// SHARED: constants and tables of all images. STATE: the state of each image. SCRATCH: memory for each row of a pass.
enum Kind { SHARED, STATE, SCRATCH };

struct Buffer {
    char* data;
    int64_t stride;  // bytes from one image or row to the next
    int64_t kind;
};

struct Operation {
    int64_t code;
    int64_t buffer[LINTX_BUFFERS];  // indices, -1 for none
    int64_t integer[LINTX_INTEGERS];
    double real[LINTX_REALS];
};

struct Program {
    int64_t batch;
    int64_t window;  // the largest number of positions of a single image in one pass
    int64_t threads;
    int64_t stride;  // positions from one step of the blocks to the next
    int64_t blocks;  // how many operations, from the first, run only then, with position / stride as their position
    int64_t count;
    const Buffer* buffers;
    const Operation* operations;
};

// STEP computes one position of several images. TRY computes successive positions of one image without changing its
// state. COMMIT repeats the first of these positions and changes the state.
enum Mode { STEP, TRY, COMMIT };

// Rows `first` .. `first + rows - 1` of scratch memory, for one pass through a program. In STEP, they are images, and
// the same rows of the state; else they are positions of the image `image`.
struct Pass {
    const Program& program;
    int64_t position, first, rows;
    Mode mode;
    bool together;  // all threads work on these rows
    int64_t image = 0;

    int64_t position_of(int64_t row) const { return mode == STEP ? position : position + row; }

    // The memory of a row in a buffer, or the whole buffer if it is shared.
    template <class A>
    A* at(int64_t buffer, int64_t row) const {
        const Buffer& found = program.buffers[buffer];
        const int64_t place = found.kind == SHARED ? 0 : found.kind == STATE && mode != STEP ? image : first + row;
        return reinterpret_cast<A*>(found.data + place * found.stride);
    }

    // The number of elements of type `A` from one row of a buffer to the next.
    template <class A>
    int64_t stride(int64_t buffer) const {
        return program.buffers[buffer].stride / static_cast<int64_t>(sizeof(A));
    }

    // Calls `body` for every index below `count`. All threads share the calls if `work`, in multiply-adds, is large
    // enough.
    template <class Body>
    void for_each(int64_t count, int64_t work, Body body) const {
        spread(together && work > 32768 ? program.threads : 1, count, body);
    }
};

// The arguments that all mixing operations share: the projections of a row, and the sizes, which are the first
// integers.
struct Mix {
    const Pass& pass;
    const Operation& op;
    const int64_t heads = op.integer[0], key_width = op.integer[1], value_width = op.integer[2];

    const float* query(int64_t row, int64_t head) const { return part(row, 3) + head * key_width; }
    const float* key(int64_t row, int64_t head) const { return part(row, 4) + head * key_width; }
    const float* value(int64_t row, int64_t head) const { return part(row, 5) + head * value_width; }
    // The extra scalars of a head. Each head has `count` of them.
    const float* extra(int64_t row, int64_t head, int64_t count) const { return part(row, 6) + head * count; }
    float* output(int64_t row, int64_t head) const { return pass.at<float>(op.buffer[1], row) + head * value_width; }

    // The mechanism's own buffers and integers, which follow the common ones.
    int64_t buffer(int64_t index) const { return op.buffer[2 + index]; }
    int64_t integer(int64_t index) const { return op.integer[7 + index]; }

    // The memory of a head in one of the mechanism's buffers. Each head has `width` elements there.
    template <class A>
    A* own(int64_t index, int64_t row, int64_t head, int64_t width) const {
        return pass.at<A>(buffer(index), row) + head * width;
    }

private:
    const float* part(int64_t row, int64_t offset) const {
        return pass.at<float>(op.buffer[0], row) + op.integer[offset];
    }
};

// An operation whose integer number FORMAT is the format of its cache: NARROW for bfloat16, otherwise WIDE.
template <void NARROW(const Pass&, const Operation&), void WIDE(const Pass&, const Operation&), int64_t FORMAT>
void in_format(const Pass& pass, const Operation& op) {
    is_bfloat16(Mix{pass, op}.integer(FORMAT)) ? NARROW(pass, op) : WIDE(pass, op);
}

// A part of a state: the mechanism's own buffer number `index`, with `width` floats for each head.
struct Part {
    int64_t index, width;
};

// Calls body(row, head, state) for every head of every row. Rows of one image are processed in order. `body` updates
// state[n], the memory of part n, which is a copy in TRY. `work` counts the multiply-adds of one call.
template <int N, class Body>
void for_heads(const Mix& mix, const Part (&parts)[N], int64_t work, Body body) {
    const Pass& pass = mix.pass;
    if (pass.mode == STEP) {
        pass.for_each(pass.rows * mix.heads, pass.rows * mix.heads * work, [&](int64_t index) {
            const int64_t row = index / mix.heads, head = index % mix.heads;
            float* state[N];
            for (int n = 0; n < N; n++) state[n] = mix.own<float>(parts[n].index, row, head, parts[n].width);
            body(row, head, state);
        });
        return;
    }
    pass.for_each(mix.heads, pass.rows * mix.heads * work, [&](int64_t head) {
        int64_t total = 0;
        for (const Part& part : parts) total += part.width;
        float *state[N], *next = workspace<Part>(total);
        for (int n = 0; n < N; n++) {
            state[n] = mix.own<float>(parts[n].index, 0, head, parts[n].width);
            if (pass.mode == COMMIT) continue;
            std::memcpy(next, state[n], parts[n].width * sizeof(float));
            state[n] = next;
            next += parts[n].width;
        }
        for (int64_t row = 0; row < pass.rows; row++) body(row, head, state);
    });
}

// A multiple of LANES, so that the division into blocks does not change results.
constexpr int64_t BLOCK = 64;

// Calls body(row, first, width) for blocks of the columns of every row. Rows of one image are processed in order.
// `work` counts the multiply-adds of a row.
template <class Body>
void for_columns(const Pass& pass, int64_t columns, int64_t work, Body body) {
    const int64_t width = pass.together ? BLOCK : columns, blocks = (columns + width - 1) / width;
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

}  // namespace
