"""Transformer-LS (Zhu 2021, 'Long-Short Transformer', arXiv 2107.02192): a window and dynamic projections of chunks."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .base import Attention, AttentionOptions, AttentionShape, Gates, Memory, MixInputs, Out, setting
from .parts.caches import CacheLayout, add_cache, attend_masked, emit_rows, fit_rows, init_cache, make_room
from .parts.key_sets import Lists, join, weigh, weigh_lists
from .parts.near_and_rows import Pattern, attend_near_and_rows
from .parts.scaling import shrink_huge
from .parts.spans import Span, share_keys, stack_spans
from .tensors import accumulator_dtype, fill_padding, host_number

# The fewest queries in a block that shares one slice of near keys. Larger blocks copy fewer keys but mask more scores.
_QUERY_BLOCK = 32


class LongShortOptions(AttentionOptions):
    chunk: int = setting(16, "number of positions that are compressed together", gt=0)
    rank: int = setting(1, "number of rows that a chunk is compressed to", gt=0)
    window: int | None = setting(None, "number of positions that a query sees uncompressed (default: two rows)", gt=0)


class LongShortState(NamedTuple):
    """The window and the compressed rows, the unfinished chunk, and the number of positions (0-d int64).

    keys and values [B, H, window + rows, .] are normalised: the window, then the rows of all finished chunks. The
    window is a ring that is filled from its end, so that a query sees one slice: position t is at window - 1 - t %
    window. The unfinished chunk is its largest score [B, H, rank] and sums [B, H, rank, 1 + K + V] of weights, weighted
    keys and weighted values, with the weights exp(score - largest score).
    """

    keys: Tensor
    values: Tensor
    largest: Tensor
    sums: Tensor
    position: Tensor


class JointNorm(nn.Module):
    """LayerNorm of [..., H, W] over all heads, with one scale and offset; narrower vectors use their first columns."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, width))
        self.bias = nn.Parameter(torch.zeros(heads, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x [B, ..., H, W]; x must be float32 or wider."""
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        if x.shape[-1] < weight.shape[-1]:
            weight, bias = weight[:, : x.shape[-1]], bias[:, : x.shape[-1]]
        return functional.layer_norm(shrink_huge(x, (-2, -1)), x.shape[-2:], weight, bias)


class _FixedState(LongShortState):
    """A state with room for a whole image, whose position is a number on the device, which the engine counts."""


class LongShortAttention(Attention[LongShortOptions, LongShortState]):
    """y_t = softmax(q_t [rows of earlier chunks; k_j with t - window < j <= t]^T / sqrt(K)) [their values].

    A chunk's rows are p^T k and p^T v, where p is the softmax of `rank` scores over the positions of the chunk. The
    scores are a learned linear function of the layer's input, the extra scalars (the source's dynamic projection). One
    LayerNorm over all heads jointly is applied to the window, and another to the rows, so that both have the same scale
    (the source's DualLN). Keys and values share each norm. A row is visible from the next chunk on. A position in both
    the window and a row counts twice, as in the source. There are two differences from the source. Each query has its
    own window of `window` positions; in the source, blocks of queries share a segment. Relative positions are not
    encoded, since the embedding encodes absolute positions.

    The bidirectional form is that of the source. The whole sequence is compressed to `rank` rows, and p is the softmax
    over all its positions. A query sees these rows, its segment of `window` positions, and window // 2 on each side.
    """

    name = "long_short"
    source = "Zhu 2021, arXiv 2107.02192"
    family = "local-global"
    method = "window and dynamic projection of finished chunks"
    memory = Memory.GROWING
    bidirectional = True

    def __init__(self, options: LongShortOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        self.window = options.window or 2 * shape.row
        self.gates = {"scores": options.rank}
        width = max(shape.key_width, shape.value_width)
        self.window_norm = JointNorm(shape.heads, width)
        self.row_norm = JointNorm(shape.heads, width)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: LongShortState | None, gates: Gates
    ) -> Out[LongShortState]:
        dtype, length = accumulator_dtype(v.dtype), q.shape[2]
        if state is None:
            state = self.init_state(len(q), 0, q.device, v.dtype)
        start = int(state.position)
        stop = start + length
        means, largest, sums = self._compress(k.to(dtype), v.to(dtype), gates["scores"], state, start)
        near_k, rows_k = self._extend(state.keys, k.to(dtype), means[..., : k.shape[-1]], start)
        near_v, rows_v = self._extend(state.values, v.to(dtype), means[..., k.shape[-1] :], start)
        before = self.window - 1
        block = min(max(_QUERY_BLOCK, self.window // 2), length)
        padding = (0, 0, 0, -length % block)
        y = attend_near_and_rows(
            functional.pad(q.to(dtype) * self.shape.key_width**-0.5, padding),
            (functional.pad(near_k, padding), functional.pad(near_v, padding)),
            (rows_k, rows_v),
            Pattern(
                first=start,
                span=self.options.chunk,
                rank=self.options.rank,
                window=self.window,
                before=before,
                missing=max(before - start, 0),
                block=block,
            ),
        )[:, :, :length]
        capacity = max(self._capacity(stop), state.keys.shape[2])
        keys = self._pack(near_k, rows_k, stop, capacity).to(state.keys.dtype)
        values = self._pack(near_v, rows_v, stop, capacity).to(state.values.dtype)
        return y, LongShortState(keys, values, largest, sums, host_number(stop))

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, gates: Gates) -> Tensor:
        dtype, half = accumulator_dtype(v.dtype), self.window // 2
        scores = fill_padding(gates["scores"], lengths, -math.inf)
        q = q.to(dtype) * self.shape.key_width**-0.5
        shares, content = scores.softmax(dim=2).transpose(-1, -2), (k.to(dtype), v.to(dtype))
        row_k, row_v = (self.row_norm((shares @ x).transpose(1, 2)).transpose(1, 2) for x in content)
        near_k, near_v = (self.window_norm(x.transpose(1, 2)).transpose(1, 2) for x in content)
        position = torch.arange(q.shape[2])
        segment = Span(position // self.window * self.window - half, 1, self.window + 2 * half)
        table = stack_spans([segment], torch.full_like(position, len(position)))
        lists = Lists(*(x.to(q.device) for x in share_keys(table, 1, self.window)))
        return join([weigh_lists(q, near_k, near_v, lists, lengths), weigh(q, row_k, row_v, None)])

    def _compress(
        self, k: Tensor, v: Tensor, scores: Tensor, state: LongShortState, start: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return means [B, H, chunks, rank, K + V] of full chunks, and `largest` and `sums` of the unfinished one."""
        chunk, length = self.options.chunk, k.shape[2]
        inside = start % chunk
        finished = (inside + length) // chunk
        missing = -(inside + length) % chunk
        # Chunks start at multiples of `chunk`. Padding has weight 0.
        padding = (0, 0, inside, missing)
        scores = functional.pad(scores, padding, value=-math.inf).unflatten(2, (-1, chunk))
        content = functional.pad(torch.cat([torch.ones_like(k[..., :1]), k, v], dim=-1), padding)
        # The largest score needs no gradient, because it scales numerator and denominator alike.
        largest = scores.detach().amax(dim=3)
        if inside:
            largest[:, :, 0] = torch.maximum(largest[:, :, 0], state.largest)
        weights = (scores - largest.unsqueeze(3)).exp()
        sums = weights.transpose(-1, -2) @ content.unflatten(2, (-1, chunk))
        if inside:
            carried = state.sums * (state.largest - largest[:, :, 0]).exp().unsqueeze(-1)
            sums = torch.cat([(sums[:, :, 0] + carried).unsqueeze(2), sums[:, :, 1:]], dim=2)
        means = sums[:, :, :finished, :, 1:] / sums[:, :, :finished, :, :1]
        if missing:
            # These are copies, because views would keep the sums of all chunks in memory as long as the state lives.
            return means, largest[:, :, -1].clone(), sums[:, :, -1].clone()
        return means, torch.full_like(state.largest, -math.inf), torch.zeros_like(state.sums)

    def _extend(self, cached: Tensor, x: Tensor, means: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Near keys or values [B, H, window - 1 + T, W] (0 before the start) and all rows, after `start` positions."""
        recent = torch.arange(max(start - self.window + 1, 0), start, device=x.device)
        window = cached[:, :, self.window - 1 - recent % self.window].to(x.dtype)
        window = functional.pad(window, (0, 0, max(self.window - 1 - start, 0), 0))
        rows = cached[:, :, self.window : self._capacity(start)].to(x.dtype)
        new_rows = self.row_norm(means.flatten(2, 3).transpose(1, 2)).transpose(1, 2)
        near = torch.cat([window, self.window_norm(x.transpose(1, 2)).transpose(1, 2)], dim=2)
        return near, torch.cat([rows, new_rows], dim=2)

    def _pack(self, near: Tensor, rows: Tensor, stop: int, capacity: int) -> Tensor:
        """Return the last positions before `stop` as a ring, then the rows, padded to `capacity`."""
        slot = torch.arange(self.window, device=near.device)
        ring = near[:, :, -self.window :][:, :, (self.window - 1 - slot - stop) % self.window]
        return fit_rows(torch.cat([ring, rows], dim=2), capacity)

    def _capacity(self, positions: int) -> int:
        """Return the number of rows that the window and the chunks occupy after `positions` positions."""
        return self.window + positions // self.options.chunk * self.options.rank

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> LongShortState:
        keys, values, position = init_cache(batch, self.shape, self._capacity(capacity), device, dtype)
        size = batch, self.shape.heads, self.options.rank
        largest = torch.full(size, -math.inf, device=device, dtype=accumulator_dtype(dtype))
        sums = largest.new_zeros(*size, 1 + self.shape.key_width + self.shape.value_width)
        return LongShortState(keys, values, largest, sums, position)

    def _step(
        self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: LongShortState, gates_t: Gates
    ) -> Out[LongShortState]:
        if isinstance(state, _FixedState):
            return self._step_fixed(q_t, k_t, v_t, state, gates_t["scores"]), state
        keys, values, largest, sums, position = state
        place = int(position)
        keys, values = make_room(keys, values, self._capacity(place + 1), self.options.rank)
        fixed = _FixedState(keys, values, largest, sums, torch.full((), place, device=keys.device))
        return self._step_fixed(q_t, k_t, v_t, fixed, gates_t["scores"]), LongShortState(*fixed[:4], position + 1)

    def fix_state(self, state: LongShortState, place: Tensor, room: Tensor, dtype: torch.dtype) -> LongShortState:
        return _FixedState(*state[:4], place)

    def _step_fixed(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: LongShortState, scores: Tensor) -> Tensor:
        """Return a step for CUDA graphs, the same at all positions: it reads all rows and compresses the last chunk."""
        keys, values, largest, sums, place = state
        k_t, new_v, count = k_t.to(sums.dtype), v_t.to(sums.dtype), keys.shape[2]
        slot = (self.window - 1 - place % self.window).view(1)
        end = self.window + place // self.options.chunk * self.options.rank
        rows = torch.arange(count, device=place.device)
        for stack, new in ((keys, k_t), (values, new_v)):
            stack.index_copy_(2, slot, self.window_norm(new).to(stack.dtype).unsqueeze(2))
        seen = ((rows >= self.window - 1 - place) & (rows < end)).unsqueeze(0)
        y = attend_masked(q_t.unsqueeze(2).to(keys.dtype), keys, values, seen)
        before = largest.clone()
        torch.maximum(largest, scores, out=largest)
        content = torch.cat([torch.ones_like(k_t[..., :1]), k_t, new_v], dim=-1)
        sums.mul_((before - largest).exp_().unsqueeze(-1))
        sums.addcmul_((scores - largest).exp_().unsqueeze(-1), content.unsqueeze(-2))
        finished = (place + 1) % self.options.chunk == 0
        means = (sums[..., 1:] / sums[..., :1]).transpose(1, 2)  # [B, rank, H, K + V]
        # The last chunk of an image may have no room for its rows, and is then never finished.
        places = (end + torch.arange(self.options.rank, device=end.device)).clamp(max=count - 1)
        for stack, mean in zip((keys, values), means.split([k_t.shape[-1], v_t.shape[-1]], dim=-1), strict=True):
            new = self.row_norm(mean).transpose(1, 2).to(stack.dtype)
            stack.index_copy_(2, places, torch.where(finished, new, stack.index_select(2, places)))
        largest.masked_fill_(finished, -math.inf)
        sums.masked_fill_(finished, 0)
        return y.squeeze(2)

    def emit(self, inputs: MixInputs) -> None:
        """Emit compression, norm and softmax: raw keys are compressed first, as no position sees a row that it ends."""
        builder, (heads, key_width, value_width) = inputs.builder, inputs.sizes
        chunk, rank, widest = self.options.chunk, self.options.rank, max(key_width, value_width)
        capacity = self._capacity(self.shape.positions)
        cache = add_cache(inputs, capacity)
        largest = inputs.state(rank, -math.inf)
        sums = inputs.state(rank * (1 + key_width + value_width))
        window_norm, row_norm = (
            {"gain": builder.shared(norm.weight), "shift": builder.shared(norm.bias), "widest": widest}
            for norm in (self.window_norm, self.row_norm)
        )
        sizes = {"capacity": capacity, "first": self.window, "chunk": chunk, "rank": rank}
        inputs.emit("compress", **cache, largest=largest, sums=sums, **row_norm, **sizes)
        # This scratch memory must last as long as the projected input, so its name contains the number of that buffer.
        normed = builder.scratch(f"normed {inputs.projected}", heads * (2 * key_width + value_width))
        replace(inputs, output=normed).emit("norm_heads", **window_norm)
        columns = (0, heads * key_width, 2 * heads * key_width, 0)
        position = torch.arange(self.shape.positions)
        spans = [Span(0, 1, (position + 1).clamp(max=self.window)), Span(self.window, 1, position // chunk * rank)]
        table = stack_spans(spans, torch.full_like(position, capacity)).transpose(0, 1)
        layout = CacheLayout(capacity, 0, self.window)
        emit_rows(replace(inputs, projected=normed, columns=columns), layout, table, cache)

    def list_states(self, state: LongShortState) -> list[Tensor]:
        """Return the tensors of the state, with position t of the window in row t % window."""
        capacity = self._capacity(self.shape.positions)
        rings = [torch.cat([x[:, :, : self.window].flip(2), x[:, :, self.window :]], dim=2) for x in state[:2]]
        return [*(fit_rows(x, capacity) for x in rings), state.largest, state.sums]
