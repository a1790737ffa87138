"""Locality-sensitive hashing (LSH) attention (Kitaev 2020, 'Reformer', arXiv 2001.04451): keys with equal hashes."""

import math
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import AfterValidator, Field
from torch import Tensor
from torch.nn import functional

from .base import Attention, AttentionOptions, AttentionShape, Gates, Memory, MixInputs, Out, setting
from .parts.bucket_chunks import EMPTY, attend_in_buckets, sort_by_bucket
from .parts.caches import FixedCache, KeyValueCache, add_cache, extend_cache, fit_rows, init_cache, push_in_place
from .parts.key_sets import join, weigh
from .parts.scaling import shrink_huge
from .tensors import accumulator_dtype, find_padding


def _scale_keys(queries: Tensor) -> Tensor:
    """Return the keys of queries [..., K]: the queries scaled to length 1 / sqrt(K)."""
    return functional.normalize(queries, dim=-1) / math.sqrt(queries.shape[-1])


def _even(buckets: int) -> int:
    if buckets % 2:
        raise ValueError("must be even, because each random vector gives two buckets")
    return buckets


class LshOptions(AttentionOptions):
    rounds: int = setting(4, "number of hashes; a query sees keys that share its bucket in any of them", gt=0, le=64)
    buckets: Annotated[int, Field(gt=1, le=4096, description="number of hashes; even"), AfterValidator(_even)] = 32
    window: int = setting(16, "number of preceding positions in the same bucket that a query sees", gt=0, le=4096)
    average: bool = setting(False, "average the rounds in the bidirectional form, with equal weights")


class LshState(NamedTuple):
    """A cache of queries, from which keys are computed, and values; and rings int32 [B, H, R, buckets, window].

    A ring holds the last `window` positions of its bucket in any order. Unused entries are `EMPTY`.
    """

    cache: KeyValueCache
    rings: Tensor


