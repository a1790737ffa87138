// Runs the program of a recurrent step (program.h) on the CPU.

#include <cstdint>
#include <cstring>

#include "drawing.h"
#include "ops/join.h"
#include "ops/look_up.h"
#include "ops/lstm.h"
#include "ops/mix_compress.h"
#include "ops/mix_convolution.h"
#include "ops/mix_deltanet.h"
#include "ops/mix_flash.h"
#include "ops/mix_gau.h"
#include "ops/mix_gla.h"
#include "ops/mix_linear.h"
#include "ops/mix_linformer.h"
#include "ops/mix_log_linear.h"
#include "ops/mix_lsh.h"
#include "ops/mix_mamba.h"
#include "ops/mix_mesa.h"
#include "ops/mix_mlstm.h"
#include "ops/mix_nystrom.h"
#include "ops/mix_performer.h"
#include "ops/mix_probsparse.h"
#include "ops/mix_retention.h"
#include "ops/mix_rows.h"
#include "ops/mix_rwkv7.h"
#include "ops/mix_sines.h"
#include "ops/mix_single_head.h"
#include "ops/normalise.h"
#include "ops/project.h"
#include "ops/short_convolution.h"
#include "program.h"

namespace {

struct Entry {
    const char* name;
    void (*run)(const Pass&, const Operation&);
    bool has_state;  // operations with a state also run in COMMIT
};

const Entry ENTRIES[] = {
    {"embed", embed, false},
    {"look_around", look_around, false},
    {"take_differences", take_differences, false},
    {"add_predictions", add_predictions, false},
    {"look_up", look_up, false},
    {"project", project, false},
    {"join", join, false},
    {"add", add, false},
    {"gate", gate, false},
    {"copy", copy, false},
    {"fold", fold, false},
    {"normalise", normalise, false},
    {"short_convolution", short_convolution, true},
    {"lstm", lstm, true},
    {"mix.compress", mix_compress, true},
    {"mix.convolution", mix_convolution, true},
    {"mix.deltanet", mix_deltanet, true},
    {"mix.flash", mix_flash, true},
    {"mix.gau", mix_gau, true},
    {"mix.gla", mix_gla, true},
    {"mix.linear", mix_linear, true},
    {"mix.linformer", mix_linformer, true},
    {"mix.log_linear", mix_log_linear, true},
    {"mix.lsh", mix_lsh, true},
    {"mix.mamba", mix_mamba, true},
    {"mix.mesa", mix_mesa, true},
    {"mix.mlstm", mix_mlstm, true},
    {"mix.norm_heads", mix_norm_heads, false},
    {"mix.nystrom", mix_nystrom, true},
    {"mix.performer", mix_performer, true},
    {"mix.performer_trig", mix_performer_trig, true},
    {"mix.probsparse", mix_probsparse, true},
    {"mix.retention", mix_retention, true},
    {"mix.rfa", mix_rfa, true},
    {"mix.rows", mix_rows, true},
    {"mix.rwkv7", mix_rwkv7, true},
    {"mix.single_head", mix_single_head, true},
};

// Runs the operations from `first` up to `end`.
void run(const Pass& pass, int64_t first, int64_t end) {
    for (int64_t index = first; index < end; index++) {
        const Operation& op = pass.program.operations[index];
        const Entry& entry = ENTRIES[op.code];
        if (pass.mode != COMMIT || entry.has_state) entry.run(pass, op);
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
    const Pass pass{program, start, 0, rows, TRY, true};
    int16_t* ring = pass.at<int16_t>(drawing.ring, 0);
    for (int64_t r = 0; r < rows; r++) ring[(start + r - 1) % drawing.reach] = static_cast<int16_t>(next[r - 1]);
    run(pass);
    int64_t right = 0;
    bool sure = true;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t guess = next[r];  // undefined and unused in the last row
        draw(drawing.head, 1, pass.at<float>(drawing.output, r), 0, drawing.uniforms + known + r, next + r);
        right += sure;
        sure = sure && next[r] == guess;
    }
    run(Pass{program, start, 0, right, COMMIT, true});
    drawing.guessed = known + rows > drawing.guessed ? known + rows : drawing.guessed;
    drawing.known += right;
    drawing.passes++;
    // The next pass has one position more than were right in this pass. If all were right, it has twice as many.
    drawing.rows = right < rows ? right + 1 : 2 * rows < program.window ? 2 * rows : program.window;
}

}  // namespace

extern "C" {

// The code of the operation `name`, or -1 if there is none.
int64_t lintx_find_operation(const char* name) {
    for (size_t code = 0; code < sizeof ENTRIES / sizeof *ENTRIES; code++)
        if (!std::strcmp(ENTRIES[code].name, name)) return static_cast<int64_t>(code);
    return -1;
}

// The sizes of the structures that Python also declares.
void lintx_sizes(int64_t* sizes) {
    const int64_t found[] = {sizeof(Buffer), sizeof(Operation), sizeof(Program), sizeof(Head), sizeof(Drawing)};
    std::memcpy(sizes, found, sizeof found);
}

void lintx_step(const Program* program, int64_t position) { step(*program, position); }

// Draws a value for each row of parameters [rows, stride] with uniforms [rows] in [0, 1).
void lintx_draw(const Head* head, int64_t rows, const float* parameters, int64_t stride, const double* uniforms,
                int64_t* values) {
    draw(*head, rows, parameters, stride, uniforms, values);
}

// Runs `passes` look-ahead passes, or fewer once all values of the image are known.
void lintx_look_ahead(const Program* program, Drawing* drawing, int64_t passes) {
    for (; passes > 0 && drawing->known < drawing->count; passes--) look_ahead(*program, *drawing);
}
}
