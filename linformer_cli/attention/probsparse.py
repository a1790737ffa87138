"""ProbSparse attention (Zhou 2020, 'Informer', arXiv 2012.07436): some queries attend, and the others average."""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .base import Attention, AttentionOptions, AttentionShape, Gates, Memory, MixInputs, Out, setting
from .parts.caches import (
    FixedCache,
    KeyValueCache,
    add_cache,
    attend_cached,
    attend_masked,
    extend_cache,
    fit_rows,
    init_cache,
    push_in_place,
)
from .parts.key_sets import SCORES_KEPT, join, run_within, weigh
from .tensors import HOSTS, accumulator_dtype, fill_padding, find_padding

QUERIES_AT_ONCE = 64  # of the parallel form, scored against all keys up to the position of the last query
EVERY_QUERY = -3e38  # a threshold below every measure
FRACTIONS = 2**20  # the sampled positions are fractions of a length, in units of 1 / FRACTIONS


class ProbsparseOptions(AttentionOptions):
    factor: float = setting(
        5.0,
        "c; about c ln(block) queries of a block attend, and c ln(T) keys are sampled to choose them",
        gt=0,
        le=1_000,
    )
    block: int = setting(128, "number of positions whose measures set the threshold for the next ones", gt=0, le=65_536)


class ProbsparseState(NamedTuple):
    """A cache, the sum of values [B, H, V], known measures [B, H, block] of this block, and the threshold [B, H]."""

    cache: KeyValueCache
    total: Tensor
    measures: Tensor
    threshold: Tensor


