"""A step of softmax attention over a key-value cache of fixed size, for CUDA graphs.

A graph always reads and writes the same tensors, so the number of cached positions stays on the device. The textbook
form is `SoftmaxAttention.step`, whose cache grows and whose position is read by the host.
"""

import torch
from torch import Tensor

from linformer_cli.attention.parts.caches import KeyValueCache, attend_masked

from . import linear


def step(q_t: Tensor, k_t: Tensor, v_t: Tensor, cache: KeyValueCache) -> Tensor:
    """The output [B, H, V] for q_t and k_t [B, H, K] and v_t [B, H, V]; writes k_t and v_t to the cache.

    `cache.position` must already count the new position. q_t, k_t, v_t and the cache have one type, and the cache is
    contiguous.
    """
    keys, values, position = cache
    if linear.has_triton_kernels(keys.device, keys.dtype, keys.shape[3], values.shape[3]):
        from . import triton_cache  # needs Triton, which `has_triton_kernels` has checked

        return triton_cache.step(q_t, k_t, v_t, cache)
    slot = (position - 1).unsqueeze(0)
    keys.index_copy_(2, slot, k_t.unsqueeze(2))
    values.index_copy_(2, slot, v_t.unsqueeze(2))
    seen = torch.arange(keys.shape[2], device=keys.device) < position
    return attend_masked(q_t.unsqueeze(2), keys, values, seen.unsqueeze(0)).squeeze(2)
