// Checks that an operation of a program file does not leave its buffers. Each operation of ops/ has its own rule.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "program_file.h"

namespace {

// The sizes of the axes of a buffer.
typedef std::initializer_list<int64_t> Shape;

// The type of the numbers in a cache of this format.
inline Type type_of(int64_t format) { return is_bfloat16(format) ? Type::BFLOAT16 : Type::FLOAT32; }

// Integers of a file are at most 2^31, so a sum of products of two of them does not overflow an int64. Products of more
// are formed as doubles, from a shape. Sizes below 2^53 are exact; larger ones need not be, because no buffer is so
// large.
class Rules {
public:
    Rules(const FileProgram& file, int64_t positions) : file(file), T(positions) {}

    const FileProgram& file;
    const int64_t T;  // positions of an image, as this operation counts them
    bool kept = true;

    // Whether all conditions so far are true.
    bool need(bool condition) { return kept = kept && condition; }

    // The buffer must be of this kind and hold numbers of this type in this shape, from number `first` on.
    void constant(int64_t buffer, Shape shape, Type type = Type::FLOAT32) { hold(buffer, SHARED, type, shape, 0); }
    void state(int64_t buffer, Shape shape, Type type = Type::FLOAT32) { hold(buffer, STATE, type, shape, 0); }
    void scratch(int64_t buffer, Shape shape, Type type = Type::FLOAT32, int64_t first = 0) {
        hold(buffer, SCRATCH, type, shape, first);
    }

    // The buffer holds `count` floats for each row of a pass. A state holds them only if a row is an image.
    void row(int64_t buffer, int64_t count) {
        const bool image = file.window == 1 && buffer >= 0 && file.buffers[buffer].kind == STATE;
        image ? state(buffer, {count}) : scratch(buffer, {count});
    }

    // The numbers of a shared buffer of int32.
    const int32_t* integers(int64_t buffer) const {
        return reinterpret_cast<const int32_t*>(file.buffers[buffer].data);
    }

private:
    void hold(int64_t buffer, int64_t kind, Type type, Shape shape, int64_t first) {
        if (!need(buffer >= 0)) return;
        const FileBuffer& found = file.buffers[buffer];
        double count = 1;
        for (const int64_t size : shape) count *= static_cast<double>(size);
        need(found.kind == kind && found.type == type &&
             static_cast<double>(found.width) >= static_cast<double>(first) + count);
    }
};

}  // namespace
