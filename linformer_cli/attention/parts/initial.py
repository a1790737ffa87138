"""Initial values of parameters."""

import math

import torch
from torch import Tensor

from linformer_cli.attention.base import AttentionShape


def log_memories(shape: AttentionShape, count: int, least: int = 1) -> Tensor:
    """Logarithms of `count` memory lengths, evenly spaced from a whole image down to an image row.

    A memory length is the number of positions in which a state decays to 1/e. No length is below `least`.
    """
    longest, shortest = (math.log(max(least, memory)) for memory in (shape.positions, shape.row))
    return torch.linspace(longest, shortest, count)


def inverse_softplus(y: Tensor) -> Tensor:
    """x with softplus(x) = y, for y > 0."""
    return y.expm1().log()
