"""A key-value cache for mechanisms that keep every position, and the operation that attends to rows of a cache."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from linformer_cli.attention.base import Attention, AttentionShape, Gates, Memory, Options, Out
from linformer_cli.attention.kernels.registry import CACHE_STEP, kernel_for
from linformer_cli.attention.tensors import host_number, may_check
from linformer_cli.native.constants import FORMATS
from linformer_cli.native.program import Builder, MixInputs


class KeyValueCache(NamedTuple):
    """Keys [B, H, capacity, K] and values [B, H, capacity, V], of which the first `position` (0-d int64) are valid."""

    keys: Tensor
    values: Tensor
    position: Tensor


class FixedCache(NamedTuple):
    """A `KeyValueCache` with room for a whole image, whose number of positions is `place`, a number on the device.

    A step reads the first `room` rows, a number on the host, or only rows that it knows to be filled (None).
    """

    keys: Tensor
    values: Tensor
    place: Tensor
    room: Tensor | None = None

    def write(self, row: Tensor, k_t: Tensor, v_t: Tensor) -> None:
        """Write k_t [B, H, K] and v_t [B, H, V] to row number `row` (0-d int64, on the device)."""
        for part, x in ((self.keys, k_t), (self.values, v_t)):
            part.index_copy_(2, row.unsqueeze(0), x.to(part.dtype).unsqueeze(2))

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values [B, H, room, .], and which of these rows are full after this step, bool [1, room]."""
        room = self.keys.shape[2] if self.room is None else int(self.room)
        seen = torch.arange(room, device=self.keys.device) <= self.place
        return self.keys[:, :, :room], self.values[:, :, :room], seen.unsqueeze(0)


class CachedAttention(Attention[Options, KeyValueCache]):
    """A mechanism whose whole state is a cache of keys and values, or of keys alone if they are the values."""

    memory = Memory.GROWING

    def _keep(self, v: Tensor) -> Tensor:
        """Return the values [..., V] that the cache holds, which have width 0 if they are the keys."""
        return v[..., :0] if self.shared_key_value else v

    def attend_cache(self, q: Tensor, cache: KeyValueCache) -> Tensor:
        """Return the outputs [B, H, T, V] of the last T positions in `cache`, for their queries q [B, H, T, K]."""
        raise NotImplementedError

    def step_cache(self, q_t: Tensor, cache: KeyValueCache, position: int) -> Tensor:
        """Return the output [B, H, V] of the last position in `cache`, which is number `position`."""
        return self.attend_cache(q_t.unsqueeze(2), cache).squeeze(2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueCache | None, gates: Gates) -> Out[KeyValueCache]:
        cache = extend_cache(state, k, self._keep(v))
        return self.attend_cache(q, cache), cache

    def step_fixed(self, q_t: Tensor, cache: FixedCache) -> Tensor:
        """`step_cache` for CUDA graphs, which always read and write the same tensors."""
        raise NotImplementedError

    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: Any, gates_t: Gates) -> tuple[Tensor, Any]:
        if isinstance(state, FixedCache):
            state.write(state.place, k_t, self._keep(v_t))
            return self.step_fixed(q_t, state), state
        cache, length = push_in_place(state, k_t, self._keep(v_t))
        return self.step_cache(q_t, cache, length - 1), cache

    def fix_state(self, state: KeyValueCache, place: Tensor, room: Tensor, dtype: torch.dtype) -> FixedCache:
        return FixedCache(state.keys, state.values, place, room)

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> KeyValueCache:
        return init_cache(batch, self.shape, capacity, device, dtype)

    def list_states(self, state: KeyValueCache) -> list[Tensor]:
        """Return keys and values [B, H, T, .] with room for a whole image."""
        return [fit_rows(part, self.shape.positions) for part in state[:2] if part.shape[3]]


