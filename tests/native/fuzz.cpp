// `fuzz SEED COUNT FILE...` damages program files. A file whose checksum is wrong must be refused. A file with wrong
// numbers and the right checksum must be refused or run without leaving its buffers, which the sanitizers check.

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "program_file.h"
#include "runner.h"

typedef std::vector<char> Bytes;

static void require_refused(const Bytes& file, const char* fault) {
    if (!lintx_open(file.data(), static_cast<int64_t>(file.size()), 1)) return;
    std::fprintf(stderr, "a file was read although it %s\n", fault);
    std::exit(1);
}

// Draws a few values if the file is accepted. Returns whether it is.
static bool try_to_draw(const Bytes& file, int64_t batch) {
    lintx_runner* runner = lintx_open(file.data(), static_cast<int64_t>(file.size()), batch);
    if (!runner) return false;
    if (batch == 2 && lintx_guide(runner, 2) == 0) lintx_start(runner, 0, 0, nullptr);  // an image with guidance
    const lintx_description shape = lintx_describe(runner);
    std::vector<double> probabilities(static_cast<size_t>(shape.levels));
    for (int64_t value = 0; value < std::min<int64_t>(shape.values, 12); value++) {
        if (value == 5) lintx_probabilities(runner, 0, probabilities.data());
        const std::vector<int64_t> given(static_cast<size_t>(batch), 1);
        if ((value == 7 ? lintx_give_next(runner, given.data()) : lintx_draw_next(runner)) < 0) break;
    }
    // Damage may show only at the end of an image.
    while (lintx_draw_next(runner) >= 0 && shape.values < 100) continue;
    lintx_close(runner);
    return true;
}

int main(int count, char** words) {
    std::mt19937_64 random(std::strtoull(words[1], nullptr, 10));
    int64_t accepted = 0, tried = 0;
    for (int n = 3; n < count; n++) {
        std::ifstream opened(words[n], std::ios::binary);
        const Bytes whole{std::istreambuf_iterator<char>(opened), {}};
        if (!try_to_draw(whole, 1) || !try_to_draw(whole, 2) || !try_to_draw(whole, 3)) {
            std::fprintf(stderr, "%s: %s\n", words[n], lintx_error());
            return 1;
        }
        const size_t size = whole.size();
        for (size_t length = 0; length < size; length += length < 64 || size - length < 64 ? 1 : size / 50)
            require_refused(Bytes(whole.begin(), whole.begin() + static_cast<int64_t>(length)), "is truncated");
        for (int turn = 0; turn < 50; turn++) {
            Bytes damaged = whole;
            damaged[random() % size] ^= static_cast<char>(1 << random() % 8);
            require_refused(damaged, "has a wrong bit");
        }
        // The header is the part before the first shared data.
        FileProgram program{};
        Bytes copy = whole;
        read_program(copy.data(), static_cast<int64_t>(size), program);
        size_t header = size;
        for (const FileBuffer& buffer : program.buffers)
            if (buffer.data) header = std::min(header, static_cast<size_t>(buffer.data - copy.data()));
        for (int turn = 0; turn < std::atoi(words[2]); turn++) {
            Bytes damaged = whole;
            const size_t part = turn % 8 ? header : size;
            const size_t place = (CHECKED_FROM + random() % (part - CHECKED_FROM)) / 8 * 8;
            if (place + 8 > size) continue;
            uint64_t word;
            std::memcpy(&word, &damaged[place], 8);
            const uint64_t values[] = {~0ull,    0,       1,         2,         word - 1,      word + 1, word / 2,
                                       word * 2, 1 << 20, INT32_MAX, INT64_MAX, random() % 64, random()};
            word = values[random() % (sizeof values / sizeof *values)];
            std::memcpy(&damaged[place], &word, 8);
            const int64_t sum = checksum(&damaged[CHECKED_FROM], static_cast<int64_t>(size) - CHECKED_FROM);
            std::memcpy(&damaged[CHECKED_FROM - 8], &sum, 8);
            accepted += try_to_draw(damaged, 1 + turn % 3);
            tried++;
        }
    }
    std::printf("%lld of %lld damaged headers were accepted\n", static_cast<long long>(accepted),
                static_cast<long long>(tried));
    return 0;
}
