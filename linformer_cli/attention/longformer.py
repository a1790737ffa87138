"""Longformer attention (Beltagy 2020, arXiv 2004.05150): a sliding window, dilated per head, and global keys."""

import math
from typing import NamedTuple

import torch
from pydantic import field_validator
from torch import Tensor
from torch.nn import functional

from linformer_cli.config import LARGEST_IMAGE
from linformer_cli.documents import setting
from linformer_cli.errors import UsageError
from linformer_cli.native.program import MixInputs
from linformer_cli.units import parse_count

from .base import Attention, AttentionOptions, AttentionShape, Gates, Memory
from .parts.caches import CacheLayout, add_cache, attend_masked, emit_rows, init_cache, stack_spans
from .parts.key_sets import SHORTEST_BLOCK, join_globals, list_windows, weigh_lists
from .tensors import accumulator_dtype


class LongformerOptions(AttentionOptions):
    """Options of Longformer attention."""

    window: int = setting(32, "number of positions in a query's window, including its own", gt=0)
    dilation: int | str | None = setting(
        None,
        "distance between the positions of the window: one number, or a list such as 1,4 that heads "
        "cycle through (default: 1 for even heads, 4 for odd heads)",
    )
    globals: int = setting(1, "number of positions at the start that all later positions see", ge=0, le=65_536)

    @field_validator("dilation")
    @classmethod
    def _dilations_are_whole_numbers(cls, value: int | str | None) -> int | str | None:
        if value is not None and not all(parse_count(part.strip()) for part in str(value).split(",")):
            raise ValueError(
                "must be a number of 1 or more, or a comma-separated list of such numbers, one for each head"
            )
        return value

    def dilations(self, heads: int) -> tuple[int, ...]:
        """The dilation of each head; raises `UsageError` if the list's length does not divide the number of heads."""
        if self.dilation is None:
            listed = [1, 4][:heads]
            return tuple(listed[head % len(listed)] for head in range(heads))
        listed = [int(part) for part in str(self.dilation).split(",")]
        if heads % len(listed):
            raise UsageError(
                f"dilation '{self.dilation}' lists {len(listed)} values for {heads} heads; list one for each head, "
                "or a number of values that divides the number of heads"
            )
        return tuple(listed) * (heads // len(listed))


class LongformerState(NamedTuple):
    """Keys [B, H, globals + ring, K], values [B, H, globals + ring, V], and the number of positions (0-d int64).

    The first `globals` rows hold the first positions. The other rows are a ring buffer of the last `ring` positions,
    where `ring` = (window - 1) max(dilation) + 1. Position j is in row globals + j mod ring.
    """

    keys: Tensor
    values: Tensor
    position: Tensor


class _Rows(NamedTuple):
    """Keys or values [B, H, *, W] of the global positions, of the last `ring` positions in order, and of new ones."""

    known: Tensor
    old: Tensor
    new: Tensor

    def of_heads(self, heads: list[int]) -> "_Rows":
        return _Rows(*(part[:, heads] for part in self))

    def to(self, dtype: torch.dtype) -> "_Rows":
        return _Rows(*(part.to(dtype) for part in self))


class LongformerAttention(Attention[LongformerOptions, LongformerState]):
    """y_t = sum over j in S(t) of softmax_j(q_t . k_j / sqrt(K)) v_j.

    S(t) holds t, t - d, ..., t - (window - 1) d and every j < globals. d is the dilation of the head, or the number of
    positions in an image if that is smaller. Positions outside 0 .. t are left out, and each position counts once. This
    is the causal half of section 3.1 of the source, with two differences. Global positions have no projections of their
    own. Only keys are global: a causal query at a global position sees only earlier positions, and these are all
    global.

    In the bidirectional form, S(t) also holds t + d, ..., t + (window - 1) d, and a query at a global position sees all
    positions, as in the source.
    """

    name = "longformer"
    source = "Beltagy 2020, arXiv 2004.05150"
    family = "local-global"
    method = "sliding window, dilated per head, and global keys"
    memory = Memory.BOUNDED
    bidirectional = True

    def __init__(self, options: LongformerOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        dilations = options.dilations(shape.heads)
        reach = (options.window - 1) * max(dilations)
        if reach >= LARGEST_IMAGE:
            raise UsageError(
                f"a window of {options.window:,} with dilation {max(dilations):,} reaches {reach:,} positions back; "
                f"an image has at most {LARGEST_IMAGE:,} values"
            )
        # A window of one position needs no dilation. No dilation needs to exceed the number of positions in an image.
        dilations = tuple(min(dilation, shape.positions) if options.window > 1 else 1 for dilation in dilations)
        self.dilations = dilations
        self.ring = (options.window - 1) * max(dilations) + 1
        self.heads_of = {d: [head for head in range(shape.heads) if dilations[head] == d] for d in sorted({*dilations})}
        # The distances that a step looks back [H, window], and the first row of each head [H, 1].
        offsets = torch.tensor(dilations).unsqueeze(1) * torch.arange(options.window)
        first_rows = torch.arange(shape.heads).unsqueeze(1) * (options.globals + self.ring)
        self.offsets: Tensor
        self.first_rows: Tensor
        self.global_rows: Tensor
        self.register_buffer("offsets", offsets, persistent=False)
        self.register_buffer("first_rows", first_rows + options.globals, persistent=False)
        self.register_buffer("global_rows", first_rows + torch.arange(options.globals), persistent=False)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: LongformerState | None, gates: Gates
    ) -> tuple[Tensor, LongformerState]:
        length = q.shape[2]
        if state is None:
            state = self.init_state(len(q), length, q.device, k.dtype)
        start = int(state.position)
        q, k, v = (x.to(state.keys.dtype) for x in (q, k, v))
        keys, values = self._unroll(state.keys, k, start), self._unroll(state.values, v, start)
        after = LongformerState(self._roll(keys, start), self._roll(values, start), state.position + length)
        if q.device.type == "cpu":
            # On a CPU, products of small blocks are slower and less accurate in bfloat16 than in float32.
            wide = accumulator_dtype(q.dtype)
            q, keys, values = q.to(wide), keys.to(wide), values.to(wide)
        groups = []
        for dilation, heads in self.heads_of.items():
            # If all heads have the same dilation, nothing is copied.
            parts = (q, keys, values)
            if len(self.heads_of) > 1:
                parts = (q[:, heads], keys.of_heads(heads), values.of_heads(heads))
            groups.append(self._attend_windows(*parts, start, dilation))
        y = groups[0]
        if len(groups) > 1:
            order = [head for heads in self.heads_of.values() for head in heads]
            y = torch.cat(groups, dim=1)[:, [order.index(head) for head in range(len(order))]]
        return y, after

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, gates: Gates) -> Tensor:
        dtype, count = accumulator_dtype(q.dtype), min(self.options.globals, q.shape[2])
        q, k, wide = q.to(dtype) * q.shape[-1] ** -0.5, k.to(dtype), v.to(dtype)
        parts = wide.new_empty(*v.shape[:3], v.shape[3] + 2)
        for dilation, heads in self.heads_of.items():
            windows = list_windows(q.shape[2], self.options.window - 1, dilation, q.device)
            windows = windows._replace(hidden=windows.hidden | (windows.keys < count).unsqueeze(-2))
            parts[:, heads] = weigh_lists(q[:, heads], k[:, heads], wide[:, heads], windows, lengths)
        return join_globals(parts, q, k, wide, count, lengths)

    def _unroll(self, rows: Tensor, new: Tensor, start: int) -> _Rows:
        """The `rows` of a state at position `start`, in order of position, followed by the `new` ones."""
        count = self.options.globals
        known, old = rows.split([count, self.ring], dim=2)
        if start < count:
            known = torch.cat([known[:, :, :start], new[:, :, : count - start], known[:, :, start + new.shape[2] :]], 2)
        return _Rows(known, old.roll(-start, dims=2), new)

    def _roll(self, rows: _Rows, start: int) -> Tensor:
        """The rows of the state after the new positions, with every position in its row of the ring."""
        known, old, new = rows
        length = new.shape[2]
        recent = new[:, :, -self.ring :] if length >= self.ring else torch.cat([old[:, :, length:], new], dim=2)
        return torch.cat([known, recent.roll(start + length, dims=2)], dim=2)

    def _attend_windows(self, q: Tensor, keys: _Rows, values: _Rows, start: int, dilation: int) -> Tensor:
        """Outputs [B, H, T, V] of heads with one dilation, from position `start` on.

        Within one residue class of positions mod dilation, the window is contiguous. The positions of a class are cut
        into blocks. A block sees the global positions, the last window - 1 positions of its class before the block, and
        itself.
        """
        length, before = q.shape[2], self.options.window - 1
        per_class = math.ceil(length / dilation)
        blocks = max(1, per_class // max(before, SHORTEST_BLOCK))
        block = math.ceil(per_class / blocks)

        def cut(x: Tensor) -> Tensor:
            """[B, H, T, W] as [B H, dilation, blocks, block, W], padded after T."""
            x = functional.pad(x, (0, 0, 0, blocks * block * dilation - length))
            return x.reshape(-1, blocks, block, dilation, x.shape[-1]).permute(0, 3, 1, 2, 4)

        def gather(rows: _Rows) -> Tensor:
            """Everything that a block sees, [B H, dilation blocks, globals + window - 1 + block, W]."""
            own, width = cut(rows.new), rows.new.shape[-1]
            old = rows.old[:, :, self.ring - before * dilation :]
            tails = old.reshape(len(own), 1, before, dilation, width).permute(0, 3, 1, 2, 4)
            if blocks > 1:
                tails = torch.cat([tails, own[:, :, :-1, block - before :]], dim=2)
            known = rows.known.reshape(len(own), 1, 1, self.options.globals, width)
            return torch.cat([known.expand(-1, dilation, blocks, -1, -1), tails, own], dim=3).flatten(1, 2)

        mask = self._mask(start, dilation, blocks, block, q.device).flatten(0, 1).unsqueeze(0)
        y = attend_masked(cut(q).flatten(1, 2), gather(keys), gather(values), mask)
        y = y.reshape(len(y), dilation, blocks, block, y.shape[-1]).permute(0, 2, 3, 1, 4)
        return y.reshape(*q.shape[:2], -1, y.shape[-1])[:, :, :length]

    def _mask(self, start: int, dilation: int, blocks: int, block: int, device: torch.device) -> Tensor:
        """True for the positions that a query sees, [dilation, blocks, block, globals + window - 1 + block]."""
        count, window = self.options.globals, self.options.window
        place = torch.arange(block, device=device)
        offset = torch.arange(1 - window, block, device=device)
        inside = (offset <= place.unsqueeze(1)) & (offset > place.unsqueeze(1) - window)
        residue = torch.arange(dilation, device=device).view(-1, 1, 1)
        first = torch.arange(blocks, device=device).view(-1, 1) * block
        # Global positions are not counted again in the window, and positions before 0 do not exist.
        local = start + residue + dilation * (first + offset) >= count
        queries = start + residue + dilation * (first + place)
        known = torch.arange(count, device=device) <= queries.unsqueeze(-1)
        local = inside & local.unsqueeze(2)
        return torch.cat([known, local], dim=-1)

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> LongformerState:
        return LongformerState(*init_cache(batch, self.shape, self.options.globals + self.ring, device, dtype))

    def _step(
        self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: LongformerState, gates_t: Gates
    ) -> tuple[Tensor, LongformerState]:
        keys, values, counter = state
        count, window, position = self.options.globals, self.options.window, int(counter)
        row = count + position % self.ring
        keys[:, :, row] = k_t
        values[:, :, row] = v_t
        if position < count:
            keys[:, :, position] = k_t
            values[:, :, position] = v_t
        counter.add_(1)
        # If `full` is true, the windows of all heads are complete and lie after the global positions.
        full = position - self.ring + 1 >= count
        if not full or self.ring > window:
            local = (position - self.offsets).remainder_(self.ring).add_(self.first_rows)
            rows = torch.cat([self.global_rows, local], dim=1).flatten()
            keys, values = (
                x.flatten(1, 2).index_select(1, rows).unflatten(1, (self.shape.heads, count + window))
                for x in (keys, values)
            )
        # A full ring without dilation is the window itself, in an order that does not matter to softmax.
        mask = None if full else self._step_mask(position)
        y = functional.scaled_dot_product_attention(q_t.to(keys.dtype).unsqueeze(2), keys, values, attn_mask=mask)
        return y.squeeze(2), state

    def _step_mask(self, position: int) -> Tensor:
        """True for gathered rows that exist and do not repeat a global position, [1, H, 1, globals + window]."""
        count = self.options.globals
        known = torch.arange(count, device=self.offsets.device).expand(self.shape.heads, count) <= position
        return torch.cat([known, position - self.offsets >= count], dim=1).unsqueeze(1).unsqueeze(0)

    def emit(self, inputs: MixInputs) -> None:
        count, window, ring = self.options.globals, self.options.window, self.ring
        position = torch.arange(self.shape.positions).unsqueeze(1)
        dilation = torch.tensor(self.dilations if len(self.heads_of) > 1 else self.dilations[:1])
        # The positions of the window that are not global, in order. Their rows wrap around at the end of the ring.
        seen = ((position - count) // dilation + 1).clamp(0, window)
        row = (position - (seen - 1) * dilation) % ring
        until_end = torch.minimum((ring - 1 - row) // dilation + 1, seen)
        wrapped = row + until_end * dilation - ring
        spans = stack_spans(
            (0, 1, (position + 1).clamp(max=count)),
            (count + row, dilation, until_end),
            (count + wrapped, dilation, seen - until_end),
        )
        emit_rows(inputs, add_cache(inputs, count + ring), CacheLayout(count + ring, count, ring), spans)
