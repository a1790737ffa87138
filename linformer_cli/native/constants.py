"""Numbers that Python and C++ share. Every C++ file is compiled with each of them as a macro, LINTX_<name>."""

# The compiled feature maps of linear attention and their numbers. Their features are never negative. Where
# features may be negative, denominators may nearly cancel; the textbook form then rounds both parts the same way.
FEATURE_MAPS = {"elu": 0, "relu": 1}

# For packed weights: the rows of a panel, and the rows of a tile of panels.
LANES, TILE_ROWS = 16, 64
# The most values, or logistics, that a value is drawn from.
MOST_LEVELS = 1024
# The activations of a projection, and the arguments of an operation: buffers, integers and real numbers.
ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "silu": 3}
BUFFERS, INTEGERS, REALS = 12, 20, 4

# For `NeighbourTables`: the number of values, and the tables for the first two values, the first three and all four.
NEIGHBOURS, ROW_WIDTH = 4, 8
TABLE_ROWS = (2**16, 2**15, 2**14)
# The hash of these tables is key <- (key * base + value + 1) * multiplier, of which the masked bits are kept. Then
# key ^= key >> one shift after each value, and key ^= key >> the other shift at the end. The multiplier is the golden
# ratio's fraction in 64 bits, as in Fibonacci hashing (Knuth, TAOCP 3, section 6.4), without the highest bit, which is
# the sign of an int64.
HASH_BASE, HASH_MULTIPLIER, HASH_MASK = 257, 0x1E3779B97F4A7C15, 2**61 - 1
HASH_SHIFT, HASH_LAST_SHIFT = 31, 17

_NAMES = (
    *("LANES", "TILE_ROWS", "MOST_LEVELS", "BUFFERS", "INTEGERS", "REALS", "NEIGHBOURS", "ROW_WIDTH"),
    *("HASH_BASE", "HASH_MULTIPLIER", "HASH_MASK", "HASH_SHIFT", "HASH_LAST_SHIFT"),
)


def definitions() -> tuple[str, ...]:
    """The compiler's arguments that define all constants."""
    values = {name: globals()[name] for name in _NAMES}
    values |= {f"MAP_{name.upper()}": number for name, number in FEATURE_MAPS.items()}
    values |= {f"ACTIVATION_{name.upper()}": number for name, number in ACTIVATIONS.items()}
    values["TABLE_ROWS"] = ",".join(map(str, TABLE_ROWS))
    return tuple(f"-DLINTX_{name}={value}" for name, value in values.items())
