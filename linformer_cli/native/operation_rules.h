// The rule of each operation: what it needs from its buffers and integers, which ops/ explains.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "ops/look_up.h"
#include "ops/project.h"
#include "program_rules.h"

namespace {

void check_embed(Rules& r) {
    const double D = r.integer(0), sources = r.integer(1), levels = r.integer(2);
    r.scratch(0, D);
    r.ring_and_slots(sources);
    r.need(levels >= static_cast<double>(r.file.levels));
    r.constant(3, sources * (levels + 1) * D);
    r.constant(4, r.T * D);
    r.need(r.op.buffer[5] == r.file.label);
    if (r.has(5)) r.constant(6, static_cast<double>(r.file.classes) * D);
}

void check_look_around(Rules& r) {
    r.scratch(0, 2 * r.integer(0));
    r.ring_and_slots(r.integer(0));
}

void check_look_up(Rules& r) {
    double rows = 0;
    for (const int64_t count : TABLE_ROWS) rows += static_cast<double>(count);
    r.scratch(0, TABLES * ROW_WIDTH);
    r.ring_and_slots(NEIGHBOURS);
    r.need(r.integer(1) >= 1);
    r.constant(3, r.integer(1) * rows * ROW_WIDTH);
}

void check_project(Rules& r) {
    const double columns = r.integer(0), rows = std::ceil(r.integer(1) / LINTX_TILE_ROWS) * LINTX_TILE_ROWS;
    const int64_t format = r.op.integer[3];
    r.need(columns >= 1 && rows >= 1 && format <= INT8);
    r.row(0, columns);
    r.scratch(1, rows);
    r.constant(3, rows);
    const double per_word = format == INT8 ? 4 : format == BFLOAT16 ? 2 : 1, depth = std::ceil(columns / per_word);
    r.constant(2, rows * (depth + (format == INT8 ? Int8::TAIL : 0)), Type::INT32);
    if (format == BFLOAT16) r.scratch(4, 2 * depth, Type::BFLOAT16);
    if (format == INT8) r.scratch(4, 2 * depth + 1, Type::INT32);
}

void check_join(Rules& r) {
    r.scratch(0, r.integer(0));
    if (r.has(1)) r.scratch(1, r.integer(0));
    r.scratch(2, r.integer(0));
    r.constant(3, r.integer(0));
    r.constant(4, r.integer(0));
}

void check_add(Rules& r) {
    r.scratch(0, r.integer(0));
    r.scratch(1, r.integer(0));
}

void check_gate(Rules& r) {
    r.scratch(0, r.integer(0));
    r.scratch(1, r.integer(0) + r.integer(1));
}

void check_copy(Rules& r) {
    r.scratch(0, r.integer(0) + r.integer(1));
    r.scratch(1, r.integer(0));
}

void check_fold(Rules& r) {
    r.need(r.integer(1) >= 1);
    r.scratch(0, r.integer(0));
    r.scratch(1, r.integer(0) * r.integer(1));
}

void check_normalise(Rules& r) {
    const double columns = r.integer(0) * r.integer(1);
    r.scratch(0, columns);
    if (r.has(1)) r.constant(1, columns);
}

void check_short_convolution(Rules& r) {
    const double kernel = r.integer(0), columns = r.integer(1);
    r.need(kernel >= 2);
    for (int64_t n = 0; n < 2; n++) r.scratch(n, columns + r.integer(2));
    r.state(2, (kernel - 1) * columns);
    r.constant(3, kernel * columns);
}

void check_lstm(Rules& r) {
    for (int64_t n = 0; n < 2; n++) r.scratch(n, 4 * r.integer(0));
    for (int64_t n = 2; n < 4; n++) r.state(n, r.integer(0));
}

void check_norm_heads(MixRules& m) {
    m.need(m.integer(0) >= std::max(m.K, m.V));
    m.Rules::scratch(1, m.H * (2 * m.K + m.V));
    for (int64_t n = 0; n < 2; n++) m.constant(n, m.H * m.integer(0));
}

void check_compress(MixRules& m) {
    const double capacity = m.integer(0), chunk = m.positive(2), rank = m.integer(3), widest = m.integer(4);
    m.inputs(rank);
    m.need(widest >= std::max(m.K, m.V) && capacity >= m.integer(1) + std::floor(m.T / chunk) * rank);
    m.cache(capacity, 5);
    m.state(2, m.H * rank);
    m.state(3, m.H * rank * (1 + m.K + m.V));
    for (int64_t n = 4; n < 6; n++) m.constant(n, m.H * widest);
}

void check_convolution(MixRules& m) {
    m.need(m.integer(0) >= 2);
    m.state(0, m.H * (m.integer(0) - 1) * m.V);
    m.constant(1, m.H * m.integer(0));
}

void check_deltanet(MixRules& m) {
    const double writes = m.integer(1), decays = m.has(1) ? m.integer(2) ? m.K : 1 : 0;
    m.need(writes == 1 || writes == m.V || (writes == 0 && !m.integer(0)));
    m.inputs((m.integer(0) ? m.K : 1) + writes + decays);
    m.state(0, m.H * m.K * m.V);
    if (m.has(1)) m.constant(1, m.H * decays);
}

void check_flash(MixRules& m) {
    const double chunk = m.positive(0);
    m.need(m.H == 1);
    m.cache(chunk, 1);
    m.state(2, m.K * m.V);
    m.constant(3, 8 * m.K);
    m.constant(4, chunk);
    m.scratch(5, chunk);
    m.scratch(6, m.K);
}

void check_gau(MixRules& m) {
    const double capacity = m.integer(0);
    m.need(m.H == 1 && capacity >= m.T);
    m.cache(capacity, 2);
    m.constant(2, 4 * m.K);
    m.constant(3, capacity);
    m.scratch(4, m.K);
    m.scratch(5, capacity);
}

void check_gla(MixRules& m) {
    const double gates = m.integer(0);
    m.need(gates == 1 || gates == m.K);
    m.inputs(gates + (m.integer(1) ? m.V : 0));
    m.state(0, m.H * m.K * m.V);
    m.constant(1, m.H * gates);
}

void check_linear(MixRules& m) {
    const double C = m.integer(0), map = m.integer(1), pairs = m.K * (m.K + 1) / 2;
    m.sums(C);
    if (map == LINTX_MAP_LEARNED) {
        const double matrices = m.integer(2) ? m.H : 1;
        m.constant(2, matrices * m.K * C);
        m.constant(3, matrices * C);
    } else {
        const bool plain = map == LINTX_MAP_ELU || map == LINTX_MAP_RELU;
        m.need(C == (plain ? m.K : map == LINTX_MAP_TAYLOR2 ? 1 + m.K + pairs : pairs));
    }
}

void check_linformer(MixRules& m) {
    const double capacity = m.integer(0), rank = m.integer(1), block = m.positive(2);
    const double blocks = std::floor(m.T / block), rest = m.T - blocks * block;
    // The exact positions of a block are in the cache before their projection replaces them.
    if (blocks) m.need(capacity >= (blocks - 1) * rank + std::max(block, rank));
    m.need(capacity >= blocks * rank + rest);
    m.cache(capacity, 4);
    for (int64_t n = 2; n < 4; n++) m.constant(n, (m.integer(3) > 1 ? m.H : 1) * rank * block);
}

void check_log_linear(MixRules& m) {
    const double over = m.integer(0), buckets = m.integer(1);
    m.need(over <= 2 && buckets < 63 && std::exp2(buckets) > m.T);
    m.inputs(over + m.positive(2));
    m.state(0, m.H * buckets * m.K * m.V);
    if (over <= 1) m.state(1, m.H * buckets * (over == 0 ? m.K : 1));
    if (over >= 1) m.constant(2, m.H);
    if (over == 1) m.constant(3, m.H);
}

void check_lsh(MixRules& m) {
    const double capacity = m.integer(0), rounds = m.positive(1), buckets = m.positive(2), window = m.positive(3);
    const double half = std::floor(buckets / 2);
    m.need(capacity >= m.T && half >= 1);
    m.cache(capacity, 4);
    m.state(2, m.H * rounds * buckets * window, Type::INT32);
    m.need(m.kept && m.file.buffers[m.op.buffer[4]].initial == -1);
    m.constant(3, m.H * m.K * rounds * half);
    m.scratch(4, m.H * rounds * half, Type::FLOAT64);
    m.scratch(5, m.H * capacity, Type::INT32);
}

void check_mamba(MixRules& m) {
    const double angles = m.integer(0), trapezoidal = m.integer(1) ? 1 : 0;
    m.need(2 * angles <= m.K);
    m.inputs(1 + (m.integer(2) ? 1 : 0) + trapezoidal + angles);
    m.state(0, m.H * m.K * m.V);
    if (angles) m.state(1, m.H * angles);
    const double widths[] = {m.K, m.V, 1};
    for (int64_t n = 0; trapezoidal && n < 3; n++) m.state(2 + n, m.H * widths[n]);
    m.constant(5, m.H * 3);
    if (m.has(6)) m.constant(6, m.H * 4 * m.K);
}

void check_mlstm(MixRules& m) {
    m.inputs(2);
    m.sums(m.K);
    m.state(2, m.H);
    m.constant(3, m.H);
}

void check_nystrom(MixRules& m) {
    const double landmarks = m.positive(0);
    m.state(0, m.H * landmarks * m.V);
    for (int64_t n = 1; n < 3; n++) m.state(n, m.H * landmarks);
    for (int64_t n = 3; n < 5; n++) m.constant(n, m.H * m.K * landmarks);
    m.constant(5, m.H * landmarks * landmarks);
}

void check_performer(MixRules& m) {
    const double C = m.positive(0), D = m.integer(1);
    m.need(D <= C && C <= 2 * D);
    m.sums(C);
    m.state(2, m.H * C);
    m.constant(3, m.K * D);
}

void check_performer_trig(MixRules& m) {
    const double C = m.positive(0), half = std::floor(C / 2);
    m.need(C == 2 * half);
    m.sums(C);
    for (int64_t n = 2; n < 4; n++) m.state(n, m.H);
    m.constant(4, m.K * half);
}

void check_probsparse(MixRules& m) {
    const double capacity = m.integer(0), block = m.positive(1), samples = m.integer(3);
    const double listed = std::ceil(m.T / block) * samples;
    m.need(capacity >= m.T && m.positive(2) <= block);
    m.cache(capacity, 4);
    m.state(2, m.H * m.V);
    m.state(3, m.H * block);
    m.state(4, m.H);
    m.constant(5, listed, Type::INT32);
    // Only sampled positions before the query's are read.
    for (int64_t n = 0; m.kept && n < listed; n++) m.need(m.shared(7)[n] >= 0);
}

void check_rfa(MixRules& m) {
    const double C = m.positive(0), half = std::floor(C / 2);
    m.need(C == 2 * half);
    m.inputs(m.integer(1) ? 1 : 0);
    m.sums(C);
    m.state(2, m.H);
    m.constant(3, m.H * m.K);
    m.constant(4, m.K * half);
}

void check_retention(MixRules& m) {
    const double factors = m.positive(0), row = m.positive(1);
    m.inputs(m.integer(2) ? m.V : 0);
    m.state(0, m.H * factors * m.K * m.V);
    m.constant(1, m.H);
    m.constant(2, row * factors);
}

void check_rows(MixRules& m) {
    const double capacity = m.integer(0), fixed = m.integer(1), ring = m.integer(2), tables = m.integer(3);
    const double spans = m.integer(4);
    m.need(m.T <= fixed ? capacity >= m.T : ring >= 1 && capacity >= fixed + std::min(ring, m.T));
    m.cache(capacity, 5);
    if (!tables) return m.need(capacity >= m.T && spans == 0);
    const double listed = m.T * (tables > 1 ? std::max(tables, m.H) : 1) * spans;
    m.constant(2, 3 * listed, Type::INT32);
    for (int64_t n = 0; m.kept && n < listed; n++) {
        const int32_t* span = m.shared(4) + 3 * n;  // first, step, count
        const int64_t last = span[0] + static_cast<int64_t>(span[2] - 1) * span[1];
        const auto inside = [&](int64_t row) { return 0 <= row && static_cast<double>(row) < capacity; };
        m.need(span[2] == 0 || (span[2] > 0 && inside(span[0]) && inside(last)));
    }
}

void check_rwkv7(MixRules& m) {
    m.inputs(2 * m.K);
    m.state(0, m.H * m.K * m.V);
    m.constant(1, m.H * 5 * m.K);
}

void check_single_head(MixRules& m) {
    const double capacity = m.integer(0);
    m.need(m.H == 1 && m.K == m.V && capacity >= m.T);
    m.rows(0, capacity * m.K, 1);
    for (int64_t n = 1; n < 4; n++) m.constant(n, m.K);
}

template <void CHECK(MixRules&)>
void check_mix(Rules& rules) {
    MixRules mix(rules);
    CHECK(mix);
    rules.need(mix.kept);
}

const struct {
    const char* name;
    void (*check)(Rules&);
} RULES[] = {
    {"embed", check_embed},
    {"look_around", check_look_around},
    {"look_up", check_look_up},
    {"project", check_project},
    {"join", check_join},
    {"add", check_add},
    {"gate", check_gate},
    {"copy", check_copy},
    {"fold", check_fold},
    {"normalise", check_normalise},
    {"short_convolution", check_short_convolution},
    {"lstm", check_lstm},
    {"mix.compress", check_mix<check_compress>},
    {"mix.convolution", check_mix<check_convolution>},
    {"mix.deltanet", check_mix<check_deltanet>},
    {"mix.flash", check_mix<check_flash>},
    {"mix.gau", check_mix<check_gau>},
    {"mix.gla", check_mix<check_gla>},
    {"mix.linear", check_mix<check_linear>},
    {"mix.linformer", check_mix<check_linformer>},
    {"mix.log_linear", check_mix<check_log_linear>},
    {"mix.lsh", check_mix<check_lsh>},
    {"mix.mamba", check_mix<check_mamba>},
    {"mix.mlstm", check_mix<check_mlstm>},
    {"mix.norm_heads", check_mix<check_norm_heads>},
    {"mix.nystrom", check_mix<check_nystrom>},
    {"mix.performer", check_mix<check_performer>},
    {"mix.performer_trig", check_mix<check_performer_trig>},
    {"mix.probsparse", check_mix<check_probsparse>},
    {"mix.retention", check_mix<check_retention>},
    {"mix.rfa", check_mix<check_rfa>},
    {"mix.rows", check_mix<check_rows>},
    {"mix.rwkv7", check_mix<check_rwkv7>},
    {"mix.single_head", check_mix<check_single_head>},
};

// Whether a buffer has this kind and type and at least `width` numbers.
inline bool fits(const FileProgram& file, int64_t index, Kind kind, Type type, int64_t width) {
    if (index < 0 || index >= static_cast<int64_t>(file.buffers.size())) return false;
    const FileBuffer& found = file.buffers[index];
    return found.kind == kind && found.type == type && found.width >= width;
}

// Checks a file that `read_program` accepted. Returns a message if a buffer or an operation is not valid, else an empty
// string.
inline std::string check_program(const FileProgram& file) {
    const int64_t parameters = file.head.mixtures ? 3 * file.head.mixtures : file.levels;
    bool named = fits(file, file.output, SCRATCH, Type::FLOAT32, parameters);
    named = named && fits(file, file.recent, STATE, Type::INT16, 1) && file.buffers[file.recent].initial == 0;
    named = named && (file.classes ? fits(file, file.label, STATE, Type::INT64, 1) : file.label == -1);
    for (const std::vector<int64_t>& layer : file.states)
        for (const int64_t index : layer)
            named = named && index < static_cast<int64_t>(file.buffers.size()) && file.buffers[index].kind == STATE;
    if (!named) return "the file is damaged: its buffers are not valid";
    for (const FileOperation& operation : file.operations) {
        const auto rule = std::find_if(std::begin(RULES), std::end(RULES),
                                       [&](const auto& each) { return operation.name == each.name; });
        if (rule == std::end(RULES)) return "the file has the unknown operation '" + operation.name + "'";
        if (ONLY_INT8 && operation.name == "project" && operation.arguments.integer[3] != INT8)
            return "the file has products of floats, and this engine has products in int8 only";
        Rules rules(file, operation.arguments);
        rules.distinct(operation.name == "join");
        rule->check(rules);
        if (!rules.kept) return "the file is damaged: an operation '" + operation.name + "' leaves its buffers";
    }
    return "";
}

}  // namespace
