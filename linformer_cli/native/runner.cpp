// Draws images with a program file; runner.h explains the functions.

#include "runner.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "engine.h"
#include "fork.h"
#include "frequencies.h"
#include "runner_state.h"

struct lintx_runner : RunnerState {};

namespace {

constexpr int64_t LARGEST_BATCH = 1 << 20;
constexpr const char* DAMAGED = "the model's prediction is not a finite number: its weights are damaged";

thread_local Text message;

int64_t fail(const Text& reason) {
    message = reason;
    return -1;
}

lintx_runner* refuse(const Text& reason) {
    fail(reason);
    return nullptr;
}

// Finishes a runner whose file is in memory.
lintx_runner* open(std::unique_ptr<lintx_runner> runner, int64_t bytes, int64_t batch, bool verify) {
    if (batch < 1 || batch > LARGEST_BATCH) return refuse("a batch has 1 to 1048576 images");
    runner->bytes = static_cast<size_t>(bytes);
    runner->capacity = batch;
    runner->numbers.resize(static_cast<size_t>(batch));
    Text reason = read_program(runner->data, bytes, runner->file, verify);
    if (reason.empty()) reason = check_program(runner->file);
    if (!reason.empty()) return refuse(reason);
    const FileProgram& found = runner->file;
    for (const FileOperation& operation : found.operations) runner->operations.push_back(operation.arguments);
    const int64_t count = static_cast<int64_t>(runner->operations.size());
    runner->program = {batch, found.window, 1, found.channels, found.blocks, count, nullptr, nullptr};
    if (!allocate_buffers(*runner)) return refuse("there is not enough memory");
    runner->program.buffers = runner->buffers.data();
    runner->program.operations = runner->operations.data();
    lintx_start(runner.get(), 0, 0, nullptr);
    return runner.release();
}

// Makes room for another value. Returns 0 or -1.
int64_t make_room(lintx_runner& runner) {
    if (runner.known < runner.limit()) return 0;
    if (!runner.endless) return fail("all values of the image are known");
    const int64_t forgotten = runner.known - 1;
    for (int64_t image = 0; image < runner.batch(); image++)
        runner.values_of(image)[0] = runner.values_of(image)[forgotten];
    runner.first += forgotten;
    runner.known = runner.guessed = 1;
    return 0;
}

// Reads the last token of every image, so that its next value is predicted, unless that is done already.
void predict(lintx_runner& runner) {
    if (runner.is_predicted()) return;
    const int64_t position = runner.read++;
    for (int64_t image = 0; position && image < runner.batch(); image++)
        runner.recent(image)[(position - 1) % runner.reach()] =
            static_cast<int16_t>(runner.values_of(image)[runner.known - 1]);
    step(runner.program, position);
}

// Whether row number `row` of a pass has finite parameters.
bool is_finite(const lintx_runner& runner, int64_t row) {
    return are_finite(runner.file.distribution.parameters(), runner.parameters(row));
}

// Predicts the next value of every image, if there is one. Returns 0, or -1 if a prediction is not finite.
int64_t predict_next(lintx_runner& runner) {
    if (make_room(runner)) return -1;
    predict(runner);
    for (int64_t image = 0; image < runner.batch(); image++)
        if (!is_finite(runner, image)) return fail(DAMAGED);
    return 0;
}

// Gives the images that repeat others their values up to number `known`.
void repeat(lintx_runner& runner, int64_t known) {
    const int64_t images = runner.images();
    for (int64_t image = images; image < runner.batch(); image++)
        std::copy(runner.values_of(image - images) + runner.known, runner.values_of(image - images) + known,
                  runner.values_of(image) + runner.known);
    runner.known = known;
}

// Calls `use(n, own, free)` for every n below `count` in several threads. `own` are the parameters of the next value of
// image `image_of(n)`, and `free` those without its class, null without guidance. Returns 0, or -1 if one is not
// finite.
template <class ImageOf, class Use>
int64_t use_predictions(const lintx_runner& runner, int64_t threads, int64_t count, ImageOf image_of, Use use) {
    std::atomic<bool> damaged{false};
    spread(threads, count, [&](int64_t n) {
        const int64_t image = image_of(n), again = runner.images() + image;
        const float* free = runner.rows_per_image() == 2 ? runner.parameters(again) : nullptr;
        if (!is_finite(runner, image) || (free && !is_finite(runner, again)))
            return damaged.store(true, std::memory_order_relaxed);
        use(n, runner.parameters(image), free);
    });
    return damaged.load(std::memory_order_relaxed) ? fail(DAMAGED) : 0;
}

// Does the same for every group of the particles.
template <class Use>
int64_t use_groups(const lintx_runner& runner, Use use) {
    const std::vector<Group>& groups = runner.particles.groups;
    const auto image_of = [&](int64_t n) { return groups[n].image; };
    return use_predictions(runner, runner.program.threads, static_cast<int64_t>(groups.size()), image_of, use);
}

// Draws the next value of every image. Returns 0 or -1.
int64_t draw_one(lintx_runner& runner) {
    const Distribution& distribution = runner.file.distribution;
    const int64_t images = runner.images(),
                  work = images * distribution.parameters() * (distribution.mixtures ? distribution.levels : 1);
    predict(runner);
    const auto image_of = [](int64_t image) { return image; };
    const auto use = [&](int64_t image, const float* own, const float* free) {
        runner.values_of(image)[runner.known] = draw(distribution, own, free, runner.uniform(image, 0));
    };
    if (use_predictions(runner, work > 32768 ? runner.program.threads : 1, images, image_of, use)) return -1;
    runner.drawn++;
    repeat(runner, runner.known + 1);
    return 0;
}

// Gives every image of the particles the next value, which is known, and weighs it. Returns 0 or -1.
int64_t take_given(lintx_runner& runner, int64_t value) {
    const auto use = [&](int64_t n, const float* own, const float* free) {
        runner.particles.groups[n].weight += find_log(runner.file.distribution, own, free, value);
    };
    if (use_groups(runner, use)) return -1;
    for (int64_t image = 0; image < runner.images(); image++) runner.values_of(image)[runner.known] = value;
    repeat(runner, runner.known + 1);
    return 0;
}

// Draws the next value of every particle. Those of a group draw with evenly spaced random numbers, so their values
// spread as the distribution does. Returns 0 or -1.
int64_t draw_apart(lintx_runner& runner) {
    Particles& particles = runner.particles;
    if (particles.measure_size() < 0.5 * static_cast<double>(particles.count))
        particles.resample(runner.particle_uniform(particles.count));
    std::vector<std::vector<Drawn>> drawn(particles.groups.size());
    std::vector<int64_t> first{0};
    for (const Group& group : particles.groups) first.push_back(first.back() + group.copies);
    const auto use = [&](int64_t n, const float* own, const float* free) {
        drawn[n] = draw_copies(runner.file.distribution, own, free, particles.groups[n].copies,
                               runner.particle_uniform(first[n]));
    };
    if (use_groups(runner, use)) return -1;
    const std::vector<int64_t> ancestors = particles.part(drawn);
    if (lintx_fork(&runner, static_cast<int64_t>(ancestors.size()), ancestors.data())) return -1;
    size_t next = 0;
    for (const std::vector<Drawn>& values : drawn)
        for (const Drawn& one : values) runner.values_of(particles.groups[next++].image)[runner.known] = one.value;
    runner.drawn++;
    repeat(runner, runner.known + 1);
    return 0;
}

// Draws or takes the next value of every particle. Returns 0 or -1.
int64_t advance_particles(lintx_runner& runner) {
    predict(runner);
    const int64_t given = runner.particles.given[static_cast<size_t>(runner.known)];
    return given < 0 ? draw_apart(runner) : take_given(runner, given);
}

// Draws the next values of a single image, up to number `end`. All positions of a window are computed as if the guesses
// were right. With its random number, each position yields one value. This value is right if all earlier guesses are
// right, so the first value is always right. With guidance, the image has two rows of the batch. Returns 0 or -1.
int64_t draw_ahead(lintx_runner& runner, int64_t end) {
    const LoadedProgram& program = runner.program;
    const Distribution& distribution = runner.file.distribution;
    const int64_t known = runner.known, rows = std::min(runner.ahead, end - known), images = runner.rows_per_image();
    const int64_t start = runner.read;  // position of the next token: it holds the last known value
    int64_t *values = runner.values_of(0), *next = values + known;
    // The first guess for a value is the value above it. Later passes guess the values that were drawn after a wrong
    // guess, which are better guesses.
    const int64_t above = runner.file.channels * runner.file.width;
    for (int64_t index = std::max(runner.guessed, known); index < known + rows - 1; index++)
        values[index] = values[index - (index < above ? 1 : above)];
    const auto pass = [&](int64_t image, int64_t count, Mode mode) {
        return Pass{program, start, image * program.window, count, mode, true, image};
    };
    for (int64_t image = 0; image < images; image++) {
        int16_t* ring = runner.recent(image);
        for (int64_t r = 0; r < rows; r++) ring[(start + r - 1) % runner.reach()] = static_cast<int16_t>(next[r - 1]);
        run(pass(image, rows, TRY));
    }
    int64_t right = 0;
    bool sure = true;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t guess = next[r];  // undefined and unused in the last row
        bool finite = true;
        for (int64_t image = 0; image < images; image++)
            finite = finite && is_finite(runner, image * program.window + r);
        if (!r && !finite) return fail(DAMAGED);
        // A later row with NaN becomes the first row of the next pass.
        sure = sure && finite;
        const float* free = images == 2 ? runner.parameters(program.window + r) : nullptr;
        next[r] = draw(distribution, runner.parameters(r), free, runner.uniform(0, r));
        right += sure;
        sure = sure && next[r] == guess;
    }
    for (int64_t image = 0; image < images; image++) run(pass(image, right, COMMIT));
    runner.guessed = std::max(runner.guessed, known + rows);
    runner.read += right;
    runner.drawn += right;
    runner.look_aheads++;
    // The next pass has one position more than were right in this pass. If all were right, it has twice as many.
    runner.ahead = right < rows ? right + 1 : std::min(2 * rows, program.window);
    repeat(runner, known + right);
    return 0;
}

}  // namespace

