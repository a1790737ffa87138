// Threads that share pieces of work and wait for each other as little as possible.

#include "threads.h"

#include <condition_variable>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// The calling thread and its helpers claim pieces until none is left. If other programs occupy a helper's core, the
// helper does not run and claims nothing, and the caller does its pieces. The caller therefore never waits for a thread
// to begin. It waits only for pieces that have begun, and pieces are short.
class Helpers {
public:
    void share(int64_t threads, int64_t pieces, void (*work)(void*, int64_t), void* context) {
        const std::unique_lock<std::mutex> alone(in_use, std::try_to_lock);
        if (!alone) {  // another thread of this process is using the helpers
            for (int64_t piece = 0; piece < pieces; piece++) work(context, piece);
            return;
        }
        for (; started < threads - 1; started++) std::thread([this] { help(); }).detach();
        this->work.store(work, std::memory_order_relaxed);
        this->context.store(context, std::memory_order_relaxed);
        wanted.store(threads - 1, std::memory_order_relaxed);
        finished.store(0, std::memory_order_relaxed);
        const uint64_t turn = (claimed.load(std::memory_order_relaxed) >> 32) + 1;
        claimed.store(turn << 32 | static_cast<uint64_t>(pieces) << 16, std::memory_order_seq_cst);
        if (asleep.load(std::memory_order_seq_cst)) {
            std::lock_guard<std::mutex> lock(mutex);
            awake.notify_all();
        }
        claim_pieces(turn);
        // A helper that was interrupted during a piece may need this core to continue.
        for (int tries = 0; finished.load(std::memory_order_acquire) < pieces; tries++)
            if (tries < SPINS) pause();
            else std::this_thread::yield();
    }

private:
    static constexpr int SPINS = 2000;  // about 50 microseconds

    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }

    void claim_pieces(uint64_t turn) {
        uint64_t found = claimed.load(std::memory_order_acquire);
        while (found >> 32 == turn && (found & 0xffff) < (found >> 16 & 0xffff)) {
            // If a new turn (the next `share`) begins before the exchange, these two may belong to it. The exchange
            // then fails, because a turn ends only after all of its pieces were claimed.
            void (*const own_work)(void*, int64_t) = work.load(std::memory_order_relaxed);
            void* const own_context = context.load(std::memory_order_relaxed);
            if (!claimed.compare_exchange_weak(found, found + 1, std::memory_order_acq_rel)) continue;
            own_work(own_context, static_cast<int64_t>(found & 0xffff));
            finished.fetch_add(1, std::memory_order_release);
            found = claimed.load(std::memory_order_acquire);
        }
    }

    [[noreturn]] void help() {
        const int64_t number = helpers.fetch_add(1);
        uint64_t seen = 0;
        for (;;) {
            uint64_t turn = claimed.load(std::memory_order_acquire) >> 32;
            for (int tries = 0; turn == seen && tries < SPINS; tries++) {
                pause();
                turn = claimed.load(std::memory_order_acquire) >> 32;
            }
            if (turn == seen) {
                std::unique_lock<std::mutex> lock(mutex);
                asleep.fetch_add(1, std::memory_order_seq_cst);
                awake.wait(lock, [&] { return claimed.load(std::memory_order_seq_cst) >> 32 != seen; });
                asleep.fetch_sub(1, std::memory_order_relaxed);
                continue;
            }
            seen = turn;
            if (number < wanted.load(std::memory_order_relaxed)) claim_pieces(turn);
        }
    }

    int64_t started = 0;
    std::atomic<int64_t> helpers{0}, wanted{0};
    std::atomic<uint64_t> claimed{0};  // the turn (32 bits), the number of pieces (16) and the next piece (16)
    std::atomic<uint32_t> finished{0};
    std::atomic<void (*)(void*, int64_t)> work{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<int> asleep{0};
    std::mutex in_use, mutex;
    std::condition_variable awake;
};

}  // namespace

void lintx::share(int64_t threads, int64_t pieces, void (*work)(void*, int64_t), void* context) {
    static Helpers* const helpers = new Helpers;  // for all kernels, until the process ends
    helpers->share(threads, pieces, work, context);
}
