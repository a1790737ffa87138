"""The sum of a causal form over a sequence and over the reversed sequence."""

from collections.abc import Callable

from torch import Tensor


def sum_both_ways(run: Callable[..., Tensor], *x: Tensor) -> Tensor:
    """run(*x) plus its result for the reversed `x`; all tensors are [B, H, T, W].

    Padding comes first in the reversed sequences. Its keys and values are 0, so it adds nothing to a state of 0.
    """
    return run(*x) + run(*(part.flip(2) for part in x)).flip(2)