extern "C" {

const char* lintx_error(void) { return message.letters(); }

void lintx_close(lintx_runner* runner) { delete runner; }

lintx_runner* lintx_open(const void* file, int64_t bytes, int64_t batch) {
    if (bytes < 0) return refuse("a file has no negative size");
    std::unique_ptr<lintx_runner> runner(new lintx_runner{});
    runner->copy = allocate(bytes);
    if (!runner->copy) return refuse("there is not enough memory");
    if (bytes) std::memcpy(runner->copy.get(), file, static_cast<size_t>(bytes));
    runner->data = runner->copy.get();
    return open(std::move(runner), bytes, batch, true);
}

lintx_runner* lintx_open_in_place(const void* file, int64_t bytes, int64_t batch) {
    if (bytes < 0) return refuse("a file has no negative size");
    if (reinterpret_cast<uintptr_t>(file) % ALIGNMENT) return refuse("the file does not begin at a multiple of 64");
    std::unique_ptr<lintx_runner> runner(new lintx_runner{});
    runner->data = static_cast<const char*>(file);
    return open(std::move(runner), bytes, batch, false);
}

lintx_description lintx_describe(const lintx_runner* runner) {
    const FileProgram& file = runner->file;
    const int64_t layers = static_cast<int64_t>(file.states.size());
    return {file.channels, file.height,     file.width, file.levels, file.classes,
            file.values(), runner->batch(), layers,     file.bands()};
}

void lintx_use_threads(lintx_runner* runner, int64_t threads) {
    runner->program.threads = std::max<int64_t>(1, threads);
}

int64_t lintx_filter(lintx_runner* runner, double temperature, int64_t top_k, double top_p) {
    if (!(temperature > 0 && std::isfinite(temperature))) return fail("a temperature is above 0 and finite");
    if (top_k < 0) return fail("top-k is not negative");
    if (!(top_p >= 0 && top_p <= 1)) return fail("top-p is 0 to 1");
    Distribution& distribution = runner->file.distribution;
    distribution.temperature = temperature;
    distribution.top_k = top_k;
    distribution.top_p = top_p;
    return 0;
}

int64_t lintx_guide(lintx_runner* runner, double weight) {
    if (!(weight >= 0 && weight <= LARGEST_GUIDANCE)) return fail(Text("a guidance is from 0 to ") << LARGEST_GUIDANCE);
    if (weight != 1 && !runner->file.is_class_optional()) return fail("guidance needs a model with an optional class");
    if (weight != 1 && runner->batch() % 2) return fail("with guidance, the batch is twice the number of images");
    runner->guidance = weight;
    return 0;
}

void lintx_draw_without_end(lintx_runner* runner) { runner->endless = true; }

int64_t lintx_resize(lintx_runner* runner, int64_t batch) {
    if (batch < 1 || batch > runner->capacity) return fail("the runner was opened for fewer images");
    if (runner->guidance != 1 && batch % 2) return fail("with guidance, the batch is twice the number of images");
    runner->program.batch = batch;
    return 0;
}

int64_t lintx_start(lintx_runner* runner, uint64_t seed, uint64_t first, const int64_t* labels) {
    const FileProgram& file = runner->file;
    const bool optional = file.is_class_optional();
    const int64_t images = runner->images_with(runner->guidance);
    for (int64_t image = 0; labels && file.classes && image < images; image++)
        if (labels[image] < 0 || labels[image] >= file.label_count())
            return fail(Text("classes are 0 to ") << file.classes - 1);
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
    std::iota(runner->numbers.begin(), runner->numbers.end(), first);
    runner->file.distribution.guidance = runner->guidance;
    runner->seed = seed;
    runner->first = 1;
    runner->read = runner->known = runner->drawn = runner->guessed = runner->look_aheads = 0;
    runner->ahead = file.window;
    runner->particles.count = 0;
    return 0;
}

int64_t lintx_keep(lintx_runner* runner, int64_t particles, const int64_t* given) {
    if (runner->images() != 1) return fail("given values are kept around one image, which becomes the particles");
    if (particles < 1 || particles * runner->rows_per_image() > runner->capacity)
        return fail("the runner was opened for fewer images");
    for (int64_t n = 0; n < runner->count(); n++)
        if (given[n] < -1 || given[n] >= runner->file.levels)
            return fail(Text("values are 0 to ") << runner->file.levels - 1 << ", or -1 if they are to be drawn");
    const double count = static_cast<double>(particles);
    runner->particles = {particles, {given, given + runner->count()}, {{0, particles, 0}}, 0, count};
    return 0;
}

int64_t lintx_pick(const lintx_runner* runner, double* figures) {
    const Particles& particles = runner->particles;
    if (!particles.count) return fail("no values are kept");
    figures[0] = particles.find_evidence() / -0.6931471805599453;
    figures[1] = particles.measure_size();
    figures[2] = std::min(particles.fewest, figures[1]);
    return particles.choose(runner->particle_uniform(particles.count));
}

int64_t lintx_seed(lintx_runner* runner, uint64_t seed, const uint64_t* numbers, int64_t drawn) {
    runner->file.distribution.guidance = runner->guidance;
    std::copy_n(numbers, runner->images(), runner->numbers.begin());
    runner->seed = seed;
    runner->drawn = drawn;
    return 0;
}

int64_t lintx_place(lintx_runner* runner, int64_t tokens) {
    if (tokens < 0) return fail("there is no negative number of tokens");
    if (!runner->endless && tokens > runner->count()) return fail("an image has fewer values");
    runner->first = std::max<int64_t>(tokens, 1);
    runner->read = tokens;
    runner->known = runner->guessed = 0;
    return 0;
}

int64_t lintx_fork(lintx_runner* runner, int64_t images, const int64_t* ancestors) {
    const int64_t before = runner->images(), each = runner->rows_per_image();
    if (images < 1 || images * each > runner->capacity) return fail("the runner was opened for fewer images");
    std::vector<int64_t> sources;
    for (int64_t row = 0; row < images * each; row++) {
        const int64_t ancestor = ancestors[row % images];
        if (ancestor < 0 || ancestor >= before) return fail("the batch has no such image");
        sources.push_back(row / images * before + ancestor);
    }
    const std::vector<Share> shares = list_shares(*runner);
    const std::vector<Move> moves = order_moves(sources, runner->batch());
    spread(runner->program.threads, static_cast<int64_t>(shares.size()), [&](int64_t n) {
        const Share& share = shares[n];
        for (const Move& move : moves)
            if (move.swaps) std::swap_ranges(share.of(move.to), share.of(move.to) + share.bytes, share.of(move.from));
            else std::memcpy(share.of(move.to), share.of(move.from), static_cast<size_t>(share.bytes));
    });
    runner->program.batch = images * each;
    return 0;
}

int64_t lintx_continue(lintx_runner* runner, const lintx_runner* other) {
    if (runner->file.distribution.is_guided() != other->file.distribution.is_guided())
        return fail("one runner has guidance and the other has none");
    if (runner->bytes != other->bytes || std::memcmp(runner->data, other->data, runner->bytes))
        return fail("the runners have different programs");
    runner->first = other->first;
    runner->read = other->read;
    runner->known = other->known;
    runner->drawn = other->drawn;
    const std::vector<Share> to = list_shares(*runner), from = list_shares(*other);
    for (int64_t row = 0; row < runner->batch(); row++) {
        const int64_t source = row < runner->images() ? 0 : other->images();
        for (size_t n = 0; n < to.size(); n++)
            std::memcpy(to[n].of(row), from[n].of(source), static_cast<size_t>(to[n].bytes));
    }
    return 0;
}

int64_t lintx_draw(lintx_runner* runner, int64_t count, int64_t steps) {
    if (make_room(*runner)) return -1;
    const int64_t before = runner->known, last = runner->particles.count ? runner->count() : runner->limit();
    const int64_t end = before + std::min(count, last - before);
    for (; steps > 0 && runner->known < end; steps--) {
        if (runner->particles.count) {
            if (advance_particles(*runner)) return -1;
            continue;
        }
        const bool ahead = runner->images() == 1 && runner->file.window > 1 && runner->known && !runner->is_predicted();
        if (ahead ? draw_ahead(*runner, end) : draw_one(*runner)) return -1;
    }
    return runner->known - before;
}

int64_t lintx_draw_next(lintx_runner* runner) {
    return lintx_draw(runner, runner->count(), 1) < 0 ? -1 : runner->known;
}

int64_t lintx_give_next(lintx_runner* runner, const int64_t* values) {
    for (int64_t image = 0; image < runner->images(); image++)
        if (values[image] < 0 || values[image] >= runner->file.levels)
            return fail(Text("values are 0 to ") << runner->file.levels - 1);
    if (predict_next(*runner)) return -1;
    for (int64_t image = 0; image < runner->images(); image++) runner->values_of(image)[runner->known] = values[image];
    repeat(*runner, runner->known + 1);
    return runner->known;
}

int64_t lintx_read(lintx_runner* runner, const int64_t* tokens) {
    const FileProgram& file = runner->file;
    const bool begins = !runner->read;
    const int64_t count = begins ? file.label_count() : file.levels;
    for (int64_t image = 0; image < runner->batch() && !(begins && !file.classes); image++)
        if (tokens[image] < 0 || tokens[image] >= count)
            return fail(Text(begins ? "classes are 0 to " : "values are 0 to ") << count - 1);
    if (!begins) runner->known = runner->read - runner->first;
    for (int64_t image = 0; image < runner->batch(); image++)
        if (!begins) runner->values_of(image)[runner->known] = tokens[image];
        else if (file.classes) *runner->memory<int64_t>(file.label, image) = tokens[image];
    runner->known += !begins;
    if (make_room(*runner)) return -1;
    predict(*runner);
    return 0;
}

int64_t lintx_probabilities(lintx_runner* runner, int64_t image, double* probabilities) {
    if (image < 0 || image >= runner->batch()) return fail("the batch has no such image");
    if (predict_next(*runner)) return -1;
    const Distribution& distribution = runner->file.distribution;
    find_logs(distribution, runner->parameters(image), probabilities);
    exponentiate(distribution.levels, probabilities, 1);
    const double total = std::accumulate(probabilities, probabilities + distribution.levels, 0.0);
    std::for_each(probabilities, probabilities + distribution.levels, [&](double& share) { share /= total; });
    return 0;
}

int64_t lintx_frequencies(lintx_runner* runner, double* frequencies) {
    if (make_room(*runner)) return -1;
    predict(*runner);
    const int64_t stride = runner->parameters(1) - runner->parameters(0);
    const Distribution& distribution = runner->file.distribution;
    const int64_t threads = runner->program.threads;
    const int64_t damaged =
        find_frequencies(distribution, threads, runner->batch(), runner->parameters(0), stride, frequencies);
    return damaged ? fail(DAMAGED) : 0;
}

void lintx_choose(const lintx_runner* runner, int64_t rows, const float* parameters, int64_t stride,
                  const double* uniforms, int64_t* values) {
    Distribution distribution = runner->file.distribution;
    distribution.guidance = runner->guidance;
    for (int64_t row = 0; row < rows; row++) {
        const float* own = parameters + row * stride;
        values[row] = draw(distribution, own, distribution.is_guided() ? own + rows * stride : nullptr, uniforms[row]);
    }
}

const int64_t* lintx_values(const lintx_runner* runner, int64_t image) { return runner->values_of(image); }

int64_t lintx_known(const lintx_runner* runner) { return runner->known; }

int64_t lintx_look_aheads(const lintx_runner* runner) { return runner->look_aheads; }

void lintx_pixels(const lintx_runner* runner, int64_t image, uint8_t* pixels) {
    const std::vector<int64_t>& palette = runner->file.palette;
    const int64_t most = runner->file.levels - 1, *values = lintx_values(runner, image);
    for (int64_t n = 0; n < runner->count(); n++) {
        const int64_t value = n < runner->known ? values[n] : 0;
        if (palette.empty()) pixels[n] = static_cast<uint8_t>((value * 255 + most - 1) / most);
        else std::memcpy(pixels + 4 * n, n < runner->known ? &palette[value] : &value, 4);
    }
}

int64_t lintx_palette(const lintx_runner* runner, uint8_t* colours) {
    const std::vector<int64_t>& palette = runner->file.palette;
    for (size_t n = 0; n < palette.size(); n++) std::memcpy(colours + 4 * n, &palette[n], 4);
    return static_cast<int64_t>(palette.size());
}

const void* lintx_state(const lintx_runner* runner, int64_t image, int64_t layer, int64_t number, int64_t* bytes) {
    const std::vector<std::vector<int64_t>>& states = runner->file.states;
    const bool exists = image >= 0 && image < runner->batch() && layer >= 0 && number >= 0 &&
                        layer < static_cast<int64_t>(states.size()) &&
                        number < static_cast<int64_t>(states[layer].size());
    if (!exists) return fail("there is no such state"), nullptr;
    const int64_t buffer = states[layer][number];
    *bytes = runner->file.buffers[buffer].bytes();
    return runner->memory<char>(buffer, image);
}

void* lintx_buffer(lintx_runner* runner, int64_t buffer, int64_t* bytes) {
    if (buffer < 0 || buffer >= static_cast<int64_t>(runner->buffers.size()))
        return fail("there is no such buffer"), nullptr;
    *bytes = runner->file.buffers[buffer].bytes();
    return runner->buffers[buffer].data;
}
}
