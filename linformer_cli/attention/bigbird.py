"""BigBird attention (Zaheer 2020, arXiv 2007.14062): blocks nearby, the first blocks, and a few drawn at random."""

from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from .base import AttentionOptions, AttentionShape, Memory, accumulator_dtype
from .parts.caches import CachedAttention, KeyValueCache, extend_cache, push_in_place

BigbirdState = KeyValueCache

# A query's own block and the two before it.
_WINDOW = 3
# A row can be wide where images are large; blocks need not be.
_LARGEST_DEFAULT_BLOCK = 64


class BigbirdOptions(AttentionOptions):
    """Options of BigBird attention."""

    block: Annotated[
        int | None, Field(gt=0, le=65_536, description="positions of a block (default: one image row, at most 64)")
    ] = None
    globals: Annotated[int, Field(ge=0, le=65_536, description="first blocks, seen by every later position")] = 1
    random: Annotated[int, Field(ge=0, le=1_024, description="earlier blocks drawn for each block and head")] = 2
    seed: Annotated[int, Field(ge=0, lt=2**63, description="fixes what is drawn; a model keeps its own for good")] = 0


class _Span(NamedTuple):
    """The query blocks first .. last, and the `drawn` columns that the last of them has."""

    first: int
    last: int
    drawn: int


