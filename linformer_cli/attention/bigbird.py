"""BigBird attention (Zaheer 2020, arXiv 2007.14062): nearby blocks, the first blocks, and random blocks."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from linformer_cli.documents import setting
from linformer_cli.native.program import MixInputs

from .base import AttentionOptions, AttentionShape, Gates
from .parts.caches import CachedAttention, KeyValueCache, Span, attend_masked, stack_spans
from .parts.key_sets import join_globals, list_blocks, weigh_lists
from .tensors import accumulator_dtype

BigbirdState = KeyValueCache

# Nearby blocks: the query's block and the two before it.
_WINDOW = 3
# A whole row of a large image would be too large a block.
_LARGEST_DEFAULT_BLOCK = 64


class BigbirdOptions(AttentionOptions):
    """Options of BigBird attention."""

    block: int | None = setting(None, "positions per block (default: one image row, at most 64)", gt=0, le=65_536)
    globals: int = setting(1, "number of blocks at the start that all later positions see", ge=0, le=65_536)
    random: int = setting(2, "number of random earlier blocks that a block sees, drawn per head", ge=0, le=1_024)
    seed: int = setting(0, "seed of the random blocks, fixed for the life of a model", ge=0, lt=2**63)


class _Span(NamedTuple):
    """The query blocks first .. last, and the number of random blocks that the last query block sees."""

    first: int
    last: int
    drawn: int


class BigbirdAttention(CachedAttention[BigbirdOptions]):
    """y_t = sum over j in S(t) of softmax_j(q_t . k_j / sqrt(K)) v_j.

    Let b be the index of the block that contains t. S(t) holds all j <= t in the blocks b - 2, b - 1 and b, in the
    first `globals` blocks, and in `random` blocks. The random blocks are drawn without replacement from the blocks
    globals .. b - 3; if there are fewer than `random` such blocks, all of them are seen. Each j counts once. The draw
    depends only on (seed, layer, head, b); see `draw_blocks`.

    This is the causal half of the block-sparse pattern of section 2 of the source, with two differences. A query sees
    the two blocks before its own block and none after it. Queries in global blocks see no more than other queries.

    The bidirectional form is that of the source. S(t) holds the blocks b - 1, b and b + 1, the global blocks, and
    `random` other blocks of an image, drawn as above. Random blocks after the end of a sequence are left out. Queries
    in global blocks see all positions.
    """

    name = "bigbird"
    source = "Zaheer 2020, arXiv 2007.14062"
    family = "local-global"
    method = "nearby blocks, first blocks, random blocks"
    bidirectional = True

    def __init__(self, options: BigbirdOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        self.block = options.block or min(shape.row, _LARGEST_DEFAULT_BLOCK)
        # The random blocks drawn so far [H, blocks, random], and the last result of `_far_rows` with its arguments.
        self._drawn = torch.zeros(shape.heads, 0, options.random, dtype=torch.int64, device="cpu")
        self._step_rows: tuple[tuple[int, int, torch.device], Tensor] | None = None

    def _drawn_blocks(self, blocks: int, device: torch.device) -> Tensor:
        """The random blocks that the first `blocks` blocks see: int64 [H, at least `blocks`, random]."""
        if self._drawn.shape[1] < blocks:
            count = max(blocks, -(-self.shape.positions // self.block))
            options, shape = self.options, self.shape
            drawn = draw_blocks(options.seed, shape.layer, shape.heads, count, options.globals, options.random)
            self._drawn = torch.from_numpy(drawn)
        if self._drawn.device != device:
            self._drawn = self._drawn.to(device)
        return self._drawn

    def attend_cache(self, q: Tensor, cache: KeyValueCache) -> Tensor:
        length, end = q.shape[2], int(cache.position)
        start = end - length
        first, last = start // self.block, (end - 1) // self.block
        span = _Span(first, last, min(self.options.random, max(last - _WINDOW + 1 - self.options.globals, 0)))
        # On a CPU, products of small blocks are slower and less accurate in bfloat16 than in float32.
        wide = accumulator_dtype(q.dtype) if q.device.type == "cpu" else cache.keys.dtype
        keys, values = (self._gather(x[:, :, :end].to(wide), span) for x in (cache.keys, cache.values))
        offset = start - first * self.block
        filled = (last - first + 1) * self.block
        queries = functional.pad(q.to(wide), (0, 0, offset, filled - offset - length))
        queries = queries.reshape(-1, last - first + 1, self.block, q.shape[-1])
        y = attend_masked(queries, keys, values, self._mask(span, q.device))
        return y.reshape(*q.shape[:2], filled, cache.values.shape[-1])[:, :, offset : offset + length]

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, gates: Gates) -> Tensor:
        dtype, options, shape = accumulator_dtype(q.dtype), self.options, self.shape
        length, count = q.shape[2], options.globals
        near = list_blocks(length, self.block, self.block, self.block, q.device)
        # The draw does not depend on the length of the batch, unless this is longer than an image.
        total = -(-max(length, shape.positions) // self.block)
        blocks = draw_other_blocks(options.seed, shape.layer, shape.heads, total, count, options.random)
        drawn = torch.from_numpy(blocks[:, : len(near.queries)]).to(q.device).unsqueeze(-1) * self.block
        drawn = (drawn + torch.arange(self.block, device=q.device)).flatten(2)
        keys = torch.cat([near.keys.expand(shape.heads, -1, -1), drawn], dim=2)
        # Global positions are in a part of their own.
        lists = near._replace(keys=keys, hidden=(keys < count * self.block).unsqueeze(-2))
        q, k, wide = q.to(dtype) * q.shape[-1] ** -0.5, k.to(dtype), v.to(dtype)
        part = weigh_lists(q, k, wide, lists, lengths)
        return join_globals(part, q, k, wide, min(count * self.block, length), lengths)

    def _gather(self, x: Tensor, span: _Span) -> Tensor:
        """The part of x [B, H, T, W] that each query block sees: [B H, query blocks, S, W].

        The S positions belong to the global blocks, the random blocks, the two previous blocks and the query block.
        Slices are used rather than indices where possible, because the gradients of slices are cheaper.
        """
        heads, width, queries = x.shape[1], x.shape[-1], span.last - span.first + 1
        x = functional.pad(x, (0, 0, 0, (span.last + 1) * self.block - x.shape[2]))
        blocks = x.reshape(-1, span.last + 1, self.block, width)
        known = blocks[:, : self.options.globals].flatten(1, 2).unsqueeze(1).expand(-1, queries, -1, -1)
        parts = [known]
        if span.drawn:
            drawn = self._drawn_blocks(span.last + 1, x.device)[:, span.first : span.last + 1, : span.drawn]
            rows = drawn + torch.arange(heads, device=x.device).view(-1, 1, 1) * (span.last + 1)
            by_head = blocks.reshape(len(x), heads * (span.last + 1), self.block, width)
            parts.append(by_head.index_select(1, rows.flatten()).reshape(len(blocks), queries, -1, width))
        before = blocks[:, max(span.first - _WINDOW + 1, 0) :]
        if span.first < _WINDOW - 1:
            before = functional.pad(before, (0, 0, 0, 0, _WINDOW - 1 - span.first, 0))
        parts += [before[:, place : place + queries] for place in range(_WINDOW)]
        return torch.cat(parts, dim=2)

    def _mask(self, span: _Span, device: torch.device) -> Tensor:
        """True for the gathered positions that a query sees, bool [1, query blocks, block, S]."""
        count = self.options.globals
        own = torch.arange(span.first, span.last + 1, device=device).unsqueeze(1)
        place = torch.arange(self.block, device=device)
        # The index of each gathered block, and whether it is used. Random blocks always precede the query's block.
        known = torch.arange(min(count, span.last + 1), device=device).expand(len(own), -1)
        column = torch.arange(span.drawn, device=device)
        nearby = own + torch.arange(1 - _WINDOW, 1, device=device)
        block = torch.cat([known, torch.zeros_like(column).expand(len(own), -1), nearby], dim=1)
        seen = torch.cat([known >= 0, column < own - _WINDOW + 1 - count, nearby >= count], dim=1)
        positions = (block.unsqueeze(-1) * self.block + place).flatten(1)
        causal = positions.unsqueeze(1) <= (own * self.block + place).unsqueeze(-1)
        return (causal & seen.repeat_interleave(self.block, dim=1).unsqueeze(1)).unsqueeze(0)

    def step_cache(self, q_t: Tensor, cache: KeyValueCache, position: int) -> Tensor:
        length, block = position + 1, position // self.block
        if block < self.options.globals + _WINDOW:
            # Up to this block, the global and nearby blocks cover all positions.
            keys, values = cache.keys[:, :, :length], cache.values[:, :, :length]
            y = functional.scaled_dot_product_attention(q_t.to(keys.dtype).unsqueeze(2), keys, values)
            return y.squeeze(2)
        rows, near = self._far_rows(block, cache.keys.shape[2], q_t.device), (block - _WINDOW + 1) * self.block
        wide = accumulator_dtype(q_t.dtype)
        # Far rows must be gathered. Near rows are read in place, because copying them is slow for large batches.
        (far_keys, near_keys), (far_values, near_values) = (
            (
                x.flatten(1, 2).index_select(1, rows.flatten()).unflatten(1, rows.shape).to(wide),
                x[:, :, near:length].to(wide),
            )
            for x in (cache.keys, cache.values)
        )
        q_t = (q_t.to(wide) * q_t.shape[-1] ** -0.5).unsqueeze(2)
        scores = torch.cat([q_t @ far_keys.transpose(-1, -2), q_t @ near_keys.transpose(-1, -2)], dim=-1)
        far, local = scores.softmax(dim=-1).tensor_split([rows.shape[1]], dim=-1)
        return (far @ far_values).add_(local @ near_values).squeeze(2)

    def _far_rows(self, block: int, capacity: int, device: torch.device) -> Tensor:
        """Rows [H, S] of the global and random blocks that `block` sees, in a cache with `capacity` rows per head.

        The result is kept until the next block.
        """
        wanted = (block, capacity, device)
        if self._step_rows is None or self._step_rows[0] != wanted:
            heads, count = self.shape.heads, self.options.globals
            known = torch.arange(count, device=device).expand(heads, -1)
            # With few earlier blocks, all of them are drawn and the remaining columns are unused.
            drawn = self._drawn_blocks(block + 1, device)[:, block, : block - _WINDOW + 1 - count]
            blocks = torch.cat([known, drawn], dim=1).unsqueeze(-1) * self.block
            rows = (blocks + torch.arange(self.block, device=device)).flatten(1)
            rows = rows + torch.arange(heads, device=device).unsqueeze(1) * capacity
            self._step_rows = (wanted, rows)
        return self._step_rows[1]

    def emit(self, inputs: MixInputs) -> None:
        count, size = self.options.globals, self.block
        blocks = -(-self.shape.positions // size)
        position = torch.arange(self.shape.positions).unsqueeze(1)
        block = position // size
        near = (block - _WINDOW + 1).clamp(min=count) * size
        spans: list[Span] = [(0, 1, (position + 1).clamp(max=count * size)), (near, 1, position + 1 - near)]
        drawn = self._drawn_blocks(blocks, torch.device("cpu"))[:, block.flatten()].transpose(0, 1)
        available = (block - _WINDOW + 1 - count).clamp(min=0)
        for column in range(min(self.options.random, max(blocks - _WINDOW - count, 0))):
            spans.append((drawn[..., column] * size, 1, torch.where(column < available, size, 0)))
        self.emit_spans(inputs, stack_spans(*spans))


def draw_blocks(seed: int, layer: int, heads: int, blocks: int, first: int, count: int) -> NDArray[np.int64]:
    """Random blocks [heads, blocks, count]: distinct blocks from first .. b - 3 for each block b.

    All sets of blocks are equally likely. Let n be the number of blocks first .. b - 3. If n < count, the first n
    columns hold all of these blocks, and the other columns are unused. The method is Floyd's sampling without
    replacement. Let m = min(count, n) and top = n - m + i. Column i of (head, b) is `first` plus a number drawn from 0
    .. top, or `first` + top if an earlier column has that number. The number is x (top + 1) / 2^32, rounded down, where
    x is the upper half of a 64-bit hash of (seed, layer, head, b, i). An entry depends only on these five numbers,
    `first` and `count`. It does not depend on `blocks` or on the version of a library.
    """
    b = np.arange(blocks, dtype=np.int64)
    return _draw(seed, layer, heads, np.maximum(b - _WINDOW + 1 - first, 0), count) + first


def draw_other_blocks(seed: int, layer: int, heads: int, blocks: int, first: int, count: int) -> NDArray[np.int64]:
    """Random blocks [heads, blocks, count]: distinct blocks from `first` on, except b - 1, b and b + 1, for each b.

    They are drawn as in `draw_blocks`, but depend on `blocks`. Unused columns are -1.
    """
    b = np.arange(blocks, dtype=np.int64)
    start = np.maximum(b - 1, first)
    gap = np.maximum(np.minimum(b + 2, blocks) - start, 0)
    available = np.maximum(blocks - first - gap, 0)
    drawn = _draw(seed, layer, heads, available, count) + first
    drawn = np.where(drawn >= start[:, None], drawn + gap[:, None], drawn)
    return np.where(np.arange(count) < available[:, None], drawn, -1)


def _draw(seed: int, layer: int, heads: int, available: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Distinct numbers [heads, blocks, count] below available[b] for each block b; unused columns are 0."""
    blocks = len(available)
    columns = np.minimum(available, count)
    drawn = np.zeros((heads, blocks, count), dtype=np.int64)
    head, b = np.arange(heads, dtype=np.uint64)[:, None], np.arange(blocks, dtype=np.uint64)
    shared = _hash(_hash(_hash(_hash(np.zeros((1, 1), np.uint64), seed), layer), head), b)
    for column in range(count):
        top = np.maximum(available - columns + column, 0)
        upper = _hash(shared, column) >> np.uint64(32)
        number = (upper * (top + 1).astype(np.uint64) >> np.uint64(32)).astype(np.int64)
        repeated = (drawn[:, :, :column] == number[:, :, None]).any(axis=-1)
        drawn[:, :, column] = np.where(column < columns, np.where(repeated, top, number), 0)
    return drawn


def _hash(state: NDArray[np.uint64], number: "int | NDArray[np.uint64]") -> NDArray[np.uint64]:
    """Mix `number` into `state`, modulo 2^64: splitmix64 with its increment multiplied by number + 1."""
    added = np.asarray(number, dtype=np.uint64).reshape(np.shape(number) or (1, 1)) + np.uint64(1)
    z = state + added * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
