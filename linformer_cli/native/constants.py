"""Numbers that Python and C++ share. Each is passed to every C++ file as a macro, LINTX_<name>."""

# The feature maps of linear attention that have compiled kernels, and their numbers. Their features are never negative.
# Other maps stay in plain torch: with negative features, the terms of a denominator may nearly cancel, and the plain
# torch form rounds numerator and denominator in the same way.
COMPILED_MAPS = {"elu": 0, "relu": 1}
# The feature maps that the native engine supports.
STEP_MAPS = COMPILED_MAPS | {"poly2": 2, "taylor2": 3, "learned": 4}

# Differences of neighbouring values are multiplied by this factor, so that most of them are not much smaller than the
# network's other inputs.
DIFFERENCE_SCALE = 8
# In packed weights: the number of rows in a panel, and the number of rows in a tile of panels.
LANES, TILE_ROWS = 16, 64
# The largest number of levels of a value, or of logistics in a mixture.
MOST_LEVELS = 1024
# The largest weight of classifier-free guidance.
LARGEST_GUIDANCE = 1000
# The activations and the number formats of a projection. `exact` is float32 whose results have the same bits on every
# processor, for single products of int8 programs.
ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "silu": 3}
FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2, "exact": 3}
# The largest numbers of buffers, integers and real numbers that an operation takes.
BUFFERS, INTEGERS, REALS = 12, 20, 4

# `NeighbourTables` has three tables: for the first two, the first three and all four of the values around a pixel. A
# table has TABLE_ROWS rows of ROW_WIDTH numbers.
NEIGHBOURS, ROW_WIDTH = 4, 8
TABLE_ROWS = (2**16, 2**15, 2**14)
# In the table of pairs, the row is first * PAIR_BASE + second. Larger values count as PAIR_BASE - 1.
PAIR_BASE = 256
# In the other tables, the row is a hash. For each value, key <- (key * base + value + 1) * multiplier; only the bits of
# the mask are kept, and then key ^= key >> the first shift. At the end, key ^= key >> the second shift. The multiplier
# is the golden ratio's fraction in 64 bits, as in Fibonacci hashing (Knuth, TAOCP 3, section 6.4), without the highest
# bit, because that bit is the sign of an int64.
HASH_BASE, HASH_MULTIPLIER, HASH_MASK = 257, 0x1E3779B97F4A7C15, 2**61 - 1
HASH_SHIFT, HASH_LAST_SHIFT = 31, 17


def definitions() -> tuple[str, ...]:
    """Return the compiler arguments that define all constants."""
    values: dict[str, int | str] = {
        **{f"MAP_{name.upper()}": number for name, number in STEP_MAPS.items()},
        "DIFFERENCE_SCALE": DIFFERENCE_SCALE,
        **{"LANES": LANES, "TILE_ROWS": TILE_ROWS, "MOST_LEVELS": MOST_LEVELS},
        "LARGEST_GUIDANCE": LARGEST_GUIDANCE,
        **{f"ACTIVATION_{name.upper()}": number for name, number in ACTIVATIONS.items()},
        **{f"FORMAT_{name.upper()}": number for name, number in FORMATS.items()},
        **{"BUFFERS": BUFFERS, "INTEGERS": INTEGERS, "REALS": REALS},
        **{"NEIGHBOURS": NEIGHBOURS, "ROW_WIDTH": ROW_WIDTH, "TABLE_ROWS": ",".join(map(str, TABLE_ROWS))},
        **{"PAIR_BASE": PAIR_BASE, "HASH_BASE": HASH_BASE, "HASH_MULTIPLIER": HASH_MULTIPLIER, "HASH_MASK": HASH_MASK},
        **{"HASH_SHIFT": HASH_SHIFT, "HASH_LAST_SHIFT": HASH_LAST_SHIFT},
    }
    return tuple(f"-DLINTX_{name}={value}" for name, value in values.items())
