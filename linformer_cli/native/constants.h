// Numbers that C++ and Python share. They are written only here: constants.py reads this file.
#pragma once

#include <cstdint>

// The feature maps that the native engine supports. The first two have kernels. Their features are never negative:
// with negative features, the terms of a denominator may nearly cancel, and the plain torch form rounds numerator and
// denominator in the same way.
enum FeatureMap { ELU_MAP = 0, RELU_MAP = 1, POLY2_MAP = 2, TAYLOR2_MAP = 3, LEARNED_MAP = 4 };

// The activations and the number formats of a projection. EXACT is float32 whose results have the same bits on every
// processor, for single products of int8 programs.
enum Activation { NONE = 0, RELU = 1, GELU = 2, SILU = 3 };
enum Format { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, EXACT = 3 };

// Differences of neighbouring values are multiplied by this factor, so that most of them are not much smaller than the
// network's other inputs.
constexpr int64_t DIFFERENCE_SCALE = 8;

// In the window of pixels around a position: the places of the left and of the upper pixel.
constexpr int64_t LEFT_PLACE = 0, UP_PLACE = 8;

// In packed weights: the number of rows in a panel, and the number of rows in a tile of panels. A panel's rows are the
// lanes of a vector of floats.
constexpr int64_t LANES = 16, TILE_ROWS = 64;

// The largest number of levels of a value, or of logistics in a mixture.
constexpr int64_t MOST_LEVELS = 1024;

// The largest weight of classifier-free guidance.
constexpr int64_t LARGEST_GUIDANCE = 1000;

// The largest numbers of buffers, integers and real numbers that an operation takes.
constexpr int64_t BUFFERS = 12, INTEGERS = 20, REALS = 4;

// `NeighbourTables` has three tables: for the first two, the first three and all four of the values around a pixel. A
// table has TABLE_ROWS rows of ROW_WIDTH numbers.
constexpr int64_t NEIGHBOURS = 4, ROW_WIDTH = 8;
constexpr int64_t PAIR_ROWS = 0x10000, TRIPLE_ROWS = 0x8000, QUADRUPLE_ROWS = 0x4000;
constexpr int64_t TABLE_ROWS[] = {PAIR_ROWS, TRIPLE_ROWS, QUADRUPLE_ROWS};

// In the table of pairs, the row is first * PAIR_BASE + second. Larger values count as PAIR_BASE - 1.
constexpr uint64_t PAIR_BASE = 256;

// In the other tables, the row is a hash. For each value, key <- (key * base + value + 1) * multiplier; only the bits
// of the mask are kept, and then key ^= key >> the first shift. At the end, key ^= key >> the second shift. The
// multiplier is the golden ratio's fraction in 64 bits, as in Fibonacci hashing (Knuth, TAOCP 3, section 6.4), without
// the highest bit, because that bit is the sign of an int64.
constexpr uint64_t HASH_BASE = 257, HASH_MULTIPLIER = 0x1E3779B97F4A7C15, HASH_MASK = 0x1FFFFFFFFFFFFFFF;
constexpr int HASH_SHIFT = 31, HASH_LAST_SHIFT = 17;
