"""Sequences of different lengths in one batch: the positions after the end of a sequence are padding."""

import torch
from torch import Tensor


def find_padding(lengths: Tensor, positions: int) -> Tensor:
    """True for padding, bool [B, positions], for `lengths` [B]."""
    return torch.arange(positions, device=lengths.device) >= lengths.unsqueeze(1)


def fill_padding(x: Tensor, lengths: Tensor | None, value: float = 0.0) -> Tensor:
    """x [B, T, W] or [B, H, T, W], with `value` at the padding. Padding gets no gradient, even if it is NaN."""
    if lengths is None:
        return x
    hidden = find_padding(lengths, x.shape[-2]).unsqueeze(-1)
    return x.masked_fill(hidden if x.dim() == 3 else hidden.unsqueeze(1), value)


def check_lengths(lengths: Tensor, batch: int, positions: int) -> Tensor | None:
    """`lengths`, or None if every sequence fills all positions.

    Raises `ValueError` unless `lengths` is int64 [batch] with values from 0 to `positions`.
    """
    if lengths.dtype != torch.int64 or lengths.shape != (batch,):
        raise ValueError(f"lengths must be int64 [{batch}], found {lengths.dtype} {list(lengths.shape)}")
    shortest, longest = (int(end) for end in lengths.aminmax())
    if shortest < 0 or longest > positions:
        raise ValueError(f"lengths must be from 0 to {positions}, found {shortest} to {longest}")
    return None if shortest == positions else lengths
