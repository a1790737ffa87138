"""Dropout of residual branches (Srivastava 2014, JMLR 15).

On the CPU, torch draws the mask element by element in one thread. In the model of Katharopoulos 2020, this takes a
fifth of a training step. The compiled form uses all threads, draws and adds in one pass, and stores no mask.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from linformer_cli.native.library import has_library, load_function


class _Dropout(ctypes.Structure):
    """The struct `Dropout` of dropout.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("threads", "count")),
        ("seed", ctypes.c_uint64),
        ("probability", ctypes.c_double),
    ]


def add_dropped(x: Tensor, branch: Tensor, probability: float) -> Tensor:
    """x plus `branch` (same shape) after dropout, which zeroes elements with `probability` and scales up the rest.

    The mask depends on the state of torch's generator. The compiled form and torch draw different masks.
    """
    types = branch.dtype in (torch.float32, torch.bfloat16) and x.dtype == torch.float32
    if x.device.type == "cpu" and types and has_library():
        seed = int(torch.empty((), dtype=torch.int64).random_())
        total: Tensor = _AddDropped.apply(x.contiguous(), branch.contiguous(), seed, probability)
        return total
    return x + functional.dropout(branch, probability)


class _AddDropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, seed: int, probability: float) -> Tensor:
        ctx.dtype, ctx.seed, ctx.probability = branch.dtype, seed, probability
        total = torch.empty_like(x)
        _call("lintx_dropout_add", ctx, x, branch, total)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].contiguous()
        of_branch = torch.empty_like(gradient, dtype=ctx.dtype)
        _call("lintx_dropout_gradient", ctx, gradient, of_branch)
        return gradient, of_branch, None, None


def _call(name: str, ctx: Any, *tensors: Tensor) -> None:
    """Call a kernel with dense tensors of the same size."""
    half, pointer = ctypes.c_int64, ctypes.c_void_p
    mask = _Dropout(torch.get_num_threads(), tensors[0].numel(), ctx.seed, ctx.probability)
    function = load_function(name, ctypes.POINTER(_Dropout), half, *[pointer] * len(tensors))
    function(ctypes.byref(mask), int(ctx.dtype == torch.bfloat16), *(x.data_ptr() for x in tensors))
