/* Draws images with a program file that `lintx export` wrote. A C interface; runner.cpp implements it, and every driver
 * uses it: C and C++ programs such as draw.cpp, the page of `lintx demo`, and the engine `native` of `lintx`.
 *
 * A runner draws a batch of images value by value. The values of an image are in raster order, with the channels of a
 * pixel adjacent. With the same seed, filters and guidance, the images are those of `lintx sample --precision int8`.
 * Functions that can fail return null or -1, and `lintx_error` says why. A runner may not be used by two threads at
 * the same time. docs/guide/embed.md explains how to compile and use it.
 */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LINTX_VERSION "0.1.0" /* of lintx; program files of the same version fit */

typedef struct lintx_runner lintx_runner;

typedef struct {
    int64_t channels, height, width, levels; /* a value is an integer from 0 to levels - 1 */
    int64_t classes;                         /* 0 if the model has no classes */
    int64_t values;                          /* of an image: channels * height * width */
    int64_t batch, layers;
    int64_t bands; /* of a pixel of `lintx_pixels`: the channels, or 4 if a value is the number of a colour */
} lintx_description;

/* Makes a runner for `batch` images from the `bytes` bytes of a program file, which are copied. */
lintx_runner* lintx_open(const void* file, int64_t bytes, int64_t batch);

/* Does the same without a copy, and without verifying the checksum. The file must begin at a multiple of 64 bytes, and
 * must stay unchanged until the runner is closed. */
lintx_runner* lintx_open_in_place(const void* file, int64_t bytes, int64_t batch);

void lintx_close(lintx_runner* runner);

/* The last error of this thread. */
const char* lintx_error(void);

lintx_description lintx_describe(const lintx_runner* runner);

/* Lets up to `threads` threads work on a step. At first there is one. */
void lintx_use_threads(lintx_runner* runner, int64_t threads);

/* Changes the distributions of all values that are drawn from now on, as --temperature, --top-k and --top-p of
 * `lintx sample` do. At first they are 1, 0 and 0, which change nothing. Returns 0. */
int64_t lintx_filter(lintx_runner* runner, double temperature, int64_t top_k, double top_p);

/* Sets the guidance from the next `lintx_start` on, as --guidance of `lintx sample` does; 1 turns it off. With
 * guidance, the batch holds each image twice: the first half with their classes, the second half without. The second
 * half repeats the values of the first, so only the first half of `labels` and of given values is read. Returns 0. */
int64_t lintx_guide(lintx_runner* runner, double weight);

/* Begins images number first, first + 1 and so on. `labels` [batch] holds their classes. If the class is optional, the
 * label `classes` stands for no class, and this is the default. Otherwise, image n has class n modulo the number of
 * classes by default. Returns 0. */
int64_t lintx_start(lintx_runner* runner, uint64_t seed, uint64_t first, const int64_t* labels);

/* Lets every image of a runner continue where the first image of `other` is, whose program must be the same: a
 * beginning is read once, and completed in several ways. Both runners have guidance, or neither. The runner keeps its
 * own seed and image numbers. Returns 0. */
int64_t lintx_continue(lintx_runner* runner, const lintx_runner* other);

/* Lets image i of `images` images continue where image ancestors[i] is: it takes over the state, the values and the
 * prediction, in place. Any image may be the ancestor of several others, or of none. With guidance, the second half of
 * the batch follows the first. The batch becomes as large as needed, up to the batch of `lintx_open`; to read a
 * beginning once, `lintx_resize` makes it smaller before. Returns 0. */
int64_t lintx_fork(lintx_runner* runner, int64_t images, const int64_t* ancestors);

/* Lets a runner work on the first `batch` images only, up to the batch of `lintx_open`. Returns 0. */
int64_t lintx_resize(lintx_runner* runner, int64_t batch);

/* Lets the images draw the random numbers of images `numbers` from now on, beginning with number `drawn` of each. There
 * is one number for each image, or with guidance for each image of the first half. A new guidance begins here, too.
 * Returns 0. */
int64_t lintx_seed(lintx_runner* runner, uint64_t seed, const uint64_t* numbers, int64_t drawn);

