/* Draws images with a program file that `lintx export` wrote, without Python. A C interface; runner.cpp implements it.
 *
 * A runner draws a batch of images value by value. The values of an image are in raster order, with the channels of a
 * pixel adjacent. With the same seed, filters and guidance, the images are those of `lintx sample --precision int8`.
 * Functions that can fail return null or -1, and `lintx_error` says why. A runner may not be used by two threads at
 * the same time. docs/reference/formats.md explains how to compile it.
 */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lintx_runner lintx_runner;

typedef struct {
    int64_t channels, height, width, levels; /* a value is an integer from 0 to levels - 1 */
    int64_t classes;                         /* 0 if the model has no classes */
    int64_t values;                          /* of an image: channels * height * width */
    int64_t batch, layers;
} lintx_description;

/* Makes a runner for `batch` images from the `bytes` bytes of a program file, which are copied. */
lintx_runner* lintx_open(const void* file, int64_t bytes, int64_t batch);
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

/* Draws the next value of every image, and returns the number of values known so far. For a single image, one call may
 * draw several values with little more work than one (look-ahead); the image is the same. */
int64_t lintx_draw_next(lintx_runner* runner);

/* Does the same with given values [batch], to complete images whose first values are known. */
int64_t lintx_give_next(lintx_runner* runner, const int64_t* values);

/* Writes the probabilities [levels] of the next value of an image before guidance and filters, and returns 0. The next
 * `lintx_draw_next` then draws one value. */
int64_t lintx_probabilities(lintx_runner* runner, int64_t image, double* probabilities);

/* The values of an image. Only the known ones are defined. */
const int64_t* lintx_values(const lintx_runner* runner, int64_t image);

/* Writes an image with brightnesses 0 to 255, [height, width, channels]; unknown values are 0. */
void lintx_pixels(const lintx_runner* runner, int64_t image, uint8_t* pixels);

/* The bytes of state number `number` of a layer, for one image. They change with every step. Most states are floats.
 * `bytes` receives their number. Returns null if there is no such state. */
const void* lintx_state(const lintx_runner* runner, int64_t image, int64_t layer, int64_t number, int64_t* bytes);

#ifdef __cplusplus
}
#endif
