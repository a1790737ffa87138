"""Softmax attention (Vaswani 2017, arXiv 1706.03762), with a growing key-value cache."""

from typing import Any

import torch
from torch import Tensor

from .base import AttentionOptions, Gates, MixInputs
from .kernels.registry import CACHE_STEP, kernel_for
from .parts.caches import (
    CachedAttention,
    CacheLayout,
    FixedCache,
    KeyValueCache,
    attend_cached,
    attend_masked,
    emit_rows,
    step_fixed_cache,
)
from .tensors import find_padding


class SoftmaxOptions(AttentionOptions):
    """Softmax attention has no options."""


class SoftmaxAttention(CachedAttention[SoftmaxOptions]):
    """y_t = sum over j <= t of softmax_j(q_t . k_j / sqrt(K)) v_j.

    This is the reference for all efficient mechanisms. The state keeps all keys and values, of which a step at position
    t, counted from 0, reads t + 1. In the bidirectional form, j runs over all positions.
    """

    name = "softmax"
    source = "Vaswani 2017, arXiv 1706.03762"
    family = "exact"
    method = "every query against every earlier key"
    bidirectional = True

    @classmethod
    def count_state_traffic(cls, positions: int) -> float:
        """A step reads the cache up to its position, on average half of it, and writes one position."""
        return (positions + 1) / (2 * positions) + 1 / positions

    def attend_cache(self, q: Tensor, cache: KeyValueCache) -> Tensor:
        return attend_cached(q, cache, cache.values)

    def fix_state(self, state: KeyValueCache, place: Tensor, room: Tensor, dtype: torch.dtype) -> FixedCache:
        # The kernel reads only rows that are filled.
        return FixedCache(*state[:2], place, None if kernel_for(CACHE_STEP, *state[:2]) else room)

    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: Any, gates_t: Gates) -> tuple[Tensor, Any]:
        if isinstance(state, FixedCache):
            return step_fixed_cache(q_t, k_t, v_t, state), state
        return super()._step(q_t, k_t, v_t, state, gates_t)

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, gates: Gates) -> Tensor:
        return attend_masked(q, k, v, None if lengths is None else ~find_padding(lengths, k.shape[2])[:, None, None])

    def emit(self, inputs: MixInputs) -> None:
        capacity = self.shape.positions
        emit_rows(inputs, CacheLayout(capacity, 0, capacity))
