"""Sparse attention (Child 2019, arXiv 1904.10509): two fixed patterns of near positions and every l-th position."""

import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from linformer_cli.documents import setting
from linformer_cli.errors import UsageError
from linformer_cli.native.program import MixInputs

from .base import AttentionOptions, AttentionShape, Gates
from .parts.caches import CachedAttention, KeyValueCache, stack_spans
from .parts.key_sets import join, list_near, run_within, weigh_columns, weigh_lists, weigh_summaries
from .tensors import accumulator_dtype

SparseState = KeyValueCache

# The largest number of scores per head that the parallel form holds at once, except that one row of l positions is
# always allowed. If there are more scores in total, the backward pass recomputes them.
SCORES_AT_ONCE = 2**18
DEFAULT_SUMMARY = 4


class SparseOptions(AttentionOptions):
    """Options of sparse attention."""

    pattern: Literal["strided", "fixed"] = setting(
        "strided",
        "what a query sees; 'strided': the last l positions and every l-th position before them; "
        "'fixed': its own block and the ends of earlier blocks",
    )
    heads: Literal["merged", "split"] = setting(
        "merged",
        "'merged': all heads see both parts of the pattern; 'split': even heads see the first part, "
        "odd heads the second",
    )
    stride: int | None = setting(None, "l, the stride, also the length of a block (default: one image row)", gt=0)
    summary: int | None = setting(
        None,
        "c, number of positions at the end of a block that later blocks see (default: 4, at most l); 'fixed' only",
        gt=0,
    )

    def check(self) -> None:
        if self.summary is not None and self.pattern != "fixed":
            raise ValueError("'summary' is for pattern 'fixed'; 'strided' has no blocks")
        if self.summary is not None and self.stride is not None and self.summary > self.stride:
            raise ValueError(f"'summary' must be at most 'stride' ({self.stride}), found {self.summary}")


class _Part(NamedTuple):
    """The pattern of some heads: `near` bool [l, l] and, if `far` is true, the columns or summaries of earlier rows.

    Row i of `near` belongs to the query at index i of a row of l positions. Its columns up to the diagonal are
    positions of the same row. If `before` is true, the columns after the diagonal are positions of the previous row.
    """

    heads: slice
    near: Tensor
    before: bool
    far: bool


