// The operations of programs, and the check of a program file.
#pragma once

#include <cstdint>
#include <cstring>

#include "operation_rules.h"
#include "ops/join.h"
#include "ops/look_up.h"
#include "ops/lstm.h"
#include "ops/mix_compress.h"
#include "ops/mix_convolution.h"
#include "ops/mix_deltanet.h"
#include "ops/mix_flash.h"
#include "ops/mix_gau.h"
#include "ops/mix_gla.h"
#include "ops/mix_linear.h"
#include "ops/mix_linformer.h"
#include "ops/mix_log_linear.h"
#include "ops/mix_lsh.h"
#include "ops/mix_mamba.h"
#include "ops/mix_mesa.h"
#include "ops/mix_mlstm.h"
#include "ops/mix_nystrom.h"
#include "ops/mix_performer.h"
#include "ops/mix_probsparse.h"
#include "ops/mix_retention.h"
#include "ops/mix_rows.h"
#include "ops/mix_rwkv7.h"
#include "ops/mix_sines.h"
#include "ops/mix_single_head.h"
#include "ops/normalise.h"
#include "ops/project.h"
#include "ops/short_convolution.h"

namespace {

struct Entry {
    const char* name;
    void (*run)(const Pass&, const Operation&);
    bool commits;           // whether it also runs in COMMIT, to update a state
    void (*check)(Rules&);  // the rule of a program file
};

const Entry ENTRIES[] = {
    {"embed", embed, false, check_embed},
    {"look_around", look_around, false, check_look_around},
    {"take_differences", take_differences, false, check_take_differences},
    {"add_predictions", add_predictions, false, check_add_predictions},
    {"look_up", look_up, false, check_look_up},
    {"project", project, false, check_project},
    {"join", join, false, check_join},
    {"add", add, false, check_add},
    {"gate", gate, false, check_gate},
    {"copy", copy, false, check_copy},
    {"fold", fold, false, check_fold},
    {"normalise", normalise, false, check_normalise},
    {"short_convolution", short_convolution, true, check_short_convolution},
    {"lstm", lstm, true, check_lstm},
    {"mix.compress", in_format<mix_compress<bfloat16>, mix_compress<float>, 5>, true, check_mix<check_compress>},
    {"mix.convolution", mix_convolution, true, check_mix<check_convolution>},
    {"mix.deltanet", mix_deltanet, true, check_mix<check_deltanet>},
    {"mix.flash", in_format<mix_flash<bfloat16>, mix_flash<float>, 1>, true, check_mix<check_flash>},
    {"mix.gau", in_format<mix_gau<bfloat16>, mix_gau<float>, 2>, false, check_mix<check_gau>},
    {"mix.gla", mix_gla, true, check_mix<check_gla>},
    {"mix.linear", mix_linear, true, check_mix<check_linear>},
    {"mix.linformer", in_format<mix_linformer<bfloat16>, mix_linformer<float>, 4>, true, check_mix<check_linformer>},
    {"mix.log_linear", mix_log_linear, true, check_mix<check_log_linear>},
    {"mix.lsh", in_format<mix_lsh<bfloat16>, mix_lsh<float>, 4>, true, check_mix<check_lsh>},
    {"mix.mamba", mix_mamba, true, check_mix<check_mamba>},
    {"mix.mesa", mix_mesa, true, check_mix<check_mesa>},
    {"mix.mlstm", mix_mlstm, true, check_mix<check_mlstm>},
    {"mix.norm_heads", mix_norm_heads, false, check_mix<check_norm_heads>},
    {"mix.nystrom", mix_nystrom, true, check_mix<check_nystrom>},
    {"mix.performer", mix_performer, true, check_mix<check_performer>},
    {"mix.performer_trig", mix_performer_trig, true, check_mix<check_performer_trig>},
    {"mix.probsparse", in_format<mix_probsparse<bfloat16>, mix_probsparse<float>, 4>, true,
     check_mix<check_probsparse>},
    {"mix.retention", mix_retention, true, check_mix<check_retention>},
    {"mix.rfa", mix_rfa, true, check_mix<check_rfa>},
    {"mix.rows", in_format<mix_rows<bfloat16>, mix_rows<float>, 5>, true, check_mix<check_rows>},
    {"mix.rwkv7", mix_rwkv7, true, check_mix<check_rwkv7>},
    {"mix.single_head", in_format<mix_single_head<bfloat16>, mix_single_head<float>, 1>, false,
     check_mix<check_single_head>},
};

// The code of the operation `name`, or -1 if there is none.
inline int64_t find_operation(const char* name) {
    for (size_t code = 0; code < sizeof ENTRIES / sizeof *ENTRIES; code++)
        if (!std::strcmp(ENTRIES[code].name, name)) return static_cast<int64_t>(code);
    return -1;
}

// Whether a buffer has this kind and type and at least `width` numbers.
inline bool fits(const FileProgram& file, int64_t index, Kind kind, Type type, int64_t width) {
    if (index < 0 || index >= static_cast<int64_t>(file.buffers.size())) return false;
    const FileBuffer& found = file.buffers[index];
    return found.kind == kind && found.type == type && found.width >= width;
}

// Checks a file that `read_program` accepted, and finds the codes of its operations. Returns a message if a buffer or
// an operation is not valid, else an empty text.
inline Text check_program(FileProgram& file) {
    bool named = fits(file, file.output, SCRATCH, Type::FLOAT32, file.head.parameters());
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
        Rules rules(file, operation.arguments, n < file.blocks ? file.values() / file.channels : file.values());
        rules.distinct(operation.name == "join");
        ENTRIES[code].check(rules);
        if (!rules.kept) return Text("the file is damaged: an operation '") << operation.name << "' leaves its buffers";
    }
    return "";
}

}  // namespace
