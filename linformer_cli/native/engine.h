// Runs the program of a recurrent step (program.h) on the CPU.
#pragma once

#include <cstdint>

#include "operations.h"
#include "program.h"

namespace {

// With at most this many images per thread, all threads share every operation, because a thread with only a few images
// would read all weights to do little work.
constexpr int64_t FEW = 2;

// Runs the operations from `first` up to `end`.
void run(const Pass& pass, int64_t first, int64_t end) {
    for (int64_t index = first; index < end; index++) {
        const Operation& op = pass.program.operations[index];
        const Entry& entry = ENTRIES[op.code];
        if (pass.mode != COMMIT || entry.statefulness == STATEFUL) entry.run(pass, op);
    }
}

void run(const Pass& pass) {
    const LoadedProgram& program = pass.program;
    if (program.blocks && pass.position % program.stride == 0) {
        Pass unit = pass;
        unit.position /= program.stride;
        run(unit, 0, program.blocks);
    }
    run(pass, program.blocks, program.count);
}

// A few images form one pass, and all threads share each operation. Many images are divided: each thread takes its own
// images through the whole program without waiting, so its intermediate results stay in its own cache.
void step(const LoadedProgram& program, int64_t position) {
    if (program.threads == 1 || program.batch <= FEW * program.threads)
        return run(Pass{program, position, 0, program.batch, STEP, true});
    const int64_t share = (program.batch + program.threads - 1) / program.threads;
    spread(program.threads, program.threads, [&](int64_t thread) {
        const int64_t first = thread * share, left = program.batch - first, rows = left < share ? left : share;
        if (rows > 0) run(Pass{program, position, first, rows, STEP, false});
    });
}

}  // namespace
