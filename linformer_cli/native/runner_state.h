// A program file with memory for a batch of images, and where these images are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "particles.h"
#include "philox.h"
#include "program_file.h"
#include "runner.h"

namespace {

struct Release {
    void operator()(char* memory) const { ::operator delete(memory, std::align_val_t(ALIGNMENT)); }
};
typedef std::unique_ptr<char, Release> Memory;

// Memory that begins at a multiple of ALIGNMENT, filled with zeros; null if there is not enough. Reading a large cache
// of keys and values is slower with pages of 4 KiB, because the processor looks up the place of every page.
inline Memory allocate(int64_t bytes) {
    void* found = static_cast<uint64_t>(bytes) > PTRDIFF_MAX
                      ? nullptr
                      : ::operator new(static_cast<size_t>(bytes), std::align_val_t(ALIGNMENT), std::nothrow);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = 1 << 21, first = (reinterpret_cast<uintptr_t>(found) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(found) + static_cast<uintptr_t>(bytes)) / page * page;
    if (found && first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
    if (found) std::memset(found, 0, static_cast<size_t>(bytes));
    return Memory(static_cast<char*>(found));
}

template <class A>
inline void fill(char* memory, int64_t count, double initial) {
    std::fill_n(reinterpret_cast<A*>(memory), count, static_cast<A>(initial));
}

struct RunnerState {
    FileProgram file;
    Memory copy;                   // of the file, or null
    const char* data;              // the whole file
    size_t bytes;                  // of the file
    std::vector<Memory> memories;  // of each buffer that is not shared
    std::vector<Buffer> buffers;
    std::vector<Operation> operations;
    LoadedProgram program;
    int64_t capacity;               // the largest batch
    Memory values;                  // int64 [capacity, T + 1]
    std::vector<uint64_t> numbers;  // of the images, for their random numbers
    uint64_t seed;
    double guidance = 1;  // of the next images
    bool endless = false;
    int64_t first;               // position of the token that holds the first known value
    int64_t read;                // tokens that every image has read; its prediction is in the buffer `output`
    int64_t known, drawn;        // values of each image, and how many of them were drawn
    int64_t guessed;             // values of a single image, with those that look-ahead has guessed
    int64_t ahead, look_aheads;  // positions in the next pass with look-ahead, and passes so far
    Particles particles;         // of the only image, if it keeps given values

    int64_t batch() const { return program.batch; }
    // The number of different images: with guidance, the second half of the batch repeats the first without classes.
    int64_t images() const { return images_with(file.distribution.guidance); }
    int64_t images_with(double weight) const { return weight == 1 ? batch() : batch() / 2; }
    int64_t rows_per_image() const { return file.distribution.is_guided() ? 2 : 1; }
    int64_t count() const { return file.values(); }
    // How many values can be known. An endless sequence keeps one value when it forgets the others.
    int64_t limit() const { return endless ? count() + 1 : count() + 1 - first; }
    int64_t reach() const { return file.buffers[file.recent].width; }
    bool is_predicted() const { return read == first + known; }
    int64_t* values_of(int64_t image) const { return reinterpret_cast<int64_t*>(values.get()) + image * (count() + 1); }
    int16_t* recent(int64_t image) const { return memory<int16_t>(file.recent, image); }
    float* parameters(int64_t row) const { return memory<float>(file.output, row); }
    double uniform(int64_t image, int64_t n) const { return draw_uniform(seed, numbers[image], drawn + n); }
    // The random number of a particle for the next value that is drawn. That of number `count` is for resampling.
    double particle_uniform(int64_t particle) const {
        return draw_uniform(seed, numbers[0], drawn * (particles.count + 1) + particle);
    }
    template <class A>
    A* memory(int64_t buffer, int64_t image) const {
        return reinterpret_cast<A*>(buffers[buffer].data + image * buffers[buffer].stride);
    }
};

// Gives every buffer its memory. Returns whether there is enough.
inline bool allocate_buffers(RunnerState& runner) {
    // Look-ahead has a window of rows for each of at most two images.
    const int64_t window = std::min<int64_t>(runner.batch(), 2) * runner.file.window;
    const int64_t rows = std::max(runner.batch(), window);
    runner.values = allocate(runner.batch() * (runner.count() + 1) * static_cast<int64_t>(sizeof(int64_t)));
    if (!runner.values) return false;
    for (const FileBuffer& buffer : runner.file.buffers) {
        if (buffer.kind == SHARED) {
            runner.buffers.push_back({const_cast<char*>(buffer.data), 0, SHARED});
            continue;
        }
        runner.memories.push_back(allocate((buffer.kind == STATE ? runner.batch() : rows) * buffer.bytes()));
        if (!runner.memories.back()) return false;
        runner.buffers.push_back({runner.memories.back().get(), buffer.bytes(), buffer.kind});
    }
    return true;
}

}  // namespace
