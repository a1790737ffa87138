"""The tolerances of the attention and model tests, and the comparison that applies them."""

import torch
from torch import Tensor

# Two computations of the same result in float64: split and whole, parallel and step, ours and the definition.
FLOAT64 = 1e-9
# Float32 against float64 after 784 positions, in either execution.
FLOAT32_DRIFT = 1e-4
# The change of an earlier output by a later value in float64, which may only reorder sums.
CAUSALITY = 1e-12
# Inputs in bfloat16 against float32 on the same rounded inputs.
BFLOAT16 = 1e-2
# Rounding errors that are allowed per unit of the condition number, where a denominator nearly cancels.
ROUNDINGS = 32
# The sum of a position's probabilities against 1, in float32 and in float64.
PROBABILITY_TOTAL = 1e-6


def assert_agree(
    found: Tensor, expected: Tensor, tolerance: float, condition: Tensor | None = None, dtype: torch.dtype | None = None
) -> None:
    """Assert that `found` is `expected` up to `tolerance` * max(1, largest expected), and that both are finite.

    `condition` [B, H, T], at least 1, loosens the tolerance of single positions to `ROUNDINGS` * condition * the
    rounding error of `dtype` (default: the dtype of `found`), if that is more than `tolerance`.
    """
    assert bool(torch.isfinite(found).all()), "the result has NaN or infinite values"
    assert bool(torch.isfinite(expected).all()), "the expected result has NaN or infinite values"
    precision = torch.finfo(dtype or found.dtype).eps
    found, expected = found.double(), expected.double()
    scale = expected.abs().max().clamp(min=1)
    if condition is not None:
        scale = scale * (condition.double().unsqueeze(-1) * (ROUNDINGS * precision / tolerance)).clamp(min=1)
    torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=tolerance)
