// The rule of each operation of a mechanism: what it needs from its buffers and integers, which ops/ explains.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "program_rules.h"

namespace {

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
    m.need(over <= 2 && buckets < 63 && std::ldexp(1, static_cast<int>(buckets)) > m.T);
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

void check_mesa(MixRules& m) {
    m.need(m.positive(0) <= m.K);
    m.inputs(2);
    m.state(0, m.H * m.K * m.V);
    m.state(1, m.H * m.K * m.K);
    m.constant(2, m.H);
    m.constant(3, m.H * m.K);
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

}  // namespace
