"""Vectors scaled by their length, and what keeps their sums of squares from underflow and overflow."""

import torch
from torch import Tensor
from torch.nn import functional

from linformer_cli.attention.kernels.registry import SCALED_OUTPUTS, kernel_for

# Added to squared lengths of queries and keys, and mean squares of outputs: zeros stay zero, with finite gradients.
KEY_FLOOR = 1e-6
OUTPUT_FLOOR = 1e-5
# This is far below the square of any useful sum. It keeps the output 0 where the sum is 0.
SUM_FLOOR = 1e-6


def directions(x: Tensor) -> Tensor:
    """Return x [..., K], scaled to length 1. Vectors that are nearly 0 stay shorter."""
    return x * (x.square().sum(dim=-1, keepdim=True) + KEY_FLOOR).rsqrt()


def shrink_huge(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return x, scaled down by a common factor over `dims` where the sum of squares could overflow.

    x is unchanged up to the fourth root of the type's largest number (4e9 in float32). Normalised vectors do not depend
    on the scale of x, but the scores of `lsh` do.
    """
    limit = torch.finfo(x.dtype).max ** 0.25
    return x * (limit / x.detach().abs().amax(dim=dims, keepdim=True).clamp(min=limit))


def scale_outputs(sums: Tensor, output_gate: Tensor | None) -> Tensor:
    """Divide sums [..., V] by their root mean square, times SiLU of `output_gate` [..., V], in the type of either.

    Sums are not divided by their total weight, because the weights of signed queries and keys can add up to any number.
    """
    if output_gate is not None and (scale := kernel_for(SCALED_OUTPUTS, sums, output_gate)):
        return scale(sums, output_gate, SUM_FLOOR)
    y = functional.rms_norm(sums, sums.shape[-1:], eps=SUM_FLOOR)
    return y if output_gate is None else y * functional.silu(output_gate.to(y.dtype))
