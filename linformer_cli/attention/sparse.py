"""Sparse attention by two fixed patterns, near and every l-th (Child 2019, arXiv 1904.10509)."""

import math
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from linformer_cli.errors import UsageError

from .base import Attention, AttentionOptions, AttentionShape, Memory, accumulator_dtype
from .caches import KeyValueCache, cache_bytes, extend_cache, init_cache, push_in_place

SparseState = KeyValueCache

# Scores of a head that are held at once in the parallel form; where there are more, they are computed again backward.
SCORES_AT_ONCE = 2**18
DEFAULT_SUMMARY = 4


class SparseOptions(AttentionOptions):
    """Options of sparse attention."""

    pattern: Annotated[
        Literal["strided", "fixed"],
        Field(description="'strided': the last l positions and every l-th; 'fixed': the own block and block summaries"),
    ] = "strided"
    heads: Annotated[
        Literal["merged", "split"],
        Field(description="'merged': every head sees both parts; 'split': even heads the first, odd heads the second"),
    ] = "merged"
    stride: Annotated[
        int | None, Field(gt=0, description="l, the stride and the length of a block (default: one image row)")
    ] = None
    summary: Annotated[
        int | None,
        Field(gt=0, description="c, the last positions of each block that all later ones see; for 'fixed' only"),
    ] = None

    @model_validator(mode="after")
    def _summary_belongs_to_fixed_blocks(self) -> Self:
        if self.summary is not None and self.pattern != "fixed":
            raise ValueError("'summary' is for pattern 'fixed'; 'strided' has no blocks")
        if self.summary is not None and self.stride is not None and self.summary > self.stride:
            raise ValueError(f"'summary' is a part of a block of {self.stride}, found {self.summary}")
        return self


class _Part(NamedTuple):
    """What some heads see: `near` bool [l, l] and, where `far`, the columns or summaries of earlier rows.

    Row i of `near` is the query at place i of a row of l positions; up to the diagonal, its columns are the places of
    its own row, and behind it those of the row before.
    """

    heads: slice
    near: Tensor
    far: bool


