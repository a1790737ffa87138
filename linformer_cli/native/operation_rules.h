// The rule of each operation: what it needs from its buffers and integers, which ops/ explains. mix_rules.h has the
// rules of mechanisms.
#pragma once

#include <cmath>
#include <cstdint>

#include "mix_rules.h"
#include "ops/look_up.h"
#include "ops/project.h"
#include "program_rules.h"

namespace {

void check_embed(Rules& r) {
    const double D = r.integer(0), sources = r.integer(1), levels = r.integer(2), period = r.integer(3);
    r.scratch(0, D);
    r.ring_and_slots(sources, period > 0 ? sources + period : r.T);
    r.need(levels >= static_cast<double>(r.file.levels));
    r.constant(3, sources * (levels + 1) * D);
    if (r.has(4)) r.constant(4, r.T * D);
    r.need(!r.has(5) || r.op.buffer[5] == r.file.label);
    if (r.has(5)) r.constant(6, static_cast<double>(r.file.classes + r.file.is_class_optional()) * D);
}

void check_look_around(Rules& r) {
    r.scratch(0, 2 * r.integer(0));
    r.ring_and_slots(r.integer(0), r.T);
}

// Checks the integers of `Differences`, the ring and the slots.
void check_differences(Rules& r) {
    const double values = r.integer(0), channels = r.integer(2), own = r.integer(3);
    r.need(r.integer(1) >= 2 && channels >= 1 && own < channels);
    for (int64_t n = 4; n < 6; n++) r.need(own + (r.integer(n) + 1) * channels <= values);
    r.ring_and_slots(values, r.T);
}

void check_take_differences(Rules& r) {
    check_differences(r);
    r.scratch(0, r.integer(0) + r.integer(2));
}

void check_add_predictions(Rules& r) {
    check_differences(r);
    r.need(r.integer(3) + 1 == r.integer(2));
    r.scratch(0, 2 * r.integer(6));
}

void check_look_up(Rules& r) {
    double rows = 0;
    for (const int64_t count : TABLE_ROWS) rows += static_cast<double>(count);
    r.scratch(0, TABLES * ROW_WIDTH);
    r.ring_and_slots(NEIGHBOURS, r.T);
    r.need(r.integer(1) >= 1);
    r.constant(3, r.integer(1) * rows * ROW_WIDTH);
}

void check_project(Rules& r) {
    const double columns = r.integer(0), rows = std::ceil(r.integer(1) / LINTX_TILE_ROWS) * LINTX_TILE_ROWS;
    const int64_t format = r.op.integer[3];
    r.need(columns >= 1 && rows >= 1 && format <= EXACT);
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
    r.row(1, r.integer(0));
}

void check_gate(Rules& r) {
    r.scratch(0, r.integer(0));
    r.scratch(1, r.integer(0) + r.integer(1));
}

void check_copy(Rules& r) {
    r.row(0, r.integer(0) + r.integer(1));
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
    r.need(kernel >= 2 && columns >= 1);
    for (int64_t n = 0; n < 2; n++) r.scratch(n, columns + r.integer(2));
    r.state(2, (kernel - 1) * columns);
    r.constant(3, kernel * columns);
}

void check_lstm(Rules& r) {
    r.need(r.file.window == 1);
    for (int64_t n = 0; n < 2; n++) r.scratch(n, 4 * r.integer(0));
    for (int64_t n = 2; n < 4; n++) r.state(n, r.integer(0));
}

template <void CHECK(MixRules&)>
void check_mix(Rules& rules) {
    MixRules mix(rules);
    CHECK(mix);
    rules.need(mix.kept);
}

}  // namespace
