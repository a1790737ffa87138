// The inputs of the `native` engine's kernels. native_layout.py declares the same structures.
#pragma once

#include <cstdint>

#include "neighbour_tables.h"

namespace {  // local to the library that includes it: the compiler may inline all of it

struct Layer {
    const uint32_t *input, *output, *up, *down;  // weights in the layout of `multiply`
    const float *input_bias, *output_bias, *up_bias, *down_bias;
    const float *mid_gain, *mid_shift;  // of the norm after the attention branch
    const float *end_gain, *end_shift;  // of the norm after the feed-forward branch: for `pre`, the next layer's or the last
    float *s, *z;
    float* kept;  // [H, window, K + V], the keys and values of a look-ahead pass
};

// The network that reads the values around a position as numbers (surroundings.py); without it, `slots` is 0.
struct Surroundings {
    int64_t slots, hidden, levels, reach;
    const int32_t* places;  // [T, slots]: the slot of the ring that holds each value, -1 for none
    const int16_t* recent;  // [B, reach], the ring of values
    const uint32_t *input, *output;
    const float *input_bias, *output_bias;
};

struct Network {
    int64_t batch, width, heads, key_width, value_width, feed_forward, layers, outputs;
    int64_t pre, gelu, map, half;  // half: weights are bfloat16
    int64_t shares;                 // the number of threads that divide the images; see `step`
    int64_t widest, scratch_width;  // rows of the widest product; floats of scratch per image, initialised to 0
    const Layer* layer;
    const float *first_gain, *first_shift;  // of the norm before all layers, or null
    const float *last_gain, *last_shift;    // of the norm after all layers, which follows the last layer's own, or null
    Surroundings around;
    Tables tables;
    const uint32_t* head;
    const float* head_bias;
    float* scratch;
    int64_t window;  // the most positions of one image in a pass
    float* trial;    // [H, K, V + 1], the state of a layer during a look-ahead pass
};

// A single image drawn with look-ahead: its tables, random numbers, values and progress.
struct Drawing {
    int64_t sources, reach, levels, row;  // tables that a position reads; length of the ring; levels; values in a row of the image
    const int32_t* slots;                 // [T, sources]; this and the next three are as in `lintx_embed`
    int16_t* recent;
    const float *table, *place;
    const float* label;  // [D], the vector of the image's class, or null
    int64_t mixtures;    // 0: the head is categorical
    double lowest, highest;  // bounds of a logistic's log scale
    const double* uniforms;  // [count], one for each value
    int64_t* values;         // [count]: known ones, then guesses up to number `guessed`, then undefined
    float *x, *out;          // scratch, [window, D] and [window, outputs]
    int64_t count, known, guessed;
    int64_t first;     // position of the token that holds values[0]
    int64_t rows;      // positions in the next pass
    int64_t passes;    // passes so far
};

}  // namespace
