"""The gated attention unit (Hua 2022, 'FLASH-Quad', arXiv 2202.10447): one head, squared relu, all earlier keys."""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from linformer_cli.errors import UsageError
from .base import AttentionShape, Gates, MixInputs, Out, setting
from .parts.caches import CachedAttention, FixedCache, KeyValueCache, add_cache, extend_cache
from .parts.gated_attention import GatedAttention, GatedOptions
from .tensors import accumulator_dtype

ROWS_AT_ONCE = 200  # of queries in the parallel form; smaller blocks compute fewer scores above the diagonal


class GauOptions(GatedOptions):
    activation: Literal["relu2", "laplace"] = setting("relu2", "weight of a score x: relu(x)^2, or bounded Laplace")


class GauAttention(GatedAttention[GauOptions, KeyValueCache], CachedAttention[GauOptions]):
    """y_t = sum over j <= t of relu(q_t . k_j / n + b[t - j])^2 v_j.

    This is section 2 of the source. q and k are scaled and shifted copies of one projection Z. n is the number of
    positions of a whole image. b has one entry per distance in an image, so longer sequences are refused. With `scale =
    "width"`, there is no b, and the weight is relu(q_t . k_j / sqrt(K))^2 / n. `laplace` (Ma 2022, arXiv 2209.10655)
    replaces relu(x)^2 by (1 + erf((x - mu) / (sigma sqrt 2))) / 2, with mu = sqrt(1/2) and sigma = sqrt(1 / (4 pi)).

    In the bidirectional form, j runs over all positions, and the bias is b[|t - j|]; in the source, later positions
    have others.

    Unlike in the source, b is a plain table indexed by distance, and sums are float32 or float64.
    """

    name = "gau"
    source = "Hua 2022, arXiv 2202.10447"
    method = "squared relu, one gated head"
    bidirectional = True

    def __init__(self, options: GauOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape, span=shape.positions)

    def activate(self, scores: Tensor) -> Tensor:
        if self.options.activation == "relu2":
            return super().activate(scores)
        # mu = sqrt(1/2) and sigma sqrt(2) = sqrt(1 / (2 pi)).
        return 0.5 + 0.5 * torch.erf((scores - math.sqrt(0.5)) * math.sqrt(2 * math.pi))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueCache | None, gates: Gates) -> Out[KeyValueCache]:
        dtype, length = accumulator_dtype(q.dtype), q.shape[2]
        # Keys are first rounded to the type of the cache, so that cutting the sequence does not change rounding.
        held = k.dtype if state is None else state.keys.dtype
        cache = extend_cache(state, self.key(k.to(dtype)).to(held), v)
        start = int(cache.position) - length
        keys, values = (part[:, 0, : start + length].to(dtype) for part in (cache.keys, cache.values))
        return self._mix_rows(q.to(dtype), keys, values, start), cache

    def _mix_rows(self, q: Tensor, keys: Tensor, values: Tensor, start: int, causal: bool = True) -> Tensor:
        """Return outputs [B, 1, T, V] of q [B, 1, T, K], the first at position `start`, for all keys [B, L, K]."""
        self._require_room(start + q.shape[2])
        blocks = []
        for rows in self.query(q).squeeze(1).split(ROWS_AT_ONCE, dim=1):
            seen = start + rows.shape[1] if causal else keys.shape[1]
            blocks.append(self.mix(rows, keys[:, :seen], values[:, :seen], start, causal))
            start += rows.shape[1]
        return torch.cat(blocks, dim=1).unsqueeze(1)

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, gates: Gates) -> Tensor:
        dtype = accumulator_dtype(q.dtype)
        # Values are 0 at the padding, and weights are not normalised, so no mask is needed.
        return self._mix_rows(q.to(dtype), self.key(k.to(dtype)).squeeze(1), v.squeeze(1).to(dtype), 0, causal=False)

    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: Any, gates_t: Gates) -> tuple[Tensor, Any]:
        return super()._step(q_t, self.key(k_t.to(accumulator_dtype(k_t.dtype))), v_t, state, gates_t)

    def step_cache(self, q_t: Tensor, cache: KeyValueCache, position: int) -> Tensor:
        self._require_room(position + 1)
        dtype = accumulator_dtype(q_t.dtype)
        keys, values = (part[:, 0, : position + 1].to(dtype) for part in cache[:2])
        return self.mix(self.query(q_t.to(dtype)), keys, values, position)

    def step_fixed(self, q_t: Tensor, cache: FixedCache) -> Tensor:
        dtype = accumulator_dtype(q_t.dtype)
        keys, values = (part.squeeze(1).to(dtype) for part in cache.read()[:2])
        return self.mix(self.query(q_t.to(dtype)), keys, values, cache.place)

    def _require_room(self, length: int) -> None:
        if self.bias is not None and length > self.span:
            hint = "use images of the size it was built for, or scale=width, which has no bias"
            raise UsageError(f"'gau' has biases for sequences of up to {self.span} positions, found {length}; {hint}")

    def emit(self, inputs: MixInputs) -> None:
        builder, capacity = inputs.builder, self.shape.positions
        inputs.emit(
            "gau",
            **add_cache(inputs, capacity),
            constants=builder.shared(self.list_constants((self.key, 1.0), (self.query, self.score_scale))),
            bias=builder.shared(self.reversed_bias()),
            query=builder.scratch("query", self.shape.key_width),
            weights=builder.scratch("weights", capacity),
            capacity=capacity,
            bounded=self.options.activation == "laplace",
            weight_scale=self.weight_scale,
        )
