// Threads that share pieces of work and wait for each other as little as possible.

#include "threads.h"

#include <pthread.h>
#include <sched.h>

#include <new>

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
        if (pthread_mutex_trylock(&in_use)) {  // another thread of this process is using the helpers
            for (int64_t piece = 0; piece < pieces; piece++) work(context, piece);
            return;
        }
        while (started < threads - 1 && start_helper()) started++;
        this->work.store(work, std::memory_order_relaxed);
        this->context.store(context, std::memory_order_relaxed);
        wanted.store(threads - 1, std::memory_order_relaxed);
        finished.store(0, std::memory_order_relaxed);
        const uint64_t turn = static_cast<uint32_t>((claimed.load(std::memory_order_relaxed) >> 32) + 1);
        claimed.store(turn << 32 | static_cast<uint64_t>(pieces) << 16, std::memory_order_seq_cst);
        if (asleep.load(std::memory_order_seq_cst)) {
            pthread_mutex_lock(&mutex);
            pthread_cond_broadcast(&awake);
            pthread_mutex_unlock(&mutex);
        }
        claim_pieces(turn);
        // A helper that was interrupted during a piece may need this core to continue.
        for (int tries = 0; finished.load(std::memory_order_acquire) < pieces; tries++)
            if (tries < SPINS) pause();
            else sched_yield();
        pthread_mutex_unlock(&in_use);
    }

private:
    static constexpr int SPINS = 2000;  // about 50 microseconds

    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }

    // Returns whether the system had a thread to give.
    bool start_helper() {
        const auto run = [](void* helpers) -> void* { static_cast<Helpers*>(helpers)->help(); };
        pthread_t thread;
        return !pthread_create(&thread, nullptr, run, this) && !pthread_detach(thread);
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
        const int64_t number = numbered.fetch_add(1);
        uint64_t seen = 0;
        for (;;) {
            uint64_t turn = claimed.load(std::memory_order_acquire) >> 32;
            for (int tries = 0; turn == seen && tries < SPINS; tries++) {
                pause();
                turn = claimed.load(std::memory_order_acquire) >> 32;
            }
            if (turn == seen) {
                pthread_mutex_lock(&mutex);
                asleep.fetch_add(1, std::memory_order_seq_cst);
                while (claimed.load(std::memory_order_seq_cst) >> 32 == seen) pthread_cond_wait(&awake, &mutex);
                asleep.fetch_sub(1, std::memory_order_relaxed);
                pthread_mutex_unlock(&mutex);
                continue;
            }
            seen = turn;
            if (number < wanted.load(std::memory_order_relaxed)) claim_pieces(turn);
        }
    }

    int64_t started = 0;
    std::atomic<int64_t> numbered{0}, wanted{0};
    std::atomic<uint64_t> claimed{0};  // the turn (32 bits), the number of pieces (16) and the next piece (16)
    std::atomic<uint32_t> finished{0};
    std::atomic<void (*)(void*, int64_t)> work{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<int> asleep{0};
    pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER, mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t awake = PTHREAD_COND_INITIALIZER;
};

Helpers helpers;  // for all kernels, until the process ends

#if !defined(_WIN32)
// A child of fork has no helpers, and a helper may have held a mutex. The child starts its own.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { new (&helpers) Helpers; });
#endif

}  // namespace

void lintx::share(int64_t threads, int64_t pieces, void (*work)(void*, int64_t), void* context) {
    helpers.share(threads, pieces, work, context);
}
