"""Softmax attention (Vaswani 2017, arXiv 1706.03762), with a growing key-value cache."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from linformer_cli.native.program import MixInputs

from .base import AttentionOptions, Memory
from .parts.caches import CachedAttention, KeyValueCache, extend_cache, push_in_place

SoftmaxState = KeyValueCache


class SoftmaxOptions(AttentionOptions):
    """Softmax attention has no options."""


class SoftmaxAttention(CachedAttention):
    """y_t = sum over j <= t of softmax_j(q_t . k_j / sqrt(K)) v_j.

    This is the reference for all efficient mechanisms. The state keeps all keys and values. A step at position t,
    counted from 0, costs t + 1 products.
    """

    name = "softmax"
    source = "Vaswani 2017, arXiv 1706.03762"
    family = "exact"
    method = "every query against every earlier key"
    memory = Memory.GROWING
    options_type = SoftmaxOptions

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, extra: Tensor | None
    ) -> tuple[Tensor, KeyValueCache]:
        cache = extend_cache(state, k, v)
        if state is None:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True), cache
        length, block = int(cache.position), q.shape[2]
        mask = None
        if block > 1:
            # torch's is_causal aligns the triangle to the top left, which is wrong after a prefix.
            mask = torch.ones(block, length, dtype=torch.bool, device=q.device).tril(length - block)
        keys, values = cache.keys[:, :, :length], cache.values[:, :, :length]
        # Under autocast, the inputs and the cache can have different types.
        y = functional.scaled_dot_product_attention(q.to(keys.dtype), keys, values, attn_mask=mask)
        return y.to(v.dtype), cache

    @torch.no_grad()
    def step(
        self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: KeyValueCache, extra_t: Tensor | None = None
    ) -> tuple[Tensor, KeyValueCache]:
        cache, length = push_in_place(state, k_t, v_t)
        keys, values = cache.keys[:, :, :length], cache.values[:, :, :length]
        y = functional.scaled_dot_product_attention(q_t.unsqueeze(2).to(keys.dtype), keys, values)
        return y.squeeze(2).to(v_t.dtype), cache

    def emit(self, inputs: MixInputs) -> None:
        self.emit_spans(inputs, None)
