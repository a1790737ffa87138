// Draws images with a program file; runner.h explains the functions.

#include "runner.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "engine.cpp"
#include "philox.h"
#include "program_file.h"

namespace {

constexpr int64_t LARGEST_BATCH = 1 << 20, LARGEST_GUIDANCE = 1000;
// With at most this many images per thread, all threads share every operation; see native_memory.py.
constexpr int64_t FEW = 2;

struct Release {
    void operator()(char* memory) const { ::operator delete(memory, std::align_val_t(ALIGNMENT)); }
};
typedef std::unique_ptr<char, Release> Memory;

// Memory that begins at a multiple of ALIGNMENT, filled with zeros; null if there is not enough.
Memory allocate(int64_t bytes) {
    void* found = static_cast<uint64_t>(bytes) > PTRDIFF_MAX
                      ? nullptr
                      : ::operator new(static_cast<size_t>(bytes), std::align_val_t(ALIGNMENT), std::nothrow);
    if (found) std::memset(found, 0, static_cast<size_t>(bytes));
    return Memory(static_cast<char*>(found));
}

template <class A>
void fill(char* memory, int64_t count, double initial) {
    std::fill_n(reinterpret_cast<A*>(memory), count, static_cast<A>(initial));
}

}  // namespace

struct lintx_runner {
    FileProgram file;
    Memory data;                   // the whole file
    size_t bytes;                  // of the file
    std::vector<Memory> memories;  // of each buffer that is not shared
    std::vector<Buffer> buffers;
    std::vector<Operation> operations;
    Program program;
    Drawing drawing;
    Memory values;        // int64 [batch, T]
    Memory uniforms;      // float64 [T] of the first image, from the first unknown value on
    double guidance = 1;  // of the next images
    uint64_t seed, first;
    int64_t known, drawn;  // values of each image, and how many of them were drawn
    bool predicted;        // the step for the next value is done

    int64_t batch() const { return program.batch; }
    // The number of different images: with guidance, the second half of the batch repeats the first without classes.
    int64_t images() const { return images_with(file.head.guidance); }
    int64_t images_with(double weight) const { return weight == 1 ? batch() : batch() / 2; }
    int64_t count() const { return file.values(); }
    int64_t* values_of(int64_t image) const { return reinterpret_cast<int64_t*>(values.get()) + image * count(); }
    double* numbers() const { return reinterpret_cast<double*>(uniforms.get()); }
    float* parameters(int64_t image) const { return memory<float>(file.output, image); }
    template <class A>
    A* memory(int64_t buffer, int64_t image) const {
        return reinterpret_cast<A*>(buffers[buffer].data + image * buffers[buffer].stride);
    }
};

