// The operations of programs, and the check of a program file.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "operation.h"
#include "ops/convolution.h"
#include "ops/deltanet.h"
#include "ops/flash.h"
#include "ops/gau.h"
#include "ops/gla.h"
#include "ops/join.h"
#include "ops/linear.h"
#include "ops/linformer.h"
#include "ops/log_linear.h"
#include "ops/long_short.h"
#include "ops/look_up.h"
#include "ops/lsh.h"
#include "ops/lstm.h"
#include "ops/mamba.h"
#include "ops/mesa.h"
#include "ops/mlstm.h"
#include "ops/nystrom.h"
#include "ops/performer.h"
#include "ops/probsparse.h"
#include "ops/project.h"
#include "ops/retention.h"
#include "ops/rfa.h"
#include "ops/rwkv7.h"
#include "ops/short_convolution.h"
#include "ops/single_head.h"
#include "ops/softmax.h"

namespace {

template <int... NUMBER>
constexpr std::array<Entry, sizeof...(NUMBER)> list_entries(std::integer_sequence<int, NUMBER...>) {
    return {Listed<NUMBER>::entry...};
}

constexpr auto ENTRIES = list_entries(std::make_integer_sequence<int, __COUNTER__ - BEFORE_FIRST - 1>());

// The code of the operation `name`, or -1 if there is none.
inline int64_t find_operation(const char* name) {
    for (size_t code = 0; code < ENTRIES.size(); code++)
        if (!std::strcmp(ENTRIES[code].name, name)) return static_cast<int64_t>(code);
    return -1;
}

// Whether a buffer has this kind and type and at least `width` numbers.
inline bool fits(const FileProgram& file, int64_t index, Kind kind, Type type, int64_t width) {
    if (index < 0 || index >= static_cast<int64_t>(file.buffers.size())) return false;
    const FileBuffer& found = file.buffers[index];
    return found.kind == kind && found.type == type && found.width >= width;
}

// No buffer that an operation may write to appears twice; in a `join`, x may also be the output.
inline bool are_distinct(const FileProgram& file, const Operation& op, bool join) {
    for (int64_t a = 0; a < BUFFERS; a++)
        for (int64_t b = a + 1; b < BUFFERS; b++)
            if (op.buffer[a] >= 0 && op.buffer[a] == op.buffer[b] && file.buffers[op.buffer[a]].kind != SHARED &&
                !(join && a == 0 && b == 2))
                return false;
    return true;
}

// Checks a file that `read_program` accepted, and finds the codes of its operations. Returns a message if a buffer or
// an operation is not valid, else an empty text.
inline Text check_program(FileProgram& file) {
    bool named = fits(file, file.output, SCRATCH, Type::FLOAT32, file.distribution.parameters());
    named = named && fits(file, file.recent, STATE, Type::INT16, 1) && file.buffers[file.recent].initial == 0;
    named = named && (file.classes ? fits(file, file.label, STATE, Type::INT64, 1) : file.label == -1);
    for (const std::vector<int64_t>& layer : file.states)
        for (const int64_t index : layer)
            named = named && index < static_cast<int64_t>(file.buffers.size()) && file.buffers[index].kind == STATE;
    if (!named) return "the file is damaged: its buffers are not valid";
    for (int64_t n = 0; n < static_cast<int64_t>(file.operations.size()); n++) {
        FileOperation& operation = file.operations[n];
        const int64_t code = operation.arguments.code = find_operation(operation.name.letters());
        if (code < 0) return Text("the file has the unknown operation '") << operation.name << "'";
        if (ONLY_INT8 && operation.name == "project" && operation.arguments.integer[3] < INT8)
            return "the file has products of floats, and this engine has products in int8 only";
        Rules rules(file, n < file.blocks ? file.values() / file.channels : file.values());
        rules.need(are_distinct(file, operation.arguments, operation.name == "join"));
        ENTRIES[code].check(rules, operation.arguments);
        if (!rules.kept) return Text("the file is damaged: an operation '") << operation.name << "' leaves its buffers";
    }
    return "";
}

}  // namespace
