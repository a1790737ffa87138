// Work that is divided among threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace lintx {

// Calls work(context, piece) for every piece below `pieces`, with up to `threads` threads; threads.cpp.
void share(int64_t threads, int64_t pieces, void (*work)(void*, int64_t), void* context);

}  // namespace lintx

namespace {

#if defined(__wasm__) && !defined(_REENTRANT)

// WebAssembly has threads only if the browser or the runtime allows them.
template <class Body>
inline void spread(int64_t, int64_t count, Body body) {
    for (int64_t index = 0; index < count; index++) body(index);
}

#else

// Calls `body` for every index below `count`, divided among threads.
template <class Body>
inline void spread(int64_t threads, int64_t count, Body body) {
    const int64_t pieces = std::min({count, 8 * threads, int64_t{65535}});
    if (threads == 1 || count == 1) {
        for (int64_t index = 0; index < count; index++) body(index);
        return;
    }
    struct Work {
        int64_t pieces, count;
        Body& body;
    } work{pieces, count, body};
    lintx::share(
        threads, pieces,
        [](void* context, int64_t piece) {
            Work& work = *static_cast<Work*>(context);
            const int64_t end = (piece + 1) * work.count / work.pieces;
            for (int64_t index = piece * work.count / work.pieces; index < end; index++) work.body(index);
        },
        &work);
}

#endif

// Calls `body` once per thread with a function that returns the next index that no thread has taken yet, until `count`.
// The memory that `body` allocates serves all indices of its thread.
template <class Body>
inline void share(int64_t threads, int64_t count, Body body) {
    std::atomic<int64_t> taken{0};
    spread(threads, std::min(threads, count), [&](int64_t) { body([&] { return taken.fetch_add(1); }); });
}

}  // namespace
