"""What kernels, parts and mechanisms share: types of sums, padding, and the contexts of autograd functions."""

from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import TypeVar

Settings = TypeVar("Settings", default=None)


class Context(Protocol[Settings]):
    """What both passes of an autograd function share: saved tensors, and `settings` if anything else is needed."""

    settings: Settings
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of running sums: float64 for float64 inputs, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def find_padding(lengths: Tensor, positions: int) -> Tensor:
    """True for the positions after the end of a sequence, bool [B, positions], for `lengths` [B]."""
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