class SparseAttention(CachedAttention[SparseOptions]):
    """y_t = sum over j in S(t) of softmax_j(q_t . k_j / sqrt(K)) v_j, where S(t) is a subset of the positions j <= t.

    S(t) has two parts. In `strided`, the first part is all j with t - j < l, and the second part is all j with
    (t - j) mod l = 0. In `fixed`, the first part is the query's block of l positions, and the second part is all j with
    j mod l >= l - c. S(t) always contains t. With `merged` heads, every head sees the union of both parts, each
    position once. With `split` heads, even heads see the first part and odd heads see the second part.

    This follows sections 4.2 and 4.3 of the source, without the variants that use different summary positions per head
    or put the two parts into alternating layers. If l is one image row, the second part of `strided` is the column
    above the query. The work is O(T (l + T / l)), which is O(T sqrt T) for l near sqrt T. The memory is O(T).

    The bidirectional form drops j <= t, and has |t - j| instead of t - j. The source has no such form.
    """

    name = "sparse"
    source = "Child 2019, arXiv 1904.10509"
    family = "sparse"
    method = "two fixed patterns, near and every l-th"
    bidirectional = True

    def __init__(self, options: SparseOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        self.stride = options.stride or shape.row
        self.summary = options.summary or min(DEFAULT_SUMMARY, self.stride)
        if self.summary > self.stride:
            raise UsageError(
                f"'summary' must be at most the block length {self.stride} (one row), found {self.summary}"
            )
        if options.heads == "split" and shape.heads == 1:
            raise UsageError("heads 'split' needs two heads or more, found 1; use 'merged'")
        # Groups of heads, and whether they see the first and the second part of the pattern.
        split = [(slice(0, None, 2), True, False), (slice(1, None, 2), False, True)]
        self.groups = split if options.heads == "split" else [(slice(None), True, True)]

    def _parts(self, device: torch.device, causal: bool = True) -> list[_Part]:
        strided = self.options.pattern == "strided"
        full = torch.ones(self.stride, self.stride, dtype=torch.bool, device=device)
        near = full.tril() if causal and not strided else full
        own = torch.eye(self.stride, dtype=torch.bool, device=device)
        if not strided:
            own[:, -self.summary :] = True
            own = own.tril() if causal else own
        return [_Part(heads, near if first else own, strided and first, second) for heads, first, second in self.groups]

    def attend_cache(self, q: Tensor, cache: KeyValueCache) -> Tensor:
        length, stride = int(cache.position), self.stride
        before = (length - q.shape[2]) % stride  # positions of the first row that are in the cache already
        after = -length % stride
        dtype = accumulator_dtype(q.dtype)
        queries = functional.pad(q.to(dtype) / math.sqrt(q.shape[-1]), (0, 0, before, after))
        keys, values = (
            functional.pad(part[:, :, :length].to(dtype), (0, 0, 0, after)) for part in (cache.keys, cache.values)
        )
        queries, keys, values = (part.unflatten(2, (-1, stride)) for part in (queries, keys, values))
        parts = self._parts(q.device)
        outputs = [
            self._attend_rows(part, *(tensor[:, part.heads].flatten(0, 1) for tensor in (queries, keys, values)))
            for part in parts
        ]
        if len(parts) == 1:
            y = outputs[0].view(*q.shape[:2], -1, outputs[0].shape[-1])
        else:
            y = outputs[0].new_empty(*q.shape[:2], queries.shape[2] * stride, outputs[0].shape[-1])
            for part, output in zip(parts, outputs, strict=True):
                y[:, part.heads] = output.view(len(q), -1, *y.shape[2:])
        return y[:, :, before : before + q.shape[2]]

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, gates: Gates) -> Tensor:
        dtype = accumulator_dtype(q.dtype)
        y = torch.empty_like(v, dtype=dtype)
        q, k, wide = q.to(dtype) / math.sqrt(q.shape[-1]), k.to(dtype), v.to(dtype)
        for part in self._parts(q.device, causal=False):
            x = q[:, part.heads], k[:, part.heads], wide[:, part.heads]
            near = list_near(part.near, part.before, self.stride, q.shape[2])
            parts = [weigh_lists(*x, near, lengths)]
            if part.far and self.options.pattern == "strided":
                parts.append(weigh_columns(*x, self.stride, lengths))
            elif part.far:
                parts.append(weigh_summaries(*x, (self.stride, self.summary), lengths))
            y[:, part.heads] = join(parts)
        return y

    def _attend_rows(self, part: _Part, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Outputs [N, rows, l, V] of queries [N, rows, l, K], which belong to the last rows of the keys and values."""
        stride, total = self.stride, keys.shape[1]
        first = total - queries.shape[1]
        strided = self.options.pattern == "strided"
        far_of_row = part.far * (1 if strided else self.summary)
        scores_of_row = stride * (stride + total * far_of_row)
        rows = max(1, SCORES_AT_ONCE // scores_of_row)
        # Tensors are split once, because the gradient of a slice taken in each slab would be as large as the tensor.
        near = [queries.split(rows, dim=1), *(x[:, first:].split(rows, dim=1) for x in (keys, values))]
        if part.before:
            near += [_rows_before(x, first).split(rows, dim=1) for x in (keys, values)]
        far: list[Tensor] = []
        if part.far:
            far = [x.transpose(1, 2) if strided else x[:, :, -self.summary :] for x in (keys, values)]
            far = [x.contiguous() for x in far]
        outputs = []
        for start, *slab in zip(range(first, total, rows), *near, strict=True):
            run = functools.partial(self._attend_parts, part, start, len(slab))
            outputs.append(run_within(SCORES_AT_ONCE, (total - first) * scores_of_row, run, *slab, *far))
        return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]

    def _attend_parts(self, part: _Part, start: int, split: int, *x: Tensor) -> Tensor:
        return self.attend_slab(part, start, x[:split], x[split:])

    def attend_slab(self, part: _Part, start: int, slab: Sequence[Tensor], far: Sequence[Tensor]) -> Tensor:
        """Outputs [N, rows, l, V] of some rows, from row `start` on.

        `slab` holds queries, keys and values of these rows and, if a row sees the previous one, keys and values of the
        previous rows. `far` holds keys and values by column, or the summaries of all blocks.
        """
        queries, keys, values, *before = slab
        stop = start + queries.shape[1]
        row = torch.arange(start, stop, device=queries.device).view(-1, 1, 1)
        scores = queries @ keys.transpose(-1, -2)
        hidden = ~part.near
        if before:
            own = part.near.tril()
            scores = torch.where(own, scores, queries @ before[0].transpose(-1, -2))
            hidden = hidden | (~own & (row == 0))  # row 0 has no previous row
        scores = scores.masked_fill(hidden, -math.inf)
        if far:
            scores = torch.cat([scores, self._far_scores(queries, far[0], row, stop)], dim=-1)
        weights = scores.softmax(dim=-1)
        near = weights[..., : self.stride]
        y = (near.tril() if before else near) @ values
        if before:
            y = y + near.triu(1) @ before[1]
        if not far:
            return y
        weights = weights[..., self.stride :]
        if self.options.pattern == "strided":
            return y + (weights.transpose(1, 2) @ far[1][:, :, :stop]).transpose(1, 2)
        return y + (weights.flatten(1, 2) @ far[1][:, :stop].flatten(1, 2)).view_as(y)

    def _far_scores(self, queries: Tensor, far_keys: Tensor, row: Tensor, stop: int) -> Tensor:
        """Scores [N, rows, l, keys] for the columns or summaries of the rows before each `row`, all below `stop`."""
        key_row = torch.arange(stop, device=row.device)
        if self.options.pattern == "strided":
            scores = (queries.transpose(1, 2) @ far_keys[:, :, :stop].transpose(-1, -2)).transpose(1, 2)
        else:
            scores = queries.flatten(1, 2) @ far_keys[:, :stop].flatten(1, 2).transpose(-1, -2)
            scores = scores.unflatten(1, queries.shape[1:3])
            key_row = key_row.repeat_interleave(self.summary)
        return scores.masked_fill(key_row >= row, -math.inf)

    def step_cache(self, q_t: Tensor, cache: KeyValueCache, position: int) -> Tensor:
        q_t = q_t.to(cache.keys.dtype).unsqueeze(2)
        y = q_t.new_empty(*q_t.shape[:2], cache.values.shape[-1])
        for heads, first, second in self.groups:
            keys, values = (torch.cat(self.seen_rows(x[:, heads], position, first, second), dim=2) for x in cache[:2])
            y[:, heads] = functional.scaled_dot_product_attention(q_t[:, heads], keys, values).squeeze(2)
        return y

    def seen_rows(self, rows: Tensor, position: int, first: bool, second: bool) -> list[Tensor]:
        """Views of the rows [B, H, T, width] that `position` sees; `first` and `second` select parts of the pattern."""
        stride = self.stride
        if self.options.pattern == "strided":
            start = max(0, position + 1 - stride) if first else position
            seen = [rows[:, :, start : position + 1]]
            if second:
                seen.append(rows[:, :, position % stride : max(0, position + 1 - stride) : stride])
            return seen
        block = position - position % stride
        summaries = rows[:, :, :block].unflatten(2, (block // stride, stride))[:, :, :, -self.summary :].flatten(2, 3)
        if first:
            return [rows[:, :, block : position + 1], *([summaries] if second else [])]
        own = min(block + stride - self.summary, position)
        return [rows[:, :, own : position + 1], summaries]

    def _spans(self, first: bool, second: bool) -> Tensor:
        """What every position sees, [T, spans, 3]; see `emit_rows`. `first` and `second` are as in `seen_rows`."""
        stride, position = self.stride, torch.arange(self.shape.positions)
        block, place = position // stride, position % stride
        if self.options.pattern == "strided":
            start = (position + 1 - stride).clamp(min=0) if first else position
            return stack_spans((start, 1, position + 1 - start), (place, stride, block if second else 0))
        start = block * stride
        if not first:
            start = torch.minimum(start + stride - self.summary, position)
        columns = range(stride - self.summary, stride)
        return stack_spans(
            (start, 1, position + 1 - start), *((column, stride, block if second else 0) for column in columns)
        )

    def emit(self, inputs: MixInputs) -> None:
        spans = [self._spans(first, second) for _, first, second in self.groups]
        heads = self.shape.heads if len(spans) > 1 else 1
        self.emit_spans(inputs, torch.stack([spans[head % len(spans)] for head in range(heads)], dim=1))


def _rows_before(x: Tensor, first: int) -> Tensor:
    """For each row of x from `first` on, the previous row (zeros for row 0): [N, rows, l, width]."""
    return x[:, first - 1 : -1] if first else functional.pad(x[:, :-1], (0, 0, 0, 0, 1, 0))