def fit_rows(x: Tensor, rows: int) -> Tensor:
    """Return x [B, H, T, W] cut or padded to T = `rows`."""
    return functional.pad(x[:, :, :rows], (0, 0, 0, max(rows - x.shape[2], 0)))


def init_cache(batch: int, shape: AttentionShape, rows: int, device: torch.device, dtype: torch.dtype) -> KeyValueCache:
    """Return an empty cache with room for `rows` positions."""
    widths = (shape.key_width, shape.value_width)
    keys, values = (torch.zeros(batch, shape.heads, rows, width, device=device, dtype=dtype) for width in widths)
    return KeyValueCache(keys, values, host_number())


def extend_cache(cache: KeyValueCache | None, k: Tensor, v: Tensor) -> KeyValueCache:
    """Return a new cache that holds `cache` followed by k and v, differentiable, with the same capacity if they fit.

    Without `cache`, k and v become the new cache; they are copied only if gradients are disabled.
    """
    if cache is None:
        if not torch.is_grad_enabled():
            # In a model, k and v are views of one projection and would keep all of it in memory. In training, the
            # backward pass keeps the projection anyway and the state is dropped, so copies would be wasted.
            k, v = _own(k), _own(v)
        return KeyValueCache(k, v, host_number(k.shape[2]))
    start = int(cache.position)
    spare = max(cache.keys.shape[2] - start - k.shape[2], 0)
    keys = functional.pad(torch.cat([cache.keys[:, :, :start], k], dim=2), (0, 0, 0, spare))
    values = functional.pad(torch.cat([cache.values[:, :, :start], v], dim=2), (0, 0, 0, spare))
    return KeyValueCache(keys, values, cache.position + k.shape[2])


def _own(x: Tensor) -> Tensor:
    """Return x, copied if its storage holds anything else."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone(memory_format=torch.contiguous_format)


def push_in_place(cache: KeyValueCache, k_t: Tensor, v_t: Tensor) -> tuple[KeyValueCache, int]:
    """Append k_t [B, H, K] and v_t [B, H, V], in a copy of twice the capacity if full; returns cache and length."""
    start = int(cache.position)
    keys, values = make_room(cache.keys, cache.values, start + 1)
    keys[:, :, start], values[:, :, start] = k_t, v_t
    return KeyValueCache(keys, values, cache.position + 1), start + 1


def make_room(keys: Tensor, values: Tensor, rows: int, least: int = 1) -> tuple[Tensor, Tensor]:
    """Copy keys and values [B, H, capacity, .] to twice the capacity (at least `least` more) for `rows` rows."""
    if rows <= keys.shape[2]:
        return keys, values
    room = (0, 0, 0, max(keys.shape[2], least))
    return functional.pad(keys, room), functional.pad(values, room)


def attend_cached(q: Tensor, cache: KeyValueCache, values: Tensor) -> Tensor:
    """Return averages [B, H, T, V] of `values`, the cache's values or keys, for queries q of its last T positions."""
    length, block = int(cache.position), q.shape[2]
    # Under autocast, the inputs and the cache can have different types.
    keys, values, q = cache.keys[:, :, :length], values[:, :, :length], q.to(cache.keys.dtype)
    mask = None
    if 1 < block < length:
        # torch's is_causal aligns the triangle to the top left, which is wrong after a prefix.
        mask = torch.ones(block, length, dtype=torch.bool, device=q.device).tril(length - block)
    return attend_masked(q, keys, values, mask, is_causal=block == length)


