// Runs the program of a recurrent step (program.h) on the CPU.

#include <cstdint>
#include <cstring>

#include "drawing.h"
#include "operations.h"
#include "program.h"

namespace {

// Runs the operations from `first` up to `end`.
void run(const Pass& pass, int64_t first, int64_t end) {
    for (int64_t index = first; index < end; index++) {
        const Operation& op = pass.program.operations[index];
        const Entry& entry = ENTRIES[op.code];
        if (pass.mode != COMMIT || entry.commits) entry.run(pass, op);
    }
}

void run(const Pass& pass) {
    const Program& program = pass.program;
    if (program.blocks && pass.position % program.stride == 0) {
        Pass unit = pass;
        unit.position /= program.stride;
        run(unit, 0, program.blocks);
    }
    run(pass, program.blocks, program.count);
}

// A few images form one pass, and all threads share each operation. Many images are divided: each thread takes its own
// images through the whole program without waiting, so its intermediate results stay in its own cache.
void step(const Program& program, int64_t position) {
    if (!program.divided) return run(Pass{program, position, 0, program.batch, STEP, true});
    const int64_t share = (program.batch + program.threads - 1) / program.threads;
    spread(program.threads, program.threads, [&](int64_t thread) {
        const int64_t first = thread * share, left = program.batch - first, rows = left < share ? left : share;
        if (rows > 0) run(Pass{program, position, first, rows, STEP, false});
    });
}

// Draws the next values of one image. All positions of a window are computed as if the guesses were right. With its
// random number, each position yields one value. This value is right if all earlier guesses are right, so the first
// value is always right.
void look_ahead(const Program& program, Drawing& drawing) {
    const int64_t known = drawing.known, left = drawing.count - known;
    const int64_t rows = left < drawing.rows ? left : drawing.rows;
    const int64_t start = drawing.first + known - 1;  // position of the next token: it holds the last known value
    int64_t* next = drawing.values + known;
    // The first guess for a value is the value above it. Later passes guess the values that were drawn after a wrong
    // guess, which are better guesses.
    for (int64_t& index = drawing.guessed; index < known + rows - 1; index++)
        drawing.values[index] = drawing.values[index - (index < drawing.row ? 1 : drawing.row)];
    const int64_t images = drawing.head.is_guided() ? 2 : 1;
    const auto pass = [&](int64_t image, int64_t count, Mode mode) {
        return Pass{program, start, image * program.window, count, mode, true, image};
    };
    for (int64_t image = 0; image < images; image++) {
        const Pass attempt = pass(image, rows, TRY);
        int16_t* ring = attempt.at<int16_t>(drawing.ring, 0);
        for (int64_t r = 0; r < rows; r++) ring[(start + r - 1) % drawing.reach] = static_cast<int16_t>(next[r - 1]);
        run(attempt);
    }
    const Pass found = pass(0, rows, TRY);
    const int64_t stride = program.window * found.stride<float>(drawing.output);  // from one image to the other
    int64_t right = 0;
    bool sure = true;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t guess = next[r];  // undefined and unused in the last row
        const float* own = found.at<float>(drawing.output, r);
        // The caller checks the first row of a pass, so a row with NaN must be the first of the next pass.
        for (int64_t image = 0; r && image < images; image++)
            sure = sure && are_finite(drawing.head.parameters(), own + image * stride);
        draw(drawing.head, 1, own, stride, drawing.uniforms + known + r, next + r);
        right += sure;
        sure = sure && next[r] == guess;
    }
    for (int64_t image = 0; image < images; image++) run(pass(image, right, COMMIT));
    drawing.guessed = known + rows > drawing.guessed ? known + rows : drawing.guessed;
    drawing.known += right;
    drawing.passes++;
    // The next pass has one position more than were right in this pass. If all were right, it has twice as many.
    drawing.rows = right < rows ? right + 1 : 2 * rows < program.window ? 2 * rows : program.window;
}

}  // namespace

extern "C" {

// The code of the operation `name`, or -1 if there is none.
int64_t lintx_find_operation(const char* name) { return find_operation(name); }

// The sizes of the structures that Python also declares.
void lintx_sizes(int64_t* sizes) {
    const int64_t found[] = {sizeof(Buffer), sizeof(Operation), sizeof(Program), sizeof(Head), sizeof(Drawing)};
    std::memcpy(sizes, found, sizeof found);
}

void lintx_step(const Program* program, int64_t position) { step(*program, position); }

// Draws values [rows]; drawing.h explains the arguments.
void lintx_draw(const Head* head, int64_t rows, const float* parameters, int64_t stride, const double* uniforms,
                int64_t* values) {
    draw(*head, rows, parameters, stride, uniforms, values);
}

// Runs `passes` look-ahead passes, or fewer once all values of the image are known.
void lintx_look_ahead(const Program* program, Drawing* drawing, int64_t passes) {
    for (; passes > 0 && drawing->known < drawing->count; passes--) look_ahead(*program, *drawing);
}
}
