"""The tolerances of the attention and model tests, and the comparison that applies them."""

from collections.abc import Iterable

import torch
from torch import Tensor

# For two float64 computations of one result: split and whole, attend and step, or a mechanism and its definition.
FLOAT64 = 1e-9
# For the difference between float32 and float64 after 784 positions, with attend or step.
FLOAT32_DRIFT = 1e-4
# For gradients in float32 of gates and keys that a trained model does not have.
EXTREME = 1e-2
# For the change that a later value causes in an earlier output, in float64. Only the order of sums may change.
CAUSALITY = 1e-12
# For the difference between results in bfloat16 and in float32 from the same rounded inputs.
BFLOAT16 = 1e-2
# Where a denominator nearly cancels, this many rounding errors are allowed per unit of the condition number.
ROUNDINGS = 32
# For the difference between 1 and the sum of a position's probabilities, in float32 and in float64.
PROBABILITY_TOTAL = 1e-6


def assert_agree(
    found: Tensor, expected: Tensor, tolerance: float, condition: Tensor | None = None, dtype: torch.dtype | None = None
) -> None:
    """Assert that `found` is `expected` up to `tolerance` * max(1, largest expected), and that both are finite.

    `condition` [B, H, T] is at least 1. It raises the tolerance of each position to `ROUNDINGS` * `condition` * the
    rounding error of `dtype`, if this is more than `tolerance`. By default, `dtype` is that of `found`.
    """
    precision = torch.finfo(dtype or found.dtype).eps
    found, expected = found.double(), expected.double()
    scale = expected.abs().max().clamp(min=1)
    if condition is not None:
        scale = scale * (condition.double().unsqueeze(-1) * (ROUNDINGS * precision / tolerance)).clamp(min=1)
    # Describing a difference takes ten times as long as finding none.
    close = found.shape == expected.shape and (found - expected).abs() <= tolerance * scale
    if close is not False and bool(close.all() & scale.isfinite().all()):
        return
    assert bool(torch.isfinite(found).all()), "the result has NaN or infinite values"
    assert bool(torch.isfinite(expected).all()), "the expected result has NaN or infinite values"
    torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=tolerance)


def assert_all_agree(found: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float) -> None:
    """`assert_agree` for each pair."""
    for one, other in zip(found, expected, strict=True):
        assert_agree(one, other, tolerance)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
