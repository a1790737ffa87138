"""What kernels, parts and mechanisms share: types of sums, padding, numbers on the host, and contexts of functions."""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import TypeVar

Settings = TypeVar("Settings", default=None)

# Devices on which reading a number costs nothing. Any other device first has to finish its work.
HOSTS = {"cpu"}
_checks_are_deferred = False


class Context(Protocol[Settings]):
    """What both passes of an autograd function share: saved tensors, and `settings` if anything else is needed."""

    settings: Settings
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of running sums: float64 for float64 inputs, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def host_number(value: int = 0) -> Tensor:
    """Return `value` as a 0-d int64 tensor on the CPU: a number that decides what a step does, read without waiting."""
    return torch.tensor(value, device="cpu")


@functools.cache
def constant(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a tensor of these numbers, which is made only once, because a copy from the host waits for the device."""
    with real_tensors():
        return torch.tensor(numbers, device=device, dtype=dtype)


def real_tensors() -> AbstractContextManager[object]:
    """Return a context for tensors that are kept. Otherwise, `torch.export` would make them of its own kind."""
    return _disable_current_modes() if torch.compiler.is_exporting() else nullcontext()


@contextmanager
def defer_checks() -> Iterator[None]:
    """Let `attend` on a device return without a look at its numbers, for which the host would have to wait.

    The caller tests the end of the computation instead: if all outputs are finite, and the gradients too, they are
    right. If not, the caller computes them again without this context.
    """
    global _checks_are_deferred
    before, _checks_are_deferred = _checks_are_deferred, True
    try:
        yield
    finally:
        _checks_are_deferred = before


def may_check(device: torch.device) -> bool:
    """Return whether `attend` may read numbers from `device` to decide what to compute."""
    return not torch.compiler.is_exporting() and (device.type in HOSTS or not _checks_are_deferred)


def find_padding(lengths: Tensor, positions: int) -> Tensor:
    """True for the positions after the end of a sequence, bool [B, positions], for `lengths` [B]."""
    return torch.arange(positions, device=lengths.device) >= lengths.unsqueeze(1)


def fill_padding(x: Tensor, lengths: Tensor | None, value: float = 0.0) -> Tensor:
    """Return x [B, T, W] or [B, H, T, W], with `value` at the padding. Padding gets no gradient, even if it is NaN."""
    if lengths is None:
        return x
    hidden = find_padding(lengths, x.shape[-2]).unsqueeze(-1)
    return x.masked_fill(hidden if x.dim() == 3 else hidden.unsqueeze(1), value)


def check_lengths(lengths: Tensor, batch: int, positions: int) -> Tensor | None:
    """`lengths` int64 [batch] from 0 to `positions` (else `ValueError`), or None if every sequence fills them."""
    if lengths.dtype != torch.int64 or lengths.shape != (batch,):
        raise ValueError(f"lengths must be int64 [{batch}], found {lengths.dtype} {list(lengths.shape)}")
    shortest, longest = (int(end) for end in lengths.aminmax())
    if shortest < 0 or longest > positions:
        raise ValueError(f"lengths must be from 0 to {positions}, found {shortest} to {longest}")
    return None if shortest == positions else lengths
