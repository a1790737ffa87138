"""A step of linear attention on a CUDA device that writes its sums only every few steps.

Reading and writing the sums takes most of a step of many images. Here every `fold`-th step adds the newest keys and
values to s, and the steps between only read s:

    y_t = (phi(q_t) s + sum over pending j of (phi(q_t) . phi(k_j)) v_j) / (phi(q_t) . z_t)

z is small and always up to date. The reference form is `LinearAttention.step`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from linformer_cli.attention.base import fork_into
from linformer_cli.attention.kernels.registry import AHEAD_STEP, FOLDED_STEP, kernel_for

# The number of steps per write of s. A larger value writes s less often but reads more pending pairs per step. For
# heads of width 32 and pairs in bfloat16, 8 moves the fewest bytes: 0.64 times those of reading and writing s.
FOLD = 8


class FoldedState(NamedTuple):
    """s float32 or bfloat16 [B, H, C, V] without the pending pairs, z float32 [B, H, C] with them, and fold - 1 pairs.

    The next step writes pair number `steps` mod fold; earlier pairs are pending. The caller adds 1 to `steps` (0-d
    int64) after each step, once for all states that share it. It may start at any number, since missing pairs are 0.
    """

    s: Tensor
    z: Tensor
    keys: Tensor
    values: Tensor
    steps: Tensor


class AheadState(FoldedState):
    """The same, but the pairs are those of a whole pass of look-ahead. s and z both lack the first `steps` int64 [B] of
    them, which the caller sets after the pass; the others come from wrong guesses."""


def build_folded_state(s: Tensor, z: Tensor, steps: Tensor, dtype: torch.dtype, fold: int = FOLD) -> FoldedState:
    """Return a state that takes over s and z, without pending pairs, which have `dtype`; `fold` is a power of 2."""
    keys, values = (s.new_zeros(*s.shape[:2], fold - 1, width, dtype=dtype) for width in s.shape[2:])
    return FoldedState(s.contiguous(), z.contiguous(), keys, values, steps)


def refill(state: FoldedState, s: Tensor, z: Tensor) -> None:
    """Reset `state` in place to the sums s and z, each row for adjacent images (`fork_into`), without pending pairs."""
    fork_into(state.s, s)
    fork_into(state.z, z)
    state.keys.zero_()
    state.values.zero_()


def step_folded(q_t: Tensor, k_t: Tensor, v_t: Tensor, state: FoldedState, feature_map: str) -> Tensor:
    """Return the output [B, H, V]; updates `state` in place. Requires a kernel of `FOLDED_STEP` for the tensors.

    With an `AheadState`, the outputs [B n, H, V] are those of n adjacent positions of each image.
    """
    operation = AHEAD_STEP if isinstance(state, AheadState) else FOLDED_STEP
    kernel = kernel_for(operation, q_t, v_t, feature_map=feature_map)
    assert kernel is not None
    return kernel(q_t, k_t, v_t, state, feature_map)
