// An example of runner.h: `draw PROGRAM SEED COUNT [TEMPERATURE] > images.pgm` draws images and writes them one below
// the other: a PGM, PPM or PAM picture (grey, RGB or RGBA).

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>

#ifdef _WIN32
#include <fcntl.h>
#include <io.h>
#endif

#include "runner.h"

static int complain() {
    std::fprintf(stderr, "error: %s\n", lintx_error());
    return 1;
}

int main(int count, char** words) {
    if (count != 4 && count != 5)
        return std::fprintf(stderr, "usage: draw PROGRAM SEED COUNT [TEMPERATURE] > images.pgm\n"), 2;
    std::ifstream file(words[1], std::ios::binary);
    if (!file) return std::fprintf(stderr, "error: cannot read %s\n", words[1]), 1;
    const std::vector<char> data{std::istreambuf_iterator<char>(file), {}};
    const int64_t images = std::atoll(words[3]);
    lintx_runner* runner = lintx_open(data.data(), static_cast<int64_t>(data.size()), images);
    if (!runner || lintx_start(runner, std::strtoull(words[2], nullptr, 10), 0, nullptr)) return complain();
    if (count == 5 && lintx_filter(runner, std::strtod(words[4], nullptr), 0, 0)) return complain();
    const lintx_description shape = lintx_describe(runner);
    if (lintx_draw(runner, shape.values, shape.values) < 0) return complain();
#ifdef _WIN32
    _setmode(_fileno(stdout), _O_BINARY);  // in text mode, a brightness of 10 would become two bytes
#endif
    const long long width = shape.width, height = shape.height * images;
    if (shape.bands == 4)
        std::printf("P7\nWIDTH %lld\nHEIGHT %lld\nDEPTH 4\nMAXVAL 255\nTUPLTYPE RGB_ALPHA\nENDHDR\n", width, height);
    else std::printf("P%d\n%lld %lld\n255\n", shape.bands == 3 ? 6 : 5, width, height);
    std::vector<uint8_t> pixels(static_cast<size_t>(shape.height * shape.width * shape.bands));
    for (int64_t image = 0; image < images; image++) {
        lintx_pixels(runner, image, pixels.data());
        std::fwrite(pixels.data(), 1, pixels.size(), stdout);
    }
    lintx_close(runner);
    return 0;
}