def step_fixed_cache(q_t: Tensor, k_t: Tensor, v_t: Tensor, cache: FixedCache) -> Tensor:
    """Return the output [B, H, V] of a step of softmax attention for CUDA graphs; writes k_t and v_t to the cache.

    Graphs always read and write the same tensors, so the caller adds 1 to the number of positions on the device. All
    inputs and the contiguous cache have one type.
    """
    if step_cache := kernel_for(CACHE_STEP, cache.keys, cache.values):
        return step_cache(q_t, k_t, v_t, cache[:3])
    cache.write(cache.place, k_t, v_t)
    return attend_masked(q_t.unsqueeze(2), *cache.read()).squeeze(2)


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False) -> Tensor:
    """Softmax attention [B, H, T, V] with scores q . k / sqrt(K); `mask` is True for the keys that a query sees."""
    width = v.shape[-1]
    if width == k.shape[-1] and torch.is_grad_enabled() and may_check(q.device):
        largest = [torch.maximum(-low, high).float() for low, high in (x.detach().aminmax() for x in (q, k))]
        # torch's fused backward pass computes the scores again, and rounds them differently. The exponential of the
        # difference of huge scores can overflow. The fused form needs values as wide as keys, so another column avoids
        # it. Where checks are deferred, a step whose gradients overflow is computed again.
        if bool(largest[0] * largest[1] * width**0.5 > 1e5):
            v = functional.pad(v, (0, 1))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)[..., :width]


class CacheLayout(NamedTuple):
    """A cache of `capacity` rows: position p is in row p if p < fixed, else in row fixed + p mod ring."""

    capacity: int
    fixed: int
    ring: int

    def locate(self, position: Tensor) -> Tensor:
        return torch.where(position < self.fixed, position, self.fixed + position % self.ring)


def add_cache(inputs: MixInputs, capacity: int) -> dict[str, int]:
    """Create two state buffers, for the keys and for the values of a cache with room for `capacity` positions.

    Returns these and the code of their format, as arguments of an operation. They are float32 in a program with float32
    products, otherwise bfloat16: reading them takes most of a step's time.
    """
    keys, values = (add_rows(inputs, capacity * width) for width in inputs.sizes[1:])
    return {"keys": keys, "values": values, "format": cache_format(inputs.builder)}


def add_rows(inputs: MixInputs, count: int) -> int:
    """Create one state buffer of a cache, with `count` numbers for each head in the format of `add_cache`."""
    return inputs.state(count, dtype=torch.float32 if inputs.builder.products == torch.float32 else torch.bfloat16)


def cache_format(builder: Builder) -> int:
    """Return the code of the format in which `add_cache` creates caches, for operations that read a cache."""
    return FORMATS["float32" if builder.products == torch.float32 else "bfloat16"]


def emit_rows(
    inputs: MixInputs, layout: CacheLayout, spans: Tensor | None = None, cache: dict[str, int] | None = None
) -> None:
    """Emit softmax attention over some rows of `cache`, which is what `add_cache` returns (None: a new one).

    Each position is first written to the cache. For each (first, step, count) in spans[t] [H or 1, spans, 3], it sees
    `count` rows: first, first + step, and so on. Without `spans`, position t sees rows 0 .. t.
    """
    cache = add_cache(inputs, layout.capacity) if cache is None else cache
    table = {"table_heads": 0, "spans": 0}
    if spans is not None:
        shared = inputs.builder.shared(spans.to(torch.int32))
        table = {"table": shared, "table_heads": spans.shape[1], "spans": spans.shape[2]}
    inputs.emit("rows", **cache, **layout._asdict(), **table)


def place_spans(table: Tensor, layout: CacheLayout) -> Tensor:
    """Return the table of `emit_rows` [T, H, spans, 3] of rows, for a table [H, T, spans, 3] of positions.

    A span ends at the end of the ring and goes on at its start. Spans that no query has are left out.
    """
    first, step, count = table.unbind(-1)
    row = layout.locate(first)
    until_end = torch.minimum((layout.fixed + layout.ring - 1 - row) // step.clamp(min=1) + 1, count)
    wrapped = torch.stack([row + until_end * step - layout.ring, step, count - until_end], dim=-1)
    rows = torch.stack([torch.stack([row, step, until_end], dim=-1), wrapped], dim=3).flatten(2, 3).transpose(0, 1)
    return rows[:, :, (rows[..., 2] > 0).any(dim=1).any(dim=0)]