/* Lets `lintx_draw` keep the values of `given` [values] that are not -1, wherever they are, and draw the others:
 * sequential Monte Carlo with `particles` images. They begin as one image, so the batch has one image now, or two with
 * guidance, and the runner was opened for `particles` times as many. Given values are weighed with guidance, but before
 * `lintx_filter`. The random numbers are those of one image. It ends with the next `lintx_start`. Returns 0. */
int64_t lintx_keep(lintx_runner* runner, int64_t particles, const int64_t* given);

/* Returns the number of an image of the batch: one particle, chosen in proportion to its weight. `figures` [3] receives
 * an estimate of the bits of the values given so far, the effective sample size, and the smallest one so far. */
int64_t lintx_pick(const lintx_runner* runner, double* figures);

/* Lets the runner draw more values than an image has, if the program has no bound: no operation depends on the
 * position. The runner then forgets old values. */
void lintx_draw_without_end(lintx_runner* runner);

/* Draws up to `count` values of every image, and fewer if that takes more than `steps` steps or if an image is
 * complete. Returns the number of values drawn. With look-ahead (see below), a step draws several values. */
int64_t lintx_draw(lintx_runner* runner, int64_t count, int64_t steps);

/* Draws the next value of every image, and returns the number of values known so far. For a single image, one call may
 * draw several values with little more work than one (look-ahead); the image is the same. */
int64_t lintx_draw_next(lintx_runner* runner);

/* Does the same with given values [batch], to complete images whose first values are known. */
int64_t lintx_give_next(lintx_runner* runner, const int64_t* values);

/* Reads the next token [batch] of every image of the batch: first its class, which is ignored if there are no classes,
 * and then its values. A value that was drawn but not read yet is replaced. Returns 0; a prediction that is not a
 * finite number is no error here. */
int64_t lintx_read(lintx_runner* runner, const int64_t* tokens);

/* Writes the probabilities [levels] of the next value of an image before guidance and filters, and returns 0. The next
 * `lintx_draw_next` then draws one value. */
int64_t lintx_probabilities(lintx_runner* runner, int64_t image, double* probabilities);

/* Writes the distribution of the next value of every image as integers for an entropy coder, [batch, levels]: the
 * frequencies minus 1, which add up to 2^24 - levels. Returns 0. */
int64_t lintx_frequencies(lintx_runner* runner, double* frequencies);

/* Draws values [rows] from parameters [rows, stride] with uniform numbers [rows] in [0, 1), by the runner's filters.
 * With guidance, another `rows` rows of parameters follow, for the same images without their class. */
void lintx_choose(const lintx_runner* runner, int64_t rows, const float* parameters, int64_t stride,
                  const double* uniforms, int64_t* values);

/* The values of an image. Only the known ones are defined. */
const int64_t* lintx_values(const lintx_runner* runner, int64_t image);

/* The number of known values of each image. */
int64_t lintx_known(const lintx_runner* runner);

/* The number of steps with look-ahead since `lintx_start`. */
int64_t lintx_look_aheads(const lintx_runner* runner);

/* Writes an image with brightnesses 0 to 255, [height, width, bands]: grey, RGB or RGBA. Unknown values are 0. */
void lintx_pixels(const lintx_runner* runner, int64_t image, uint8_t* pixels);

/* Writes the colour of every value, RGBA [levels, 4], and returns `levels`, or returns 0 if values are brightnesses. */
int64_t lintx_palette(const lintx_runner* runner, uint8_t* colours);

/* The bytes of state number `number` of a layer, for one image. They change with every step. Most states are floats.
 * `bytes` receives their number. Returns null if there is no such state. */
const void* lintx_state(const lintx_runner* runner, int64_t image, int64_t layer, int64_t number, int64_t* bytes);

/* The memory of a buffer of the program: `bytes` receives the bytes of an image, and those of the next image follow.
 * Returns null if there is no such buffer. */
void* lintx_buffer(lintx_runner* runner, int64_t buffer, int64_t* bytes);

/* Declares that the caller has written the states of images that have read `tokens` tokens, and the parameters of their
 * next value unless `tokens` is 0. Known values become unknown. Returns 0. */
int64_t lintx_place(lintx_runner* runner, int64_t tokens);

#ifdef __cplusplus
}
#endif
