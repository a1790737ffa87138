// Allocates aligned memory, and shares work among threads: from several callers at once, in a child of fork, and in a
// child of this child. The result is 0 if every piece was done once and every process has helpers.

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "threads.h"

static void require(bool condition, const char* fault) {
    if (condition) return;
    std::fprintf(stderr, "%s\n", fault);
    std::_Exit(1);
}

constexpr int THREADS = 5;

// The pieces wait for each other, so each needs a thread of its own. After this, every helper has
// begun. One that begins allocates memory, and if AddressSanitizer's allocator is locked during a fork, it
// stays locked in the child.
static void require_helpers() {
    std::atomic<int> begun{0};
    spread(THREADS, THREADS, [&](int64_t) {
        begun++;
        for (int tries = 0; begun < THREADS; tries++) {
            require(tries < 20000, "a piece waited 20 s for a helper");
            usleep(1000);
        }
    });
}

static void* add_numbers(void*) {
    for (int64_t threads = 1; threads <= THREADS; threads++)
        for (int64_t count = 0; count < 200; count++) {
            std::vector<int64_t> done(static_cast<size_t>(count));
            std::atomic<int64_t> sum{0};
            spread(threads, count, [&](int64_t index) { done[static_cast<size_t>(index)]++; });
            share(threads, count, [&](auto next) {
                for (int64_t index = next(); index < count; index = next()) sum += index;
            });
            for (const int64_t times : done) require(times == 1, "a piece was not done once");
            require(sum == count * (count - 1) / 2, "a sum is wrong");
        }
    return nullptr;
}

static void fork_and_check(int depth) {
    const pid_t child = fork();
    if (!child) {
        require_helpers();
        add_numbers(nullptr);
        if (depth) fork_and_check(depth - 1);
        std::_Exit(0);
    }
    int status = -1;
    require(waitpid(child, &status, 0) == child && status == 0, "a child failed");
}

static void require_aligned_memory(size_t bytes, size_t alignment) {
    void* memory = operator new(bytes, std::align_val_t{alignment}, std::nothrow);
    require(memory && reinterpret_cast<uintptr_t>(memory) % alignment == 0, "memory is not aligned");
    std::memset(memory, 1, bytes);
    operator delete(memory, std::align_val_t{alignment});
}

int main() {
    for (size_t bytes = 1; bytes < 200; bytes++) require_aligned_memory(bytes, 64);
    require_helpers();
    pthread_t callers[4];
    for (pthread_t& caller : callers) pthread_create(&caller, nullptr, add_numbers, nullptr);
    for (pthread_t caller : callers) pthread_join(caller, nullptr);
    // Whatever the helpers are doing at this moment.
    for (int turn = 0; turn < 20; turn++) {
        add_numbers(nullptr);
        usleep(static_cast<useconds_t>(10 * turn));
        fork_and_check(turn == 0);
    }
    return 0;
}
