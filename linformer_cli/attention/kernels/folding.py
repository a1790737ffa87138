"""One step of linear attention on a CUDA device that writes its sums only now and then.

At each step a state of sums is read and written whole, and that is nearly all that a step of many images costs. Here
the newest keys and values are kept beside s, and every `fold`-th step adds them to it. In between, s is only read:

    y_t = (phi(q_t) s + sum over pending j of (phi(q_t) . phi(k_j)) v_j) / (phi(q_t) . z_t)

z, a small part, is always up to date. Textbook: `LinearAttention.step`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# The more pairs, the more is read of them at each step, and the less often s is written. With heads of 32 and pairs in
# bfloat16 the bytes to move are fewest here, 0.64 of those of a step that reads and writes s.
FOLD = 8


class FoldedState(NamedTuple):
    """s float32 [B, H, C, V] without the pending pairs, z float32 [B, H, C] with them, and the pairs.

    Pair number `steps` mod fold is that of the step to come: pending are those before it in keys [B, H, fold - 1, C]
    and values [B, H, fold - 1, V]. `steps`, 0-d int64, is a count that whoever steps adds 1 to, once for all states
    that share it; it may begin anywhere, since pairs that never were have values of 0 and add nothing.
    """

    s: Tensor
    z: Tensor
    keys: Tensor
    values: Tensor
    steps: Tensor


def build_folded_state(s: Tensor, z: Tensor, steps: Tensor, dtype: torch.dtype, fold: int = FOLD) -> FoldedState:
    """A state without pending pairs from s float32 [B, H, C, V] and z [B, H, C], which it takes for its own.

    `dtype` is that of keys and values; `fold` a power of 2.
    """
    keys, values = (s.new_zeros(*s.shape[:2], fold - 1, width, dtype=dtype) for width in s.shape[2:])
    return FoldedState(s.contiguous(), z.contiguous(), keys, values, steps)


def step(q_t: Tensor, k_t: Tensor, v_t: Tensor, state: FoldedState, feature_map: str) -> Tensor:
    """The output [B, H, V] of one position, q_t and k_t [B, H, C], v_t [B, H, V]; updates `state` in place.

    For tensors that `serves` of `linear.py` allows.
    """
    from . import triton_step  # where it is served, Triton is there

    return triton_step.step(q_t, k_t, v_t, state, feature_map)