class ProbsparseAttention(Attention[ProbsparseOptions, ProbsparseState]):
    """y_t is softmax attention to all j <= t if M_t >= m(b), and otherwise the mean of v_0 .. v_t.

    M_t = max_j(q_t . k_j) - mean_j(q_t . k_j), over t and some sampled positions j < t, measures how much query t
    prefers some keys. b is the block of `block` positions that contains t, and m(b) is the u-th largest measure of
    block b - 1, where u = factor ln(block), rounded up. In block 0, every query attends. The sample of block b has
    factor ln(T) positions, rounded up; T is the length of an image. The sampled positions are random fractions of
    (b + 1) `block`, and the fractions are drawn once and saved. Measures have no gradient.

    This is section 3 of the source, with a causal choice of queries. The source chooses the factor ln(T) queries of the
    whole sequence with the largest measures, so a later query can turn an earlier one off. If a measure equals the
    threshold up to rounding, `attend` and `step` can decide differently.

    The bidirectional form is that of the source: of n positions, the factor ln(n) queries with the largest measures
    attend to all positions, and the others average all values. The sample has the same fractions, of n.
    """

    name = "probsparse"
    source = "Zhou 2020, arXiv 2012.07436"
    family = "sparse"
    method = "queries with peaked scores attend, others average"
    memory = Memory.GROWING
    bidirectional = True
    sample: Tensor

    def __init__(self, options: ProbsparseOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        self.active = min(options.block, max(1, math.ceil(options.factor * math.log(options.block))))
        self.samples = max(1, math.ceil(options.factor * math.log(shape.positions)))
        self.register_buffer("sample", torch.randint(FRACTIONS, (self.samples,)))

    def _sampled(self, first: int, blocks: int) -> Tensor:
        """Sample positions [blocks, samples] of blocks from `first` on, one in each of `samples` equal parts."""
        block = torch.arange(first, first + blocks, device=self.sample.device)
        return self._sample_lengths((block + 1) * self.options.block)

    def _sample_lengths(self, lengths: Tensor) -> Tensor:
        """Sampled positions [N, samples] below each of `lengths` [N], one in each of `samples` equal parts."""
        fraction = torch.arange(self.samples, device=self.sample.device) * FRACTIONS + self.sample
        return fraction * lengths.unsqueeze(1) // (self.samples * FRACTIONS)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: ProbsparseState | None, gates: Gates
    ) -> Out[ProbsparseState]:
        cache = extend_cache(None if state is None else state.cache, k, v)
        length, dtype = int(cache.position), accumulator_dtype(q.dtype)
        start = length - q.shape[2]
        queries, values = q.to(dtype), v.to(dtype)
        keys, held = (part[:, :, :length].to(dtype) for part in (cache.keys, cache.values))
        totals = values.cumsum(dim=2)
        if state is not None:
            totals = totals + state.total.unsqueeze(2)
        means = totals / torch.arange(start + 1, length + 1, device=q.device).unsqueeze(1)
        active, measures, threshold = self._choose(queries, keys, state)
        if q.device.type in HOSTS:
            scaled = queries / math.sqrt(q.shape[-1])
            y = _attend_active(means, active, *(x.flatten(0, 1) for x in (scaled, keys, held)))
        else:
            # Only the device knows which queries attend. To compute all of them is faster than to ask.
            found = attend_cached(queries, KeyValueCache(keys, held, cache.position), held)
            y = torch.where(active.unsqueeze(-1), found, means)
        # A copy, because a view would keep the sums of all positions in memory.
        return y, ProbsparseState(cache, totals[:, :, -1].clone(), measures, threshold)

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, gates: Gates) -> Tensor:
        dtype = accumulator_dtype(q.dtype)
        ends = torch.full((len(q),), q.shape[2], device=q.device) if lengths is None else lengths
        logs = ends.cpu().double().log()  # not every device has float64
        count = (self.options.factor * logs).ceil().long().to(ends.device).clamp(min=1).minimum(ends)
        q, k, wide = q.to(dtype), k.to(dtype), v.to(dtype)
        with torch.no_grad():
            sampled = self._sample_lengths(ends)[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
            scores = q @ k.gather(2, sampled).transpose(-1, -2)
            measures = _without_nan(scores.amax(dim=-1, keepdim=True) - scores.mean(dim=-1, keepdim=True))
            measures = fill_padding(measures, lengths, -math.inf).squeeze(-1)
        return _attend_largest(q / math.sqrt(q.shape[-1]), k, wide, measures, count, ends)

    @torch.no_grad()
    def _choose(self, q: Tensor, keys: Tensor, state: ProbsparseState | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return whether each of the last T positions attends, bool [B, H, T], and the new measures and threshold."""
        block, length, new = self.options.block, keys.shape[2], q.shape[2]
        first, offset = divmod(length - new, block)
        blocks = -(-(offset + new) // block)
        sides = (offset, blocks * block - offset - new)
        measures = self._measure(q, keys, first, sides)
        threshold = q.new_full(q.shape[:2], EVERY_QUERY)
        if state is not None:
            measures[:, :, 0, :offset] = state.measures[:, :, :offset]
            threshold = state.threshold
        thresholds = torch.cat([threshold.unsqueeze(2), self._threshold(measures)], dim=2)
        active = (measures >= thresholds[:, :, :-1].unsqueeze(-1)).flatten(2)[:, :, offset : offset + new]
        if sides[1] == 0:
            return active, torch.zeros_like(measures[:, :, 0]), thresholds[:, :, -1].clone()
        return active, measures[:, :, -1].clone(), thresholds[:, :, -2].clone()

    def _measure(self, q: Tensor, keys: Tensor, first: int, sides: tuple[int, int]) -> Tensor:
        """Measure the last queries, [B, H, blocks, block]; `sides` are the unused places before and after them."""
        block, length = self.options.block, keys.shape[2]
        queries = functional.pad(q, (0, 0, *sides)).unflatten(2, (-1, block))
        own = functional.pad((q * keys[:, :, -q.shape[2] :]).sum(dim=-1), sides).unflatten(2, (-1, block))
        sampled = self._sampled(first, queries.shape[2])
        chosen = keys.index_select(2, sampled.clamp(max=length - 1).flatten()).unflatten(2, sampled.shape)
        position = torch.arange(first * block, first * block + own[0, 0].numel(), device=q.device)
        hidden = sampled.unsqueeze(1) >= position.view(-1, block, 1)
        scores = (queries @ chosen.transpose(-1, -2)).masked_fill_(hidden, -math.inf)
        largest = torch.maximum(scores.amax(dim=-1), own)
        total = scores.masked_fill_(hidden, 0).sum(dim=-1) + own
        return _without_nan(largest - total / ((~hidden).sum(dim=-1) + 1))

    def _threshold(self, measures: Tensor) -> Tensor:
        """Return the u-th largest of measures [..., block]."""
        return measures.topk(self.active, dim=-1).values[..., -1]

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> ProbsparseState:
        heads, wide = (batch, self.shape.heads), accumulator_dtype(dtype)
        return ProbsparseState(
            init_cache(batch, self.shape, capacity, device, dtype),
            torch.zeros(*heads, self.shape.value_width, device=device, dtype=wide),
            torch.zeros(*heads, self.options.block, device=device, dtype=wide),
            torch.full(heads, EVERY_QUERY, device=device, dtype=wide),
        )

    def fix_state(self, state: Any, place: Tensor, room: Tensor, dtype: torch.dtype) -> Any:
        return state._replace(cache=FixedCache(state.cache.keys, state.cache.values, place, room))

    def _step_fixed(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: Any) -> Tensor:
        """`_step` for CUDA graphs: the host knows neither the position nor which queries attend."""
        cache, total, measures, threshold = state
        place, block, dtype = cache.place, self.options.block, total.dtype
        cache.write(place, k_t, v_t)
        keys, values, seen = cache.read()
        query, own = q_t.to(dtype).unsqueeze(2), (q_t.to(dtype) * k_t).sum(dim=-1)
        sampled = self._sample_lengths(((place // block + 1) * block).view(1)).flatten()
        hidden = sampled >= place
        chosen = keys.index_select(2, sampled.clamp(max=keys.shape[2] - 1)).to(dtype)
        scores = (query @ chosen.transpose(-1, -2)).squeeze(2)
        largest = torch.maximum(scores.masked_fill(hidden, -math.inf).amax(dim=-1), own)
        mean = (scores.masked_fill_(hidden, 0).sum(dim=-1) + own) / ((~hidden).sum() + 1)
        measure = _without_nan(largest - mean)
        found = attend_masked(query, keys.to(dtype), values.to(dtype), seen).squeeze(2)
        y = torch.where((measure >= threshold).unsqueeze(-1), found, total.add_(v_t) / (place + 1))
        measures.index_copy_(2, (place % block).view(1), measure.unsqueeze(2))
        threshold.copy_(torch.where((place + 1) % block == 0, self._threshold(measures), threshold))
        return y

    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: Any, gates_t: Gates) -> tuple[Tensor, Any]:
        if isinstance(state.cache, FixedCache):
            return self._step_fixed(q_t, k_t, v_t, state), state
        cache, length = push_in_place(state.cache, k_t, v_t)
        block, dtype = self.options.block, state.total.dtype
        q, position = q_t.to(dtype).unsqueeze(2), length - 1
        first, place = divmod(position, block)
        state.total.add_(v_t)
        y = state.total / length
        if q.device.type in HOSTS:
            sampled = self._sampled(first, 1).flatten()
            seen = torch.cat([sampled[sampled < position], sampled.new_tensor([position])])
            scores = (q @ cache.keys.index_select(2, seen).to(dtype).transpose(-1, -2)).squeeze(2)
            measure = _without_nan(scores.amax(dim=-1) - scores.mean(dim=-1))
            attends = (measure >= state.threshold).flatten().nonzero().flatten()
            if len(attends):
                parts = (part[:, :, :length].flatten(0, 1) for part in cache[:2])
                keys, values = (part.index_select(0, attends).to(dtype) for part in parts)
                queries = q.flatten(0, 1).index_select(0, attends)
                found = functional.scaled_dot_product_attention(queries, keys, values).squeeze(1)
                y = y.flatten(0, 1).index_copy(0, attends, found).view_as(y)
        else:
            keys, values = (part[:, :, :length].to(dtype) for part in cache[:2])
            measure = self._measure(q, keys, first, (place, block - place - 1))[:, :, 0, place]
            found = functional.scaled_dot_product_attention(q, keys, values).squeeze(2)
            y = torch.where((measure >= state.threshold).unsqueeze(-1), found, y)
        state.measures[:, :, place] = measure
        if length % block == 0:
            state.threshold.copy_(self._threshold(state.measures))
        return y, state._replace(cache=cache)

    def emit(self, inputs: MixInputs) -> None:
        builder, capacity, block = inputs.builder, self.shape.positions, self.options.block
        inputs.emit(
            "probsparse",
            **add_cache(inputs, capacity),
            total=inputs.state(self.shape.value_width),
            measures=inputs.state(block),
            threshold=inputs.state(1, EVERY_QUERY),
            sampled=builder.shared(self._sampled(0, -(-capacity // block)).to(torch.int32)),
            capacity=capacity,
            block=block,
            active=self.active,
            samples=self.samples,
        )

    def list_states(self, state: ProbsparseState) -> list[Tensor]:
        keys, values = (fit_rows(part, self.shape.positions) for part in state.cache[:2])
        return [keys, values, *state[1:]]


def _without_nan(measures: Tensor) -> Tensor:
    """Return `measures` with infinity in place of NaN: a query with NaN then attends, so its output is NaN too."""
    return measures.masked_fill(measures.isnan(), math.inf)


def _attend_active(means: Tensor, active: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`means` [B, H, T, V], with softmax attention of scaled q [B H, T, K] to k and v where `active` [B, H, T]."""
    active = active.flatten(0, 1)
    (rows, new), length = active.shape, k.shape[1]
    most = int(active.sum(dim=1).max())
    if most == 0:
        return means
    # Every sequence has `most` places. Its active queries come first, in the order of positions.
    places = active.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
    used = active.gather(1, places)
    chosen = q.gather(1, places.unsqueeze(-1).expand(-1, -1, q.shape[-1]))
    outputs = []
    for group, position, valid in zip(*(x.split(QUERIES_AT_ONCE, dim=1) for x in (chosen, places, used)), strict=True):
        position = position + length - new
        seen = int((position * valid).max()) + 1
        parts = group, k[:, :seen], v[:, :seen]
        outputs.append(run_within(SCORES_KEPT, most * length, functools.partial(_attend_rows, position), *parts))
    at = (places + torch.arange(rows, device=q.device).unsqueeze(1) * new)[used]
    return means.flatten(0, 2).index_copy(0, at, torch.cat(outputs, dim=1)[used]).view_as(means)


def _attend_rows(position: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return outputs [N, A, V] of queries [N, A, K] at positions [N, A]."""
    later = torch.arange(k.shape[1], device=k.device) > position.unsqueeze(-1)
    return (q @ k.transpose(1, 2)).masked_fill_(later, -math.inf).softmax(dim=-1) @ v


def _attend_largest(q: Tensor, k: Tensor, v: Tensor, measures: Tensor, count: Tensor, lengths: Tensor) -> Tensor:
    """Return outputs of the `count` [B] scaled queries with the largest `measures` [B, H, T]; else the mean value."""
    places = measures.topk(int(count.max()), dim=-1).indices
    chosen = q.gather(2, places.unsqueeze(-1).expand(-1, -1, -1, q.shape[-1]))
    found = join([weigh(chosen, k, v, find_padding(lengths, k.shape[2])[:, None, None])])
    means = (v.sum(dim=2) / lengths.view(-1, 1, 1)).unsqueeze(2)
    # Short sequences have fewer attending queries than places.
    used = torch.arange(places.shape[-1], device=q.device) < count.view(-1, 1, 1)
    found = torch.where(used.unsqueeze(-1), found, means)
    return means.expand_as(v).scatter(2, places.unsqueeze(-1).expand_as(found), found)