class BigbirdAttention(CachedAttention):
    """y_t = sum over j in S(t) of softmax_j(q_t . k_j / sqrt(K)) v_j.

    With b the block of t, S(t) holds all j <= t in the blocks b - 2, b - 1 and b, in the first `globals` blocks, and in
    `random` blocks drawn without replacement from the blocks globals .. b - 3 (all of these where there are no more),
    each j once. The block-sparse pattern of section 2 of the source, of which this is the causal half. Differs from it
    in that a query sees the two blocks before its own and none behind it, and that global blocks attend to nothing
    but what every query sees. What is drawn depends on (seed, layer, head, b) alone, see `draw_blocks`.
    """

    name = "bigbird"
    source = "Zaheer 2020, arXiv 2007.14062"
    family = "local-global"
    method = "blocks nearby, first blocks, random blocks"
    memory = Memory.GROWING
    options_type = BigbirdOptions
    options: BigbirdOptions

    def __init__(self, options: BigbirdOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        self.block = options.block or min(shape.row, _LARGEST_DEFAULT_BLOCK)
        # What was drawn so far [H, blocks, random], and the rows that a step gathers, with what these are for.
        self._drawn = torch.zeros(shape.heads, 0, options.random, dtype=torch.int64, device="cpu")
        self._step_rows: tuple[tuple[int, int, torch.device], Tensor] | None = None

    def _drawn_blocks(self, blocks: int, device: torch.device) -> Tensor:
        """The drawn blocks [H, at least `blocks`, random] of the first `blocks` blocks."""
        if self._drawn.shape[1] < blocks:
            count = max(blocks, -(-self.shape.positions // self.block))
            options, shape = self.options, self.shape
            drawn = draw_blocks(options.seed, shape.layer, shape.heads, count, options.globals, options.random)
            self._drawn = torch.from_numpy(drawn)
        if self._drawn.device != device:
            self._drawn = self._drawn.to(device)
        return self._drawn

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, extra: Tensor | None
    ) -> tuple[Tensor, KeyValueCache]:
        dtype, length = v.dtype, q.shape[2]
        cache = extend_cache(state, k, v)
        start = 0 if state is None else int(state.position)
        end = start + length
        first, last = start // self.block, (end - 1) // self.block
        span = _Span(first, last, min(self.options.random, max(last - _WINDOW + 1 - self.options.globals, 0)))
        # On a CPU, products of small blocks take longer in bfloat16 and say less.
        wide = accumulator_dtype(q.dtype) if q.device.type == "cpu" else cache.keys.dtype
        keys, values = (self._gather(x[:, :, :end].to(wide), span) for x in (cache.keys, cache.values))
        offset = start - first * self.block
        filled = (last - first + 1) * self.block
        queries = functional.pad(q.to(wide), (0, 0, offset, filled - offset - length))
        queries = queries.reshape(-1, last - first + 1, self.block, q.shape[-1])
        with torch.autocast(q.device.type, enabled=False):
            y = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=self._mask(span, q.device))
        y = y.reshape(*q.shape[:2], filled, v.shape[-1])
        return y[:, :, offset : offset + length].to(dtype), cache

    def _gather(self, x: Tensor, span: _Span) -> Tensor:
        """All that each query block sees of x [B, H, T, W], as [B H, query blocks, S, W].

        S: the global blocks, the drawn ones, the two before and the own one. Slices rather than indices where they will
        do, since their gradients are cheaper to add up.
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
        """What each query may see of what was gathered for its block, [1, query blocks, block, S]."""
        count = self.options.globals
        own = torch.arange(span.first, span.last + 1, device=device).unsqueeze(1)
        place = torch.arange(self.block, device=device)
        # By block: which it is, and whether it is to be seen here. Drawn ones are always earlier than the query's.
        known = torch.arange(min(count, span.last + 1), device=device).expand(len(own), -1)
        column = torch.arange(span.drawn, device=device)
        nearby = own + torch.arange(1 - _WINDOW, 1, device=device)
        block = torch.cat([known, torch.zeros_like(column).expand(len(own), -1), nearby], dim=1)
        seen = torch.cat([known >= 0, column < own - _WINDOW + 1 - count, nearby >= count], dim=1)
        positions = (block.unsqueeze(-1) * self.block + place).flatten(1)
        causal = positions.unsqueeze(1) <= (own * self.block + place).unsqueeze(-1)
        return (causal & seen.repeat_interleave(self.block, dim=1).unsqueeze(1)).unsqueeze(0)

    @torch.no_grad()
    def step(
        self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: KeyValueCache, extra_t: Tensor | None = None
    ) -> tuple[Tensor, KeyValueCache]:
        cache, length = push_in_place(state, k_t, v_t)
        block = (length - 1) // self.block
        if block < self.options.globals + _WINDOW:
            # Nothing lies between the first blocks and the near ones yet.
            keys, values = cache.keys[:, :, :length], cache.values[:, :, :length]
            y = functional.scaled_dot_product_attention(q_t.to(keys.dtype).unsqueeze(2), keys, values)
            return y.squeeze(2).to(v_t.dtype), cache
        rows, near = self._far_rows(block, cache.keys.shape[2], q_t.device), (block - _WINDOW + 1) * self.block
        wide = accumulator_dtype(q_t.dtype)
        # What is far must be gathered; what is near is read where it lies, since many images make copies dear.
        (far_keys, near_keys), (far_values, near_values) = (
            (
                x.flatten(1, 2).index_select(1, rows.flatten()).unflatten(1, rows.shape).to(wide),
                x[:, :, near:length].to(wide),
            )
            for x in (cache.keys, cache.values)
        )
        with torch.autocast(q_t.device.type, enabled=False):
            q_t = (q_t.to(wide) * q_t.shape[-1] ** -0.5).unsqueeze(2)
            scores = torch.cat([q_t @ far_keys.transpose(-1, -2), q_t @ near_keys.transpose(-1, -2)], dim=-1)
            far, local = scores.softmax(dim=-1).tensor_split([rows.shape[1]], dim=-1)
            y = (far @ far_values).add_(local @ near_values)
        return y.squeeze(2).to(v_t.dtype), cache

    def _far_rows(self, block: int, capacity: int, device: torch.device) -> Tensor:
        """Where in a cache of `capacity` rows a head the global and drawn blocks of `block` lie, [H, S].

        Kept for as long as the block lasts.
        """
        wanted = (block, capacity, device)
        if self._step_rows is None or self._step_rows[0] != wanted:
            heads, count = self.shape.heads, self.options.globals
            known = torch.arange(count, device=device).expand(heads, -1)
            # Of few earlier blocks all are drawn, and the columns behind them are empty.
            drawn = self._drawn_blocks(block + 1, device)[:, block, : block - _WINDOW + 1 - count]
            blocks = torch.cat([known, drawn], dim=1).unsqueeze(-1) * self.block
            rows = (blocks + torch.arange(self.block, device=device)).flatten(1)
            rows = rows + torch.arange(heads, device=device).unsqueeze(1) * capacity
            self._step_rows = (wanted, rows)
        return self._step_rows[1]


def draw_blocks(seed: int, layer: int, heads: int, blocks: int, first: int, count: int) -> NDArray[np.int64]:
    """Drawn blocks [heads, blocks, count]: for block b, distinct ones of first .. b - 3, all sets equally likely.

    Where there are n < count of these, the first n columns hold them all and the others are to be left alone. Column i
    of (head, b) is Floyd's draw without replacement: with m = min(count, n) columns and top = n - m + i, a number of
    0 .. top, or top itself where an earlier column has that number; `first` is added. The number is x (top + 1) / 2^32,
    rounded down, with x the upper half of a 64-bit hash of (seed, layer, head, b, i). So an entry depends on nothing
    else, not on `blocks` and not on the version of a library.
    """
    b = np.arange(blocks, dtype=np.int64)
    available = np.maximum(b - _WINDOW + 1 - first, 0)
    columns = np.minimum(available, count)
    drawn = np.zeros((heads, blocks, count), dtype=np.int64)
    head = np.arange(heads, dtype=np.uint64)[:, None]
    shared = _hash(_hash(_hash(_hash(np.zeros((1, 1), np.uint64), seed), layer), head), b.astype(np.uint64))
    for column in range(count):
        top = np.maximum(available - columns + column, 0)
        upper = _hash(shared, column) >> np.uint64(32)
        number = (upper * (top + 1).astype(np.uint64) >> np.uint64(32)).astype(np.int64)
        repeated = (drawn[:, :, :column] == number[:, :, None]).any(axis=-1)
        drawn[:, :, column] = np.where(column < columns, np.where(repeated, top, number), 0)
    return drawn + first


def _hash(state: NDArray[np.uint64], number: "int | NDArray[np.uint64]") -> NDArray[np.uint64]:
    """`state` with one more number mixed in, modulo 2^64: a step of splitmix64 that is number + 1 times as long."""
    added = np.asarray(number, dtype=np.uint64).reshape(np.shape(number) or (1, 1)) + np.uint64(1)
    z = state + added * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed
