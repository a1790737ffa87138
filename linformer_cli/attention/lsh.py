"""Locality-sensitive hashing (LSH) attention (Kitaev 2020, 'Reformer', arXiv 2001.04451): keys with equal hashes."""

import math
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import AfterValidator, Field
from torch import Tensor
from torch.nn import functional

from linformer_cli.native.program import MixInputs

from .base import Attention, AttentionOptions, AttentionShape, Memory, accumulator_dtype
from .bidirectional.lsh import attend_sorted_chunks
from .parts.caches import KeyValueCache, add_cache, cache_format, extend_cache, fit_rows, init_cache, push_in_place
from .parts.scaling import large_number, shrink_huge

# Marks an entry of a ring that was never written.
EMPTY = -1


def _scale_keys(queries: Tensor) -> Tensor:
    """The keys of queries [..., K]: the queries scaled to length 1 / sqrt(K)."""
    return functional.normalize(queries, dim=-1) / math.sqrt(queries.shape[-1])


def _even(buckets: int) -> int:
    if buckets % 2:
        raise ValueError("must be even, because each random vector gives two buckets")
    return buckets


class LshOptions(AttentionOptions):
    """Options of LSH attention."""

    rounds: Annotated[
        int, Field(gt=0, le=64, description="number of hashes; a query sees keys that share its bucket in any of them")
    ] = 4
    buckets: Annotated[
        int, Field(gt=1, le=4096, description="number of hash values; must be even"), AfterValidator(_even)
    ] = 32
    window: Annotated[
        int, Field(gt=0, le=4096, description="number of preceding positions in the same bucket that a query sees")
    ] = 16
    average: Annotated[bool, Field(description="average the rounds in the bidirectional form, with equal weights")] = (
        False
    )


class LshState(NamedTuple):
    """A cache of queries and values, and rings of positions. Keys are computed from the queries.

    The rings are int32 [B, H, R, buckets, window]. A ring holds the last `window` positions of its bucket in any order.
    Unused entries are `EMPTY`.
    """

    cache: KeyValueCache
    rings: Tensor


class _Layout(NamedTuple):
    """The order of positions after sorting by bucket in each of R rounds, for N = B H sequences.

    rows [R, N, slots] is the position in each slot, and slots [R, N, T] is the slot of each new position. The code of a
    position grows by 1 per slot and by another `window` per bucket. Therefore t sees an earlier j in a round if and
    only if the codes of t and j differ by at most `window`. The codes are key_codes [R, N, positions] and query_codes
    [R, N, slots].
    """

    rows: Tensor
    slots: Tensor
    key_codes: Tensor
    query_codes: Tensor


