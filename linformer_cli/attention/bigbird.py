"""BigBird attention (Zaheer 2020, arXiv 2007.14062): nearby blocks, the first blocks, and random blocks."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .base import AttentionOptions, AttentionShape, setting
from .parts.spans import Pattern, Span, SpanAttention

_WINDOW = 3  # nearby blocks: the query's block and the two before it
_LARGEST_DEFAULT_BLOCK = 64  # a whole row of a large image would be too large a block


class BigbirdOptions(AttentionOptions):
    block: int | None = setting(None, "positions per block (default: one image row, at most 64)", gt=0, le=65_536)
    globals: int = setting(1, "number of blocks at the start that all later positions see", ge=0, le=65_536)
    random: int = setting(2, "number of random earlier blocks that a block sees, drawn per head", ge=0, le=1_024)
    seed: int = setting(0, "seed of the random blocks, fixed for the life of a model", ge=0, lt=2**63)


class BigbirdAttention(SpanAttention[BigbirdOptions]):
    """y_t = sum over j in S(t) of softmax_j(q_t . k_j / sqrt(K)) v_j.

    Let b be the index of the block that contains t. S(t) holds all j <= t in the blocks b - 2, b - 1 and b, in the
    first `globals` blocks, and in `random` blocks. The random blocks are drawn without replacement from the blocks
    globals .. b - 3; if there are fewer than `random` such blocks, all of them are seen. Each j counts once. The draw
    depends only on (seed, layer, head, b); see `draw_blocks`.

    This is the causal half of the block-sparse pattern of section 2 of the source, with two differences. A query sees
    the two blocks before its own block and none after it. Queries in global blocks see no more than other queries.

    The bidirectional form is that of the source. S(t) holds the blocks b - 1, b and b + 1, the global blocks, and
    `random` other blocks of an image, drawn as above, but none after the end of a sequence. Queries in global blocks
    see all positions.
    """

    name = "bigbird"
    source = "Zaheer 2020, arXiv 2007.14062"
    family = "local-global"
    method = "nearby blocks, first blocks, random blocks"
    bidirectional = True

    def __init__(self, options: BigbirdOptions, shape: AttentionShape) -> None:
        self.block = options.block or min(shape.row, _LARGEST_DEFAULT_BLOCK)
        super().__init__(options, shape, self.block)
        self.sees_all = options.globals * self.block

    def list_patterns(self, position: Tensor, length: int | None = None) -> list[Pattern]:
        options, shape, size, block = self.options, self.shape, self.block, position // self.block
        known = options.globals * size
        before = _WINDOW - 1 if length is None else 1
        # The draw does not depend on the length of a sequence, unless this is longer than an image.
        blocks = -(-max(int(position[-1]) + 1, shape.positions) // size)
        draw = draw_blocks if length is None else draw_other_blocks
        drawn = torch.from_numpy(draw(options.seed, shape.layer, shape.heads, blocks, options.globals, options.random))
        drawn = drawn[:, block]
        spans = [Span(0, 1, known), Span((block - before) * size, 1, _WINDOW * size, low=known)]
        spans += [Span(column * size, 1, torch.where(column >= 0, size, 0)) for column in drawn.unbind(-1)]
        return [Pattern(slice(None), [(1, spans)])]


def draw_blocks(seed: int, layer: int, heads: int, blocks: int, first: int, count: int) -> NDArray[np.int64]:
    """Random blocks [heads, blocks, count]: distinct blocks from first .. b - 3 for each block b, else -1.

    All sets of blocks are equally likely: Floyd's sampling without replacement, by a hash of (seed, layer, head, b,
    column), whose formula docs/reference/attention/bigbird.md gives. An entry depends only on these five numbers,
    `first` and `count`, and not on `blocks` or on the version of a library.
    """
    available = np.maximum(np.arange(blocks) - _WINDOW + 1 - first, 0)
    return _draw(seed, layer, heads, available, first, count)


def draw_other_blocks(seed: int, layer: int, heads: int, blocks: int, first: int, count: int) -> NDArray[np.int64]:
    """As `draw_blocks`, but from `first` on except b - 1, b and b + 1, and dependent on `blocks`."""
    b = np.arange(blocks, dtype=np.int64)
    start = np.maximum(b - 1, first)
    gap = np.maximum(np.minimum(b + 2, blocks) - start, 0)
    drawn = _draw(seed, layer, heads, np.maximum(blocks - first - gap, 0), first, count)
    return np.where(drawn >= start[:, None], drawn + gap[:, None], drawn)


def _draw(seed: int, layer: int, heads: int, available: NDArray[np.int64], first: int, count: int) -> NDArray[np.int64]:
    """Distinct numbers [heads, blocks, count] from `first` on, `available` [blocks] for each block; else -1."""
    columns = np.minimum(available, count)
    drawn = np.full((heads, len(available), count), -1, dtype=np.int64)
    head, b = np.arange(heads, dtype=np.uint64)[:, None], np.arange(len(available), dtype=np.uint64)
    shared = _hash(_hash(_hash(_hash(np.zeros((1, 1), np.uint64), seed), layer), head), b)
    for column in range(count):
        top = np.maximum(available - columns + column, 0)
        upper = _hash(shared, column) >> np.uint64(32)
        number = first + (upper * (top + 1).astype(np.uint64) >> np.uint64(32)).astype(np.int64)
        repeated = (drawn[:, :, :column] == number[:, :, None]).any(axis=-1)
        drawn[:, :, column] = np.where(column < columns, np.where(repeated, first + top, number), -1)
    return drawn


def _hash(state: NDArray[np.uint64], number: "int | NDArray[np.uint64]") -> NDArray[np.uint64]:
    """Mix `number` into `state`, modulo 2^64: splitmix64 with its increment multiplied by number + 1."""
    added = np.asarray(number, dtype=np.uint64).reshape(np.shape(number) or (1, 1)) + np.uint64(1)
    z = state + added * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