namespace {

thread_local Text message;

int64_t fail(const Text& reason) {
    message = reason;
    return -1;
}

// Gives every buffer its memory. Returns whether there is enough.
bool allocate_buffers(lintx_runner& runner) {
    // Look-ahead has a window of rows for each of at most two images.
    const int64_t window = std::min<int64_t>(runner.batch(), 2) * runner.file.window;
    const int64_t rows = std::max(runner.batch(), window), word = sizeof(double);
    runner.values = allocate(runner.batch() * runner.count() * word);
    runner.uniforms = allocate(runner.count() * word);
    if (!runner.values || !runner.uniforms) return false;
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

// Whether row number `row` of a pass has finite parameters.
bool is_finite(lintx_runner& runner, int64_t row) {
    return are_finite(runner.file.head.parameters(), runner.parameters(row));
}

// Computes the parameters of the next value of every image, unless that is done already. Returns 0 or -1.
int64_t predict(lintx_runner& runner) {
    if (runner.known == runner.count()) return fail("all values of the image are known");
    const int64_t reach = runner.file.buffers[runner.file.recent].width, position = runner.known;
    if (!runner.predicted) {
        for (int64_t image = 0; position && image < runner.batch(); image++)
            runner.memory<int16_t>(runner.file.recent, image)[(position - 1) % reach] =
                static_cast<int16_t>(runner.values_of(image)[position - 1]);
        step(runner.program, position);
    }
    runner.predicted = true;
    for (int64_t image = 0; image < runner.batch(); image++)
        if (!is_finite(runner, image)) return fail("the model's prediction is not a finite number");
    return 0;
}

// Gives the images that repeat others their values up to number `known`, and returns it.
int64_t repeat(lintx_runner& runner, int64_t known) {
    const int64_t images = runner.images();
    for (int64_t image = images; image < runner.batch(); image++)
        std::copy(runner.values_of(image - images) + runner.known, runner.values_of(image - images) + known,
                  runner.values_of(image) + runner.known);
    return runner.known = known;
}

int64_t draw_ahead(lintx_runner& runner) {
    Drawing& drawing = runner.drawing;
    drawing.known = runner.known;
    drawing.guessed = std::max(drawing.guessed, drawing.known);
    for (int64_t n = 0; n < std::min(drawing.rows, runner.count() - runner.known); n++)
        runner.numbers()[runner.known + n] = draw_uniform(runner.seed, runner.first, runner.drawn + n);
    look_ahead(runner.program, drawing);
    for (int64_t image = 0; image < runner.batch(); image++)
        if (!is_finite(runner, image * runner.program.window))
            return fail("the model's prediction is not a finite number");
    runner.drawn += drawing.known - runner.known;
    return repeat(runner, drawing.known);
}

}  // namespace

extern "C" {

const char* lintx_error(void) { return message.letters(); }

void lintx_close(lintx_runner* runner) { delete runner; }

lintx_runner* lintx_open(const void* file, int64_t bytes, int64_t batch) {
    const auto refuse = [](const Text& reason) {
        fail(reason);
        return static_cast<lintx_runner*>(nullptr);
    };
    if (batch < 1 || batch > LARGEST_BATCH) return refuse("a batch has 1 to 1048576 images");
    if (bytes < 0) return refuse("a file has no negative size");
    std::unique_ptr<lintx_runner> runner(new lintx_runner{});
    runner->data = allocate(bytes);
    if (!runner->data) return refuse("there is not enough memory");
    runner->bytes = static_cast<size_t>(bytes);
    if (bytes) std::memcpy(runner->data.get(), file, runner->bytes);
    Text reason = read_program(runner->data.get(), bytes, runner->file);
    if (reason.empty()) reason = check_program(runner->file);
    if (!reason.empty()) return refuse(reason);
    const FileProgram& found = runner->file;
    runner->program = {batch, found.window, 1, 0, found.channels, found.blocks, 0, nullptr, nullptr};
    for (const FileOperation& operation : found.operations) runner->operations.push_back(operation.arguments);
    if (!allocate_buffers(*runner)) return refuse("there is not enough memory");
    runner->program.count = static_cast<int64_t>(runner->operations.size());
    runner->program.buffers = runner->buffers.data();
    runner->program.operations = runner->operations.data();
    lintx_start(runner.get(), 0, 0, nullptr);
    return runner.release();
}

lintx_description lintx_describe(const lintx_runner* runner) {
    const FileProgram& file = runner->file;
    return {file.channels, file.height,   file.width,      file.levels,
            file.classes,  file.values(), runner->batch(), static_cast<int64_t>(file.states.size())};
}

void lintx_use_threads(lintx_runner* runner, int64_t threads) {
    runner->program.threads = std::max<int64_t>(1, threads);
    runner->program.divided = threads > 1 && runner->batch() > FEW * threads;
}

int64_t lintx_filter(lintx_runner* runner, double temperature, int64_t top_k, double top_p) {
    if (!(temperature > 0 && std::isfinite(temperature))) return fail("a temperature is above 0 and finite");
    if (top_k < 0) return fail("top-k is not negative");
    if (!(top_p >= 0 && top_p <= 1)) return fail("top-p is 0 to 1");
    for (Head* head : {&runner->file.head, &runner->drawing.head}) {
        head->temperature = temperature;
        head->top_k = top_k;
        head->top_p = top_p;
    }
    return 0;
}

int64_t lintx_guide(lintx_runner* runner, double weight) {
    if (!(weight >= 0 && weight <= LARGEST_GUIDANCE)) return fail("a guidance is from 0 to 1000");
    if (weight != 1 && !runner->file.is_class_optional()) return fail("guidance needs a model with an optional class");
    if (weight != 1 && runner->batch() % 2) return fail("with guidance, the batch is twice the number of images");
    runner->guidance = weight;
    return 0;
}

int64_t lintx_start(lintx_runner* runner, uint64_t seed, uint64_t first, const int64_t* labels) {
    const FileProgram& file = runner->file;
    const bool optional = file.is_class_optional();
    const int64_t images = runner->images_with(runner->guidance);
    for (int64_t image = 0; labels && file.classes && image < images; image++)
        if (labels[image] < 0 || labels[image] >= file.classes + optional)
            return fail(Text("classes are 0 to ") << file.classes - 1);
    runner->file.head.guidance = runner->guidance;
    for (size_t n = 0; n < file.buffers.size(); n++) {
        const FileBuffer& buffer = file.buffers[n];
        if (buffer.kind != STATE) continue;
        char* memory = runner->buffers[n].data;
        const int64_t numbers = runner->batch() * buffer.width;
        if (buffer.type == Type::FLOAT32) fill<float>(memory, numbers, buffer.initial);
        if (buffer.type == Type::FLOAT64) fill<double>(memory, numbers, buffer.initial);
        if (buffer.type == Type::BFLOAT16) fill<bfloat16>(memory, numbers, buffer.initial);
        if (buffer.type == Type::INT16) fill<int16_t>(memory, numbers, buffer.initial);
        if (buffer.type == Type::INT32) fill<int32_t>(memory, numbers, buffer.initial);
        if (buffer.type == Type::INT64) fill<int64_t>(memory, numbers, buffer.initial);
    }
    for (int64_t image = 0; file.classes && image < runner->batch(); image++)
        *runner->memory<int64_t>(file.label, image) = labels && image < images ? labels[image]
                                                      : optional ? file.classes
                                                                 : static_cast<int64_t>((first + image) % file.classes);
    runner->seed = seed;
    runner->first = first;
    runner->known = runner->drawn = 0;
    runner->predicted = false;
    const int64_t reach = file.buffers[file.recent].width;
    runner->drawing = {file.head,
                       file.recent,
                       reach,
                       file.output,
                       file.channels * file.width,
                       runner->numbers(),
                       runner->values_of(0),
                       file.values(),
                       0,
                       0,
                       1,
                       file.window,
                       0};
    return 0;
}

int64_t lintx_continue(lintx_runner* runner, const lintx_runner* other) {
    if (runner->file.head.is_guided() != other->file.head.is_guided())
        return fail("one runner has guidance and the other has none");
    if (runner->bytes != other->bytes || std::memcmp(runner->data.get(), other->data.get(), runner->bytes))
        return fail("the runners have different programs");
    for (int64_t image = 0; image < runner->batch(); image++) {
        const int64_t source = image < runner->images() ? 0 : other->images();
        for (size_t n = 0; n < runner->buffers.size(); n++)
            if (runner->buffers[n].kind == STATE)
                std::memcpy(runner->memory<char>(n, image), other->memory<char>(n, source), runner->buffers[n].stride);
        std::memcpy(runner->parameters(image), other->parameters(source), runner->buffers[runner->file.output].stride);
        std::copy_n(other->values_of(source), other->known, runner->values_of(image));
    }
    runner->known = other->known;
    runner->drawn = other->drawn;
    runner->predicted = other->predicted;
    return 0;
}

int64_t lintx_draw_next(lintx_runner* runner) {
    const int64_t images = runner->images();
    const bool ahead = images == 1 && runner->file.window > 1 && !runner->predicted;
    if (ahead && runner->known && runner->known < runner->count()) return draw_ahead(*runner);
    if (predict(*runner)) return -1;
    const int64_t stride = runner->parameters(images) - runner->parameters(0);  // to the parameters without a class
    for (int64_t image = 0; image < images; image++) {
        const double uniform = draw_uniform(runner->seed, runner->first + image, runner->drawn);
        int64_t* value = runner->values_of(image) + runner->known;
        draw(runner->file.head, 1, runner->parameters(image), stride, &uniform, value);
    }
    runner->predicted = false;
    runner->drawn++;
    return repeat(*runner, runner->known + 1);
}

int64_t lintx_give_next(lintx_runner* runner, const int64_t* values) {
    for (int64_t image = 0; image < runner->images(); image++)
        if (values[image] < 0 || values[image] >= runner->file.levels)
            return fail(Text("values are 0 to ") << runner->file.levels - 1);
    if (predict(*runner)) return -1;
    for (int64_t image = 0; image < runner->images(); image++) runner->values_of(image)[runner->known] = values[image];
    runner->predicted = false;
    return repeat(*runner, runner->known + 1);
}

int64_t lintx_probabilities(lintx_runner* runner, int64_t image, double* probabilities) {
    if (image < 0 || image >= runner->batch()) return fail("the batch has no such image");
    if (predict(*runner)) return -1;
    const Head& head = runner->file.head;
    find_logs(head, runner->parameters(image), probabilities);
    exponentiate(head.levels, probabilities, 1);
    const double total = std::accumulate(probabilities, probabilities + head.levels, 0.0);
    std::for_each(probabilities, probabilities + head.levels, [&](double& share) { share /= total; });
    return 0;
}

const int64_t* lintx_values(const lintx_runner* runner, int64_t image) { return runner->values_of(image); }

void lintx_pixels(const lintx_runner* runner, int64_t image, uint8_t* pixels) {
    const int64_t most = runner->file.levels - 1, *values = lintx_values(runner, image);
    for (int64_t n = 0; n < runner->count(); n++)
        pixels[n] = n < runner->known ? static_cast<uint8_t>((values[n] * 255 + most - 1) / most) : 0;
}

const void* lintx_state(const lintx_runner* runner, int64_t image, int64_t layer, int64_t number, int64_t* bytes) {
    const std::vector<std::vector<int64_t>>& states = runner->file.states;
    if (image < 0 || image >= runner->batch()) return nullptr;
    if (layer < 0 || layer >= static_cast<int64_t>(states.size())) return nullptr;
    if (number < 0 || number >= static_cast<int64_t>(states[layer].size())) return nullptr;
    const int64_t buffer = states[layer][number];
    *bytes = runner->file.buffers[buffer].bytes();
    return runner->memory<char>(buffer, image);
}
}
