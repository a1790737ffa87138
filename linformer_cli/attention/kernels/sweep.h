// One visit to all positions of every head, in order or in reverse, divided among threads.
#pragma once

#include "scan.h"

namespace {

// The head that a pass visits: image b, head h, number b H + h.
template <class Call>
struct HeadPass {
    const Call& call;
    int64_t head = 0, b = 0, h = 0, ahead = 0;  // `ahead`: see `Rows`
    explicit HeadPass(const Call& call) : call(call) {}
    void enter(int64_t index) {
        head = index;
        b = index / call.H;
        h = index % call.H;
    }
    template <class A>
    Rows<A> rows(const View& view) const {
        return Rows<A>(view, b, h, ahead);
    }
};

// A pass of a kernel. Each thread has its own. `State` is what one position hands on to the next.
//
//     Pass(call)                      reserves memory, and leaves `state` at zero
//     enter(head)                     selects one of the B H heads
//     load()                          sets `state` to the state before all positions
//     clear()                         sets `state` to zero
//     visit(first, count, outputs)    updates `state`, and writes the results of the positions if `outputs`
//     follow(before)                  makes `state`, which began at zero, what it would be had it begun at `before`
//     leave()                         writes the state after all positions
//
// A head whose positions are divided among threads is cut into groups. The states after all groups but the last are
// computed first, at the same time: the first group from its real state and with outputs, the others from zero without
// outputs. `follow` then makes each of them the state after all groups up to its own, and the remaining groups are
// visited again. Visits without outputs take about half as long, so the first group has half the positions of the
// others.
template <class Pass, class Call>
void sweep(const Call& call, bool reverse) {
    const int64_t T = call.T, heads = call.B * call.H, blocks = count_blocks(T);
    const int64_t wanted = heads == 0 ? 1 : (call.threads + heads - 1) / heads;
    const int64_t parts = blocks < 8 * wanted ? 1 : wanted;  // per head; there are parts + 1 groups if parts > 1
    auto visit = [=](Pass& pass, int64_t from, int64_t to, bool outputs) {
        pass.ahead = reverse ? -SCAN_BLOCK : SCAN_BLOCK;
        for (int64_t n = from; n < to; n++) {
            const int64_t first = (reverse ? blocks - 1 - n : n) * SCAN_BLOCK;
            pass.visit(first, std::min(SCAN_BLOCK, T - first), outputs);
        }
    };
    if (parts == 1) {
        // The rows of all heads of a position are adjacent in memory, so a thread visits several heads block by block.
        const int64_t run = std::max<int64_t>(1, std::min(call.H, heads / (4 * call.threads)));
        share(call.threads, (heads + run - 1) / run, [&](auto next) {
            Pass pass(call);
            std::vector<typename Pass::State> states(run, pass.state);
            for (int64_t first = next() * run; first < heads; first = next() * run) {
                auto for_heads = [&](auto work) {
                    for (int64_t head = first; head < std::min(heads, first + run); head++) {
                        pass.enter(head);
                        std::swap(pass.state, states[head - first]);
                        work();
                        std::swap(pass.state, states[head - first]);
                    }
                };
                for_heads([&] { pass.load(); });
                for (int64_t n = 0; n < blocks; n++) for_heads([&] { visit(pass, n, n + 1, true); });
                for_heads([&] { pass.leave(); });
            }
        });
        return;
    }
    auto start = [=](int64_t group) { return group ? blocks * (2 * group - 1) / (2 * parts + 1) : 0; };
    std::vector<typename Pass::State> states(heads * parts, Pass(call).state);
    share(call.threads, heads * parts, [&](auto next) {
        Pass pass(call);
        for (int64_t index = next(); index < heads * parts; index = next()) {
            const int64_t group = index % parts;
            pass.enter(index / parts);
            group ? pass.clear() : pass.load();
            visit(pass, start(group), start(group + 1), group == 0);
            std::swap(pass.state, states[index]);
        }
    });
    Pass joined(call);
    for (int64_t index = 0; index < heads * parts; index++) {
        if (index % parts == 0) continue;
        std::swap(joined.state, states[index]);
        joined.follow(states[index - 1]);
        std::swap(joined.state, states[index]);
    }
    share(call.threads, heads * parts, [&](auto next) {
        Pass pass(call);
        for (int64_t index = next(); index < heads * parts; index = next()) {
            const int64_t group = index % parts + 1;
            pass.enter(index / parts);
            std::swap(pass.state, states[index]);
            visit(pass, start(group), start(group + 1), true);
            if (group == parts) pass.leave();
        }
    });
}

}  // namespace
