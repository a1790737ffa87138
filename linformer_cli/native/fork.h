// Images that continue others in place.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "runner_state.h"

namespace {

// Memory with `stride` bytes for each image, of which the first `bytes` matter.
struct Share {
    char* data;
    int64_t stride, bytes;

    char* of(int64_t image) const { return data + image * stride; }
};

// A row takes over the content of another one, or swaps it.
struct Move {
    int64_t to, from;
    bool swaps;
};

// What an image takes along when another one continues it: its states, its values and its prediction.
inline std::vector<Share> list_shares(const RunnerState& runner) {
    std::vector<Share> shares;
    for (const Buffer& buffer : runner.buffers)
        if (buffer.kind == STATE) shares.push_back({buffer.data, buffer.stride, buffer.stride});
    const int64_t word = sizeof(int64_t);
    shares.push_back({runner.values.get(), (runner.count() + 1) * word, runner.known * word});
    const Buffer& output = runner.buffers[runner.file.output];
    if (runner.is_predicted()) shares.push_back({output.data, output.stride, output.stride});
    return shares;
}

// The moves that give every row the content of row sources[row], in an order in which no row is overwritten before the
// last row that needs it has taken it. Rows that wait for each other in a circle are swapped.
inline std::vector<Move> order_moves(std::vector<int64_t> sources, int64_t rows) {
    const int64_t targets = static_cast<int64_t>(sources.size());
    std::vector<int64_t> needed(static_cast<size_t>(std::max(rows, targets))), ready;
    std::vector<Move> moves;
    for (int64_t row = 0; row < targets; row++) needed[sources[row]] += sources[row] != row;
    for (int64_t row = 0; row < targets; row++)
        if (sources[row] != row && !needed[row]) ready.push_back(row);
    while (!ready.empty()) {
        const int64_t row = ready.back(), from = std::exchange(sources[row], row);
        ready.pop_back();
        moves.push_back({row, from, false});
        if (!--needed[from] && from < targets && sources[from] != from) ready.push_back(from);
    }
    for (int64_t row = 0; row < targets; row++)
        for (int64_t to = row; sources[to] != to;) {
            const int64_t from = std::exchange(sources[to], to);
            if (from == row) break;  // the swaps before have brought it here
            moves.push_back({to, from, true});
            to = from;
        }
    return moves;
}

}  // namespace