class SparseAttention(Attention):
    """y_t = sum over j in S(t) of softmax_j(q_t . k_j / sqrt(K)) v_j with S(t) a part of the positions j <= t.

    `strided`: the first part is t - j < l, the second (t - j) mod l = 0. `fixed`: the first part is the own block of l
    positions, the second all j with j mod l >= l - c. t itself is always seen. `merged` heads see the union, each
    position once; of `split` heads the even ones see the first part, the odd ones the second.

    Sections 4.2 and 4.3 of the source, which also lets heads take different places of a block as its summary, and
    layers take the two parts by turns; these are left out. With l one image row, the second part of `strided` is the
    column above. Work is O(T (l + T / l)), that is O(T sqrt T) for l near sqrt T; memory is O(T).
    """

    name = "sparse"
    source = "Child 2019, arXiv 1904.10509"
    family = "sparse"
    method = "two fixed patterns, near and every l-th"
    memory = Memory.GROWING
    options_type = SparseOptions
    options: SparseOptions

    def __init__(self, options: SparseOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        self.stride = options.stride or shape.row
        self.summary = options.summary or min(DEFAULT_SUMMARY, self.stride)
        if self.summary > self.stride:
            raise UsageError(f"'summary' is a part of a block of {self.stride} (one row), found {self.summary}")
        if options.heads == "split" and shape.heads == 1:
            raise UsageError("heads 'split' needs two heads or more, found 1; take 'merged'")

    @property
    def _widths(self) -> tuple[int, int]:
        return self.shape.key_width, self.shape.value_width

    def _parts(self, device: torch.device) -> list[_Part]:
        strided = self.options.pattern == "strided"
        full = torch.ones(self.stride, self.stride, dtype=torch.bool, device=device)
        first = full if strided else full.tril()
        if self.options.heads == "merged":
            return [_Part(slice(None), first, True)]
        second = torch.eye(self.stride, dtype=torch.bool, device=device)
        if not strided:
            second[:, -self.summary :] = True
            second = second.tril()
        return [_Part(slice(0, None, 2), first, False), _Part(slice(1, None, 2), second, True)]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any = None, extra: Tensor | None = None
    ) -> tuple[Tensor, KeyValueCache]:
        cache = extend_cache(state, k, v)
        length, stride = int(cache.position), self.stride
        before = (length - q.shape[2]) % stride  # places of the first row that are known already
        after = -length % stride
        dtype = accumulator_dtype(q.dtype)
        with torch.autocast(q.device.type, enabled=False):
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
        shape = (*q.shape[:2], -1, v.shape[-1])
        if len(parts) == 1:
            y = outputs[0].view(shape)
        else:
            y = outputs[0].new_empty(*q.shape[:2], queries.shape[2] * stride, v.shape[-1])
            for part, output in zip(parts, outputs, strict=True):
                y[:, part.heads] = output.view(len(q), -1, *y.shape[2:])
        return y[:, :, before : before + q.shape[2]].to(v.dtype), cache

    def _attend_rows(self, part: _Part, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Outputs [N, rows, l, V] for the last rows, queries [N, rows, l, K], of all rows of keys and values."""
        stride, total = self.stride, keys.shape[1]
        first = total - queries.shape[1]
        far_keys = far_values = None
        if part.far and self.options.pattern == "strided":
            far_keys, far_values = (x.transpose(1, 2).contiguous() for x in (keys, values))
        elif part.far:
            far_keys, far_values = (x[:, :, -self.summary :].contiguous() for x in (keys, values))
        scores_of_row = stride * (stride + total * (self.summary if self.options.pattern == "fixed" else 1) * part.far)
        rows = max(1, SCORES_AT_ONCE // scores_of_row)
        outputs = []
        for start in range(first, total, rows):
            stop = min(start + rows, total)
            arguments = (part, start, queries[:, start - first : stop - first], keys, values, far_keys, far_values)
            if rows < total - first and torch.is_grad_enabled():
                y = checkpoint(self._attend_slab, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                y = self._attend_slab(*arguments)
            outputs.append(y)
        return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]

    def _attend_slab(
        self,
        part: _Part,
        start: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        far_keys: Tensor | None,
        far_values: Tensor | None,
    ) -> Tensor:
        """Outputs [N, rows, l, V] of some rows, the first of them number `start`."""
        count, stride = queries.shape[1], self.stride
        stop = start + count
        looks_back = bool(self.options.pattern == "strided" and part.near[0, -1]) and stride > 1
        scores = queries @ keys[:, start:stop].transpose(-1, -2)
        hidden = ~part.near
        if looks_back:
            earlier_keys, earlier_values = (_row_before(x, start, stop) for x in (keys, values))
            own = torch.ones_like(hidden).tril()
            scores = torch.where(own, scores, queries @ earlier_keys.transpose(-1, -2))
            hidden = ~own.expand(count, stride, stride) & (torch.arange(start, stop, device=own.device) == 0).view(
                -1, 1, 1
            )
        scores = scores.masked_fill(hidden, -math.inf)
        if far_keys is not None and far_values is not None:
            far_scores = self._far_scores(queries, far_keys, start)
            scores = torch.cat([scores, far_scores], dim=-1)
        weights = scores.softmax(dim=-1)
        near = weights[..., :stride]
        y = (near.tril() if looks_back else near) @ values[:, start:stop]
        if looks_back:
            y = y + near.triu(1) @ earlier_values
        if far_values is not None:
            far = weights[..., stride:]
            if self.options.pattern == "strided":
                y = y + (far.transpose(1, 2) @ far_values[:, :, :stop]).transpose(1, 2)
            else:
                y = y + (far.flatten(1, 2) @ far_values[:, :stop].flatten(1, 2)).unflatten(1, (count, stride))
        return y

    def _far_scores(self, queries: Tensor, far_keys: Tensor, start: int) -> Tensor:
        """Scores [N, rows, l, keys] of rows from `start` on against their columns, or the summaries of blocks."""
        count = queries.shape[1]
        stop = start + count
        row = torch.arange(stop, device=queries.device)
        if self.options.pattern == "strided":
            scores = (queries.transpose(1, 2) @ far_keys[:, :, :stop].transpose(-1, -2)).transpose(1, 2)
        else:
            scores = queries.flatten(1, 2) @ far_keys[:, :stop].flatten(1, 2).transpose(-1, -2)
            scores = scores.unflatten(1, (count, self.stride))
            row = row.repeat_interleave(self.summary)
        later = row >= torch.arange(start, stop, device=row.device).view(-1, 1, 1)
        return scores.masked_fill(later, -math.inf)

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> KeyValueCache:
        return init_cache(batch, self.shape.heads, capacity, self._widths, device, dtype)

    @torch.no_grad()
    def step(
        self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: KeyValueCache, extra_t: Tensor | None = None
    ) -> tuple[Tensor, KeyValueCache]:
        cache, length = push_in_place(state, k_t, v_t)
        q_t = q_t.to(cache.keys.dtype).unsqueeze(2)
        if self.options.heads == "merged":
            keys, values = (torch.cat(self._seen(part, length - 1, True, True), dim=2) for part in cache[:2])
            y = functional.scaled_dot_product_attention(q_t, keys, values)
            return y.squeeze(2).to(v_t.dtype), cache
        y = torch.empty_like(v_t)
        for parity in (0, 1):
            keys, values = (
                torch.cat(self._seen(part[:, parity::2], length - 1, not parity, bool(parity)), dim=2)
                for part in cache[:2]
            )
            y[:, parity::2] = functional.scaled_dot_product_attention(q_t[:, parity::2], keys, values).squeeze(2)
        return y, cache

    def _seen(self, rows: Tensor, position: int, first: bool, second: bool) -> list[Tensor]:
        """Views of the rows [B, H, positions, width] that `position` sees by the first and by the second part."""
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

    def state_bytes(self, batch: int, positions: int, dtype: torch.dtype) -> int:
        return cache_bytes(batch, self.shape.heads, positions, self._widths, dtype)


def _row_before(x: Tensor, start: int, stop: int) -> Tensor:
    """Rows [N, stop - start, l, width]: for each row from `start` on the one before it, and zeros before row 0."""
    return x[:, start - 1 : stop - 1] if start else functional.pad(x[:, : stop - 1], (0, 0, 0, 0, 1, 0))
