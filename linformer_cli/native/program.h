// A recurrent step as data: buffers, and operations on them. model/compile_step.py builds it, and runner.cpp gives it
// memory.
#pragma once

#include <cstdint>
#include <cstring>

#include "ops/parts/lanes.h"
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
    int64_t buffer[BUFFERS];  // indices, -1 for none
    int64_t integer[INTEGERS];
    double real[REALS];
};

// A program with memory for a batch of images.
struct LoadedProgram {
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
    const LoadedProgram& program;
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

}  // namespace
