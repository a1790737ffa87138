"""Vectors scaled to length 1, and what keeps their sums of squares from underflow and overflow."""

import torch
from torch import Tensor

# The floors are added to the squared lengths of queries and keys, and to the mean squares of outputs. Vectors of zeros
# then stay zero and have finite gradients.
KEY_FLOOR = 1e-6
OUTPUT_FLOOR = 1e-5


def directions(x: Tensor) -> Tensor:
    """x [..., K], scaled to length 1. Vectors that are nearly 0 stay shorter."""
    return x * (x.square().sum(dim=-1, keepdim=True) + KEY_FLOOR).rsqrt()


def shrink_huge(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """x, scaled down by a common factor over `dims` where the sum of squares could overflow.

    x is unchanged if no element exceeds the fourth root of the type's largest number (4e9 in float32). Normalised
    vectors do not depend on the scale of x. The scores of `lsh` do depend on it, so scaling changes them.
    """
    limit = torch.finfo(x.dtype).max ** 0.25
    shrunk: Tensor = x * (limit / x.detach().abs().amax(dim=dims, keepdim=True).clamp(min=limit))
    return shrunk
