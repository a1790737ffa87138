"""Linformer (Wang 2020, arXiv 2006.04768): learned low-rank projections, made causal by blocks."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.errors import UsageError
from .base import Attention, AttentionOptions, AttentionShape, Gates, Memory, MixInputs, Out, setting
from .parts.caches import FixedCache, KeyValueCache, add_cache, attend_masked, fit_rows, init_cache, make_room
from .parts.near_and_rows import Pattern, attend_near_and_rows
from .tensors import accumulator_dtype, find_padding, host_number

_DEFAULT_RANK = 4


class LinformerOptions(AttentionOptions):
    block: int | None = setting(None, "number of positions that are projected together (default: one image row)", gt=0)
    rank: int = setting(_DEFAULT_RANK, "number of rows to project a block to (default: 4, at most `block`)", gt=0)
    share: Literal["none", "heads", "heads_keys_values"] = setting(
        "none",
        "'none': each head has its own projections; 'heads': all heads share them; "
        "'heads_keys_values': keys and values also share one",
    )

    def check(self) -> None:
        if self.block is not None and self.rank > self.block and self.rank != _DEFAULT_RANK:
            raise ValueError(f"'rank' must be at most 'block', found rank {self.rank} and block {self.block}")


class LinformerAttention(Attention[LinformerOptions, KeyValueCache]):
    """y_t = softmax(q_t [E k of earlier blocks; k_j of the same block, j <= t]^T / sqrt(K)) [F v of earlier ...; v_j].

    One softmax covers the projected rows and the exact keys. E and F [rank, block] are learned for each head, or shared
    as in section 4 of the source. The source projects a whole sequence of fixed length at once, so every row depends on
    later positions. Only an encoder can work this way. Here, each block is projected when it is finished, always with
    the same E and F. The rows of a block are visible from the next block on. Inside its own block, a query sees exact
    keys. A sequence may have any length, and rows grow by rank / block per position; in the source, they are fixed.

    The state is a cache. It first holds the `rank` projected rows of each finished block, then the exact rows of the
    unfinished block. When a block is finished, its projected rows replace its exact rows.

    In the bidirectional form, a query sees the rows of all blocks and no exact keys. If `block` is the length of the
    sequence, this is the source's formula. Otherwise, E is block-diagonal, with the same block everywhere. A shorter
    last block is filled with zeros.
    """

    name = "linformer"
    source = "Wang 2020, arXiv 2006.04768"
    family = "low-rank"
    method = "learned projection of finished blocks"
    memory = Memory.GROWING
    bidirectional = True

    def __init__(self, options: LinformerOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        self.block = options.block or shape.row
        if options.rank > self.block and options.rank != _DEFAULT_RANK:
            raise UsageError(f"'rank' must be at most the block length {self.block} (one row), found {options.rank}")
        self.rank = min(options.rank, self.block)
        sizes = shape.heads if options.share == "none" else 1, self.rank, self.block
        self.key_projection = nn.Parameter(torch.empty(sizes))
        # A shared tensor has only one name, because a checkpoint would otherwise hold it twice.
        own = options.share != "heads_keys_values"
        self.value_projection = nn.Parameter(torch.empty(sizes)) if own else None
        # With this standard deviation, projected keys have about the same scale as keys for any block size.
        for projection in self.parameters():
            nn.init.normal_(projection, std=self.block**-0.5)

    @property
    def _projections(self) -> tuple[Tensor, Tensor]:
        """E and F."""
        return self.key_projection, self.key_projection if self.value_projection is None else self.value_projection

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueCache | None, gates: Gates) -> Out[KeyValueCache]:
        dtype, length = accumulator_dtype(v.dtype), q.shape[2]
        start = 0 if state is None else int(state.position)
        finished, inside = divmod(start, self.block)
        project_keys, project_values = self._projections
        cached_k, cached_v = (None, None) if state is None else (state.keys, state.values)
        rows_k, near_k = self._project(k.to(dtype), cached_k, start, project_keys)
        rows_v, near_v = self._project(v.to(dtype), cached_v, start, project_values)
        # Blocks start at multiples of `block`, so the unfinished one's cached part comes first, without queries.
        missing = -(inside + length) % self.block
        y = attend_near_and_rows(
            functional.pad(q.to(dtype) * self.shape.key_width**-0.5, (0, 0, inside, missing)),
            (functional.pad(near_k, (0, 0, 0, missing)), functional.pad(near_v, (0, 0, 0, missing))),
            (rows_k, rows_v),
            Pattern(finished * self.block, self.block, self.rank, self.block, 0, 0, self.block),
        )
        held = (k, v) if state is None else state[:2]
        capacity = max(self._capacity(start + length), 0 if state is None else state.keys.shape[2])
        rest = (inside + length) // self.block * self.block
        keys, values = (
            fit_rows(torch.cat([rows, near[:, :, rest:]], dim=2).to(old.dtype), capacity)
            for rows, near, old in zip((rows_k, rows_v), (near_k, near_v), held, strict=True)
        )
        return y[:, :, inside : inside + length], KeyValueCache(keys, values, host_number(start + length))

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, gates: Gates) -> Tensor:
        dtype, fill = accumulator_dtype(v.dtype), (0, 0, 0, -k.shape[2] % self.block)
        rows_k, rows_v = (
            self._project(functional.pad(x.to(dtype), fill), None, 0, projection)[0]
            for x, projection in zip((k, v), self._projections, strict=True)
        )
        seen = None
        if lengths is not None:
            blocks = -(-lengths // self.block)
            seen = ~find_padding(blocks * self.rank, rows_k.shape[2])[:, None, None]
        return attend_masked(q.to(dtype), rows_k, rows_v, seen)

    def _project(self, x: Tensor, cached: Tensor | None, start: int, projection: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of finished blocks, and x [B, H, T, W], after `start` positions, from its first block."""
        finished, inside = divmod(start, self.block)
        if cached is not None:
            known = finished * self.rank
            old, carried = cached[:, :, : known + inside].to(x.dtype).split([known, inside], dim=2)
            x = torch.cat([carried, x], dim=2)
        blocks = x.shape[2] // self.block
        whole = x[:, :, : blocks * self.block].unflatten(2, (blocks, self.block))
        rows = (projection.to(x.dtype).unsqueeze(1) @ whole).flatten(2, 3)
        return (rows if cached is None else torch.cat([old, rows], dim=2)), x

    def _capacity(self, positions: int) -> int:
        """Return the rows of all earlier blocks and one block of exact positions, which the stack never exceeds."""
        return max(positions - 1, 0) // self.block * self.rank + min(positions, self.block)

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> KeyValueCache:
        return init_cache(batch, self.shape, self._capacity(capacity), device, dtype)

    def fix_state(self, state: KeyValueCache, place: Tensor, room: Tensor, dtype: torch.dtype) -> FixedCache:
        return FixedCache(state.keys, state.values, place)

    def _step_fixed(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, cache: FixedCache) -> Tensor:
        """Return a step for CUDA graphs, the same for every position: it reads all rows and projects the last block."""
        inside, count = cache.place % self.block, cache.keys.shape[2]
        rows = cache.place // self.block * self.rank
        cache.write(rows + inside, k_t, v_t)
        seen = (torch.arange(count, device=cache.place.device) <= rows + inside).unsqueeze(0)
        y = attend_masked(q_t.unsqueeze(2).to(cache.keys.dtype), cache.keys, cache.values, seen)
        # The last block of an image may have no room for its exact rows, and is then never finished.
        places = (rows + torch.arange(self.block, device=rows.device)).clamp(max=count - 1)
        for stack, projection in zip(cache[:2], self._projections, strict=True):
            exact = stack.index_select(2, places).to(accumulator_dtype(stack.dtype))
            projected = projection.to(exact.dtype) @ exact
            projected = torch.where(inside + 1 == self.block, projected, exact[:, :, : self.rank])
            stack.index_copy_(2, places[: self.rank], projected.to(stack.dtype))
        return y.squeeze(2)

    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: Any, gates_t: Gates) -> tuple[Tensor, Any]:
        if isinstance(state, FixedCache):
            return self._step_fixed(q_t, k_t, v_t, state), state
        position = int(state.position)
        keys, values = make_room(state.keys, state.values, self._capacity(position + 1), self.block)
        cache = FixedCache(keys, values, torch.full((), position, device=keys.device))
        return self._step_fixed(q_t, k_t, v_t, cache), KeyValueCache(keys, values, state.position + 1)

    def emit(self, inputs: MixInputs) -> None:
        capacity = self._capacity(self.shape.positions)
        inputs.emit(
            "linformer",
            key_projection=inputs.builder.shared(self._projections[0]),
            value_projection=inputs.builder.shared(self._projections[1]),
            **add_cache(inputs, capacity),
            capacity=capacity,
            rank=self.rank,
            block=self.block,
            projections=len(self.key_projection),
        )

    def list_states(self, state: KeyValueCache) -> list[Tensor]:
        capacity = self._capacity(self.shape.positions)
        return [fit_rows(state.keys, capacity), fit_rows(state.values, capacity)]