class LshAttention(Attention):
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
    options_type = LshOptions
    options: LshOptions
    shared_query_key = True
    bidirectional = True
    rotations: Tensor

    def __init__(self, options: LshOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        rotations = torch.randn(shape.heads, shape.key_width, options.rounds, options.buckets // 2)
        self.register_buffer("rotations", rotations)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, state: Any, extra: Tensor | None) -> tuple[Tensor, LshState]:
        q = shrink_huge(q, (-1,))
        cache = extend_cache(None if state is None else state.cache, q, v)
        length = int(cache.position)
        known = length - q.shape[2]
        with torch.autocast(q.device.type, enabled=False):
            layout, rings = self._arrange(q, state.rings if known else None, known)
            dtype = accumulator_dtype(q.dtype)
            queries, values = (part[:, :, :length].to(dtype).flatten(0, 1) for part in (cache.keys, cache.values))
            y = self._mix(queries, values, layout, known).unflatten(0, q.shape[:2])
        return y.to(v.dtype), LshState(cache, rings)

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, extra: Tensor | None) -> Tensor:
        dtype = accumulator_dtype(q.dtype)
        with torch.autocast(q.device.type, enabled=False):
            q = shrink_huge(q, (-1,))
            buckets, q, v_wide = (x.flatten(0, 1) for x in (self._hash(q.detach()), q.to(dtype), v.to(dtype)))
            ends = None if lengths is None else lengths.repeat_interleave(v.shape[1])
            window, average = self.options.window, self.options.average
            y = attend_sorted_chunks(q, _scale_keys(q), v_wide, buckets, ends, window, average)
        return y.view_as(v).to(v.dtype)

    def _hash(self, q: Tensor) -> Tensor:
        """Buckets int64 [B, H, T, R] of q [B, H, T, K]."""
        # In float64, rounding rarely decides between two buckets. MPS has no float64.
        wide = torch.float32 if q.device.type == "mps" else torch.float64
        products = (q.to(wide) @ self.rotations.to(wide).flatten(2)).unflatten(-1, self.rotations.shape[2:])
        most, most_at = products.max(dim=-1)
        least, least_at = products.min(dim=-1)
        return torch.where(most >= -least, most_at, least_at + self.options.buckets // 2)

    @torch.no_grad()
    def _arrange(self, q: Tensor, rings: Tensor | None, known: int) -> tuple[_Layout, Tensor]:
        """The layout of the new positions after `known` earlier ones, and the new rings."""
        window, buckets = self.options.window, self.options.buckets
        bucket = self._hash(q).permute(3, 0, 1, 2).flatten(1, 2)
        rounds, rows_of, new = bucket.shape
        sorted_bucket, order = bucket.sort(dim=-1, stable=True)
        counts = bucket.new_zeros(rounds, rows_of, buckets).scatter_add_(-1, bucket, torch.ones_like(bucket))
        starts = counts.cumsum(dim=-1) - counts
        gaps = (counts > 0).cumsum(dim=-1) - 1  # number of non-empty buckets before this one
        place, offsets = (torch.arange(count, device=q.device) for count in (new, window))
        gap = window * gaps.gather(-1, sorted_bucket)
        positions, nowhere = order + known, known + new

        if rings is None:
            ring = bucket.new_full((rounds, rows_of, buckets, window), EMPTY)
            used, at = new, place.expand_as(gap)
        else:
            ring = rings.permute(2, 0, 1, 3, 4).flatten(1, 2).long().sort(dim=-1).values
            # The ring of a bucket precedes the new positions of the bucket.
            used, at = new + min(buckets, new) * window, place + gap + window
        codes = at + gap
        size = -(-used // window) * window
        rows = bucket.new_full((rounds, rows_of, size + window), nowhere).scatter_(-1, at, positions)
        key_codes = bucket.new_full((rounds, rows_of, nowhere + 1), -window - 1).scatter_(-1, positions, codes)
        query_codes = bucket.new_full((rounds, rows_of, size), -3 * window - 3).scatter_(-1, at, codes)
        if rings is not None:
            # Rings of buckets without new positions go after the last slot and are cut off.
            first = torch.where(counts > 0, starts + window * gaps, size).unsqueeze(-1)
            ring_rows = torch.where(ring == EMPTY, nowhere, ring).flatten(2)
            ring_at = (first + offsets).flatten(2)
            rows.scatter_(-1, ring_at, ring_rows)
            ring_codes = first + offsets + window * gaps.unsqueeze(-1)
            ring_codes = torch.where((counts > 0).unsqueeze(-1), ring_codes, -window - 1).flatten(2)
            key_codes.scatter_(-1, ring_rows, ring_codes)
            key_codes[..., nowhere] = -window - 1
        slots = torch.empty_like(order).scatter_(-1, order, at)

        # The new ring holds the last `window` entries of the old ring and the new positions together.
        index = counts.unsqueeze(-1) + offsets
        newer = positions.gather(-1, (starts.unsqueeze(-1) + index - window).clamp(0, new - 1).flatten(2))
        kept = torch.where(index < window, ring.gather(-1, index.clamp(max=window - 1)), newer.view_as(index))
        kept = kept.to(torch.int32).unflatten(1, q.shape[:2]).permute(1, 2, 0, 3, 4).contiguous()
        # Codes are compared many times, and comparing narrow integers is faster.
        narrow = torch.int16 if size + (buckets + 4) * (window + 1) < 2**15 else torch.int32
        return _Layout(rows[..., :size], slots, key_codes.to(narrow), query_codes.to(narrow)), kept

    def _mix(self, queries: Tensor, values: Tensor, layout: _Layout, known: int) -> Tensor:
        """Outputs [N, T, V] of the new positions, for queries [N, positions, K] and values [N, positions, V].

        Each slot sees the `window` slots before it. In chunks of `window` slots, slot i sees the slots before i in its
        own chunk, and the slots from i on in the previous chunk. One matrix [window, window] per chunk therefore holds
        all scores. Scores within the chunk are below the diagonal; scores with the previous chunk are on and above it.
        """
        window = self.options.window
        rounds, rows_of, size = layout.rows.shape
        length, new = queries.shape[1], layout.slots.shape[-1]
        keys, values_and_one = _scale_keys(queries), functional.pad(values, (0, 1), value=1.0)
        base = torch.arange(rows_of, device=queries.device).unsqueeze(-1)
        rows = (layout.rows.clamp(max=length - 1) + base * length).flatten()
        # All chunks form one sequence. An extra chunk precedes it, so that the first chunk has a previous chunk too.
        shifted = functional.pad(rows, (window, 0))
        chunk_queries, chunk_keys, chunk_values = (
            x.flatten(0, 1).index_select(0, at).unflatten(0, (-1, window))
            for x, at in ((queries, rows), (keys, shifted), (values_and_one, shifted))
        )
        below = torch.ones(window, window, dtype=torch.bool, device=queries.device).tril(-1)
        hidden = self._hidden(layout, below)

        own, before = (chunk_queries @ part.transpose(1, 2) for part in (chunk_keys[1:], chunk_keys[:-1]))
        scores = torch.where(below, own, before).masked_fill(hidden, -math.inf)
        first = size * torch.arange(rounds * rows_of, device=rows.device)
        slots = (layout.slots + first.view(rounds, rows_of, 1)).flatten()
        with torch.no_grad():
            # The softmax covers all rounds of a position, so the rounds need a common maximum.
            top = scores.amax(dim=-1).flatten().index_select(0, slots).view(rounds, rows_of, new).amax(dim=0)
            top = top.masked_fill_(top == -math.inf, 0)
            spread = top.new_zeros(rounds * rows_of * size)
            spread.index_copy_(0, slots, top.expand(rounds, -1, -1).flatten())
        weights = (scores - spread.view(-1, window, 1)).exp()
        sums = weights.tril(-1) @ chunk_values[1:] + weights.triu() @ chunk_values[:-1]
        sums = sums.flatten(0, 1).index_select(0, slots).view(rounds, rows_of, new, -1).sum(dim=0)
        total = sums[..., -1:]
        alone = total == 0
        return torch.where(alone, values[:, known:], sums[..., :-1] / total.masked_fill(alone, 1))

    @torch.no_grad()
    def _hidden(self, layout: _Layout, below: Tensor) -> Tensor:
        """True for scores to mask, bool [chunks, window, window].

        A score is masked if its key is not seen in the score's round, or was already seen in an earlier round.
        """
        rounds, rows_of, size = layout.rows.shape
        window = len(below)
        seen = torch.zeros(rounds, rows_of * size // window, window, window, dtype=torch.bool, device=below.device)
        for number in range(rounds):
            # The codes of round `number`, in the order of that round and of all later ones.
            later = rounds - number
            rows = layout.rows[number:]
            keys = layout.key_codes[number].expand(later, -1, -1).gather(-1, rows)
            queries = torch.where(layout.query_codes[number:] < 0, layout.query_codes[number:], keys)
            keys = functional.pad(keys.flatten(), (window, 0)).unflatten(0, (-1, 1, window))
            near = torch.where(below, keys[1:], keys[:-1])
            near = near.sub_(queries.view(-1, window, 1)).abs_() <= window
            near = near.view(later, -1, window, window)
            torch.gt(near[0], seen[number], out=seen[number])
            seen[number + 1 :] |= near[1:]
        # The first chunk of a sequence has no previous chunk; the chunk before it belongs to another sequence.
        seen.view(rounds * rows_of, -1, window, window)[:, 0].logical_and_(below)
        return seen.logical_not_().flatten(0, 1)

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> LshState:
        cache = init_cache(batch, self.shape, capacity, device, dtype)
        shape = (batch, self.shape.heads, self.options.rounds, self.options.buckets, self.options.window)
        return LshState(cache, torch.full(shape, EMPTY, dtype=torch.int32, device=device))

    @torch.no_grad()
    def step(
        self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: LshState, extra_t: Tensor | None = None
    ) -> tuple[Tensor, LshState]:
        with torch.autocast(q_t.device.type, enabled=False):
            return self._step(shrink_huge(q_t, (-1,)), v_t, state)

    def _step(self, q_t: Tensor, v_t: Tensor, state: LshState) -> tuple[Tensor, LshState]:
        rounds, window = self.options.rounds, self.options.window
        rows_of = q_t.shape[0] * q_t.shape[1]
        bucket = self._hash(q_t.unsqueeze(2)).view(-1)
        cell = bucket + torch.arange(0, len(bucket) * self.options.buckets, self.options.buckets, device=q_t.device)
        rings = state.rings.view(-1, window)
        ring = rings.index_select(0, cell)
        seen = ring.view(rows_of, rounds * window)
        if rounds > 1:
            seen = seen.sort(dim=-1).values
            again = seen[:, 1:] == seen[:, :-1]
            seen[:, 1:].masked_fill_(again, EMPTY)
        hidden = seen < 0

        dtype = accumulator_dtype(q_t.dtype)
        # Update the cache first, since it may be reallocated. The rings do not hold the new position yet.
        cache, length = push_in_place(state.cache, q_t, v_t)
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
        y = torch.where(hidden.all(dim=-1, keepdim=True), v, y).view_as(v_t).to(v_t.dtype)

        # Overwrite the oldest position of the ring. It is the smallest number in the ring.
        oldest = ring.argmin(dim=-1, keepdim=True)
        rings.view(-1)[cell * window + oldest.squeeze(-1)] = length - 1
        return y, LshState(cache, state.rings)

    def emit(self, inputs: MixInputs) -> None:
        builder, shape, options = inputs.builder, self.shape, self.options
        capacity, cells = shape.positions, options.rounds * options.buckets
        buffers = [
            *add_cache(builder, shape, capacity),
            builder.state(shape.heads * cells * options.window, EMPTY, torch.int32),
            builder.shared(self.rotations),
            builder.scratch("products", shape.heads * cells // 2, torch.float64),
            builder.scratch("marks", shape.heads * capacity, torch.int32),
        ]
        integers = (capacity, options.rounds, options.buckets, options.window, cache_format(builder))
        inputs.emit("lsh", shape.heads_and_widths, buffers, integers, (large_number(torch.float32),))

    def list_states(self, state: LshState) -> list[Tensor]:
        """Keys of length 1 / sqrt(K) and values with room for a whole image, and the rings."""
        queries, values = (fit_rows(part, self.shape.positions) for part in state.cache[:2])
        return [_scale_keys(queries), values, state.rings]
