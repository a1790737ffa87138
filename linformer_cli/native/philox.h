// The random numbers of `lintx sample`: Philox4x64-10 (Salmon 2011, 'Parallel random numbers: as easy as 1, 2, 3').
#pragma once

#include <cstdint>

namespace {

// The upper and lower 64 bits of a product.
inline void multiply_words(uint64_t a, uint64_t b, uint64_t& upper, uint64_t& lower) {
    __extension__ typedef unsigned __int128 wide;
    const wide product = static_cast<wide>(a) * b;
    upper = static_cast<uint64_t>(product >> 64);
    lower = static_cast<uint64_t>(product);
}

// Number `n` in [0, 1) of the stream of (seed, index). This is exactly the upper 53 bits of word `n` of numpy's
// `Philox(key=[seed, index])`, divided by 2^53. A counter gives four words, and numpy's first counter is 1.
inline double draw_uniform(uint64_t seed, uint64_t index, int64_t n) {
    uint64_t words[] = {static_cast<uint64_t>(n) / 4 + 1, 0, 0, 0};
    for (int turn = 0; turn < 10; turn++) {
        uint64_t high_0, low_0, high_2, low_2;
        multiply_words(words[0], 0xD2E7470EE14C6C93, high_0, low_0);
        multiply_words(words[2], 0xCA5A826395121157, high_2, low_2);
        words[0] = high_2 ^ words[1] ^ seed;
        words[1] = low_2;
        words[2] = high_0 ^ words[3] ^ index;
        words[3] = low_0;
        seed += 0x9E3779B97F4A7C15;
        index += 0xBB67AE8584CAA73B;
    }
    return static_cast<double>(words[n % 4] >> 11) * 0x1p-53;
}

}  // namespace