class LshAttention(Attention[LshOptions, LshState]):
    """y_t = sum over j in P(t) of softmax_j(q_t . k_j / sqrt(K)) v_j, where k_j = q_j / |q_j|.

    P(t) is the union of P_1(t) to P_R(t), with each j once. If P(t) is empty, y_t is v_t. P_r(t) holds the last
    `window` positions before t that have the same hash as t. The hash is h_r(j) = argmax([q_j R_r; -q_j R_r]), computed
    in float64; R_r is random, fixed and saved.

    This is section 2 of the source, with two differences. The source sorts the whole sequence and cuts it into chunks,
    so the neighbours of a position depend on later positions. Here, the neighbours are the preceding positions in the
    same bucket, in `attend` as in `step`. A key found in several rounds counts once. The source counts a key found in N
    rounds N times, and subtracts log N from its score.

    The keys that a position sees depend only on that position and earlier ones. Later positions change the order in
    which `attend` adds, and can thereby change the last bits of an earlier output. If the two largest products of a
    hash are equal up to rounding, `attend` and `step` can choose different hashes and see different keys.

    The bidirectional form is that of the source's code: chunks of `window` positions, as in `attend_sorted_chunks`.
    """

    name = "lsh"
    source = "Kitaev 2020, arXiv 2001.04451"
    family = "hashing"
    method = "the last keys with the same hash, several rounds"
    memory = Memory.GROWING
    shared_query_key = True
    bidirectional = True
    rotations: Tensor

    def __init__(self, options: LshOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        rotations = torch.randn(shape.heads, shape.key_width, options.rounds, options.buckets // 2)
        self.register_buffer("rotations", rotations)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, state: LshState | None, gates: Gates) -> Out[LshState]:
        q = shrink_huge(q, (-1,))
        cache = extend_cache(None if state is None else state.cache, q, v)
        length = int(cache.position)
        known = length - q.shape[2]
        bucket = self._hash(q.detach()).permute(3, 0, 1, 2).flatten(1, 2)
        rings = state.rings.permute(2, 0, 1, 3, 4).flatten(1, 2) if state is not None and known else None
        layout, rings = sort_by_bucket(bucket, rings, known, self.options.buckets, self.options.window)
        dtype = accumulator_dtype(q.dtype)
        queries, values = (part[:, :, :length].to(dtype).flatten(0, 1) for part in (cache.keys, cache.values))
        y = attend_in_buckets(queries, _scale_keys(queries), values, layout, known, self.options.window)
        rings = rings.to(torch.int32).unflatten(1, q.shape[:2]).permute(1, 2, 0, 3, 4).contiguous()
        return y.unflatten(0, q.shape[:2]), LshState(cache, rings)

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, gates: Gates) -> Tensor:
        dtype, q = accumulator_dtype(q.dtype), shrink_huge(q, (-1,))
        buckets, q, wide = (x.flatten(0, 1) for x in (self._hash(q.detach()), q.to(dtype), v.to(dtype)))
        ends = None if lengths is None else lengths.repeat_interleave(v.shape[1])
        options = self.options
        return attend_sorted_chunks(q, _scale_keys(q), wide, buckets, ends, options.window, options.average).view_as(v)

    def _hash(self, q: Tensor) -> Tensor:
        """Return buckets int64 [B, H, T, R] of q [B, H, T, K]."""
        # In float64, rounding rarely decides between two buckets. MPS has no float64.
        wide = torch.float32 if q.device.type == "mps" else torch.float64
        products = (q.to(wide) @ self.rotations.to(wide).flatten(2)).unflatten(-1, self.rotations.shape[2:])
        most, most_at = products.max(dim=-1)
        least, least_at = products.min(dim=-1)
        return torch.where(most >= -least, most_at, least_at + self.options.buckets // 2)

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> LshState:
        cache = init_cache(batch, self.shape, capacity, device, dtype)
        shape = (batch, self.shape.heads, self.options.rounds, self.options.buckets, self.options.window)
        return LshState(cache, torch.full(shape, EMPTY, dtype=torch.int32, device=device))

    def fix_state(self, state: LshState, place: Tensor, room: Tensor, dtype: torch.dtype) -> Any:
        cache: Any = FixedCache(*state.cache[:2], place)
        return LshState(cache, state.rings)

    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: Any, gates_t: Gates) -> tuple[Tensor, Any]:
        q_t = shrink_huge(q_t, (-1,))
        rounds, window = self.options.rounds, self.options.window
        rows_of = q_t.shape[0] * q_t.shape[1]
        bucket = self._hash(q_t.unsqueeze(2)).view(-1)
        cell = bucket + torch.arange(0, len(bucket) * self.options.buckets, self.options.buckets, device=q_t.device)
        rings = state.rings.view(-1, window)
        ring = rings.index_select(0, cell)
        seen = ring.view(rows_of, rounds * window)
        if rounds > 1:
            seen = seen.sort(dim=-1).values
            seen[:, 1:].masked_fill_(seen[:, 1:] == seen[:, :-1], EMPTY)
        hidden, dtype = seen < 0, accumulator_dtype(q_t.dtype)
        # Update the cache first, since it may be reallocated. The rings do not hold the new position yet.
        cache = state.cache
        if isinstance(cache, FixedCache):
            cache.write(cache.place, q_t, v_t)
            position: Any = cache.place.to(torch.int32)
        else:
            cache, length = push_in_place(cache, q_t, v_t)
            position = length - 1
        capacity = cache.keys.shape[2]
        base = torch.arange(0, rows_of * capacity, capacity, device=q_t.device).unsqueeze(-1)
        rows = (seen.clamp(min=0) + base).view(-1)
        queries, values = (
            part.view(-1, part.shape[-1]).index_select(0, rows).to(dtype).view(rows_of, rounds * window, -1)
            for part in cache[:2]
        )
        norms = torch.linalg.vector_norm(queries, dim=-1).mul_(math.sqrt(q_t.shape[-1])).clamp_(min=1e-12)
        q, v = q_t.flatten(0, 1).to(dtype), v_t.flatten(0, 1).to(dtype)
        scores = torch.bmm(queries, q.unsqueeze(-1)).squeeze(-1).div_(norms)
        # The mask value is finite, so that a row without keys gives a mean instead of NaN. This mean is replaced below.
        weights = scores.masked_fill_(hidden, torch.finfo(dtype).min).softmax(dim=-1)
        y = torch.bmm(weights.unsqueeze(1), values).squeeze(1)
        y = torch.where(hidden.all(dim=-1, keepdim=True), v, y).view_as(v_t)
        # Overwrite the oldest position of the ring, its smallest number.
        rings.view(-1)[cell * window + ring.argmin(dim=-1)] = position
        return y, LshState(cache, state.rings)

    def emit(self, inputs: MixInputs) -> None:
        builder, shape, options = inputs.builder, self.shape, self.options
        capacity, cells = shape.positions, options.rounds * options.buckets
        inputs.emit(
            "lsh",
            **add_cache(inputs, capacity),
            rings=inputs.state(cells * options.window, EMPTY, torch.int32),
            rotations=builder.shared(self.rotations),
            products=builder.scratch("products", shape.heads * cells // 2, torch.float64),
            marks=builder.scratch("marks", shape.heads * capacity, torch.int32),
            capacity=capacity,
            rounds=options.rounds,
            buckets=options.buckets,
            window=options.window,
        )

    def list_states(self, state: LshState) -> list[Tensor]:
        """Return keys of length 1 / sqrt(K) and values with room for a whole image, and the rings."""
        queries, values = (fit_rows(part, self.shape.positions) for part in state.cache[:2])
        return [_scale_keys(queries), values, state.rings]


def attend_sorted_chunks(
    q: Tensor, k: Tensor, v: Tensor, buckets: Tensor, lengths: Tensor | None, chunk: int, average: bool
) -> Tensor:
    """Return outputs [N, T, V] for buckets [N, T, R]: positions see their chunk and, cyclically, the one before."""
    count, length, _ = buckets.shape
    if lengths is None:
        lengths = torch.full((count,), length, device=q.device)
    with torch.no_grad():
        after_all = int(buckets.max()) + 1
        hidden = find_padding(lengths, length).unsqueeze(-1)
        order = buckets.masked_fill(hidden, after_all).permute(2, 0, 1).argsort(dim=-1, stable=True)
        slots = order.argsort(dim=-1)
        chunks = -(-length // chunk)
        own = functional.pad(order, (0, chunks * chunk - length)).unflatten(-1, (chunks, chunk))
        # Slots after the end of a sequence hold padding.
        unused = find_padding(lengths, chunks * chunk).unflatten(-1, (chunks, chunk)).expand_as(own)
        used_chunks = (lengths + chunk - 1) // chunk
        previous = (torch.arange(chunks, device=q.device) - 1) % used_chunks.unsqueeze(-1)
        previous = previous.unsqueeze(-1).expand_as(own)
        seen = torch.cat([own, own.gather(2, previous)], dim=-1)
        # A single chunk is not its own previous chunk. A single position sees itself.
        twice = (used_chunks == 1).view(-1, 1, 1)
        unused = torch.cat([unused, unused.gather(2, previous) | twice], dim=-1)
        itself = (own.unsqueeze(-1) == seen.unsqueeze(-2)) & (lengths > 1).view(-1, 1, 1, 1)
        mask = unused.unsqueeze(-2) | itself
        first = torch.arange(count, device=q.device).view(-1, 1, 1) * length
    pairs = ((q.flatten(0, 1), own + first), (k.flatten(0, 1), seen + first), (v.flatten(0, 1), seen + first))
    queries, keys, values = (x.index_select(0, rows.flatten()).unflatten(0, rows.shape) for x, rows in pairs)
    part = weigh(queries, keys, values, mask).flatten(2, 3)
    part = part.gather(2, slots.unsqueeze(-1).expand(-1, -1, -1, part.shape[-1]))
    return torch.stack([join([x]) for x in part]).mean(dim=0) if average else join(part.unbind())
