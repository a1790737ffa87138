// Prints the frequencies of random distributions, for test_other_machines.py.

#include <cstdio>
#include <vector>

#include "frequencies.h"

#ifdef _WIN32
#include <fcntl.h>
#include <io.h>
#endif

int main() {
#ifdef _WIN32
    _setmode(_fileno(stdout), _O_BINARY);  // in text mode, a byte of 10 would become two bytes
#endif
    const int64_t rows = 50, levels = 256, K = 10;
    uint64_t state = 1;
    for (int mixtures = 0; mixtures < 2; mixtures++) {
        Distribution distribution{levels, mixtures ? K : 0, -7, 40};
        for (double spread = 0.01; spread < 1e4; spread *= 10) {
            std::vector<float> parameters(rows * levels);
            for (float& one : parameters) {
                state = state * 6364136223846793005u + 1442695040888963407u;
                one = static_cast<float>((static_cast<double>(state >> 40) / 8388608 - 1) * spread);
            }
            std::vector<double> found(rows * levels);
            if (find_frequencies(distribution, 3, rows, parameters.data(), levels, found.data())) return 1;
            std::vector<int32_t> whole(found.begin(), found.end());
            std::fwrite(whole.data(), sizeof(int32_t), whole.size(), stdout);
        }
    }
    return 0;
}
