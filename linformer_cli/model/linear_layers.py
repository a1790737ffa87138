"""Linear layers with an activation, and a form that makes fewer passes over memory in bfloat16 on the CPU.

This form, which needs compiled code, differs from torch's form under autocast as follows:

- torch fills the output with the bias before it multiplies. Here, the product adds the bias as it writes.
- One pass multiplies by the slope of ReLU and adds up the gradient of the bias (linear_layers.cpp). The sums are not
  rounded to bfloat16.
- The product for the gradient of a weight has the narrower factor on its left, because oneDNN transposes that one.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.attention.kernels.registry import PROJECTION, Unnormed, kernel_for
from linformer_cli.native.library import has_library, load_function, read_structure
from linformer_cli.system.device import multiplies_bf16

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
}
_PIECES = 64  # the rows are divided into this many pieces, each with its own sum of gradients


class Linear(nn.Linear):
    """torch's linear layer, then `none`, `relu` or `gelu`, and in a fused step with the norm of x and a residual."""

    def forward(self, x: Tensor | Unnormed, activation: str = "none", residual: Unnormed | None = None) -> Tensor:
        if isinstance(x, Unnormed) or residual is not None:
            x = x if isinstance(x, Unnormed) else Unnormed(x)
            project = kernel_for(PROJECTION, x.x)
            assert project is not None
            return project(x, self, activation, residual)
        if _is_compiled(x, self.weight):
            return _Linear.apply(x, self.weight, self.bias, activation)
        return _FUNCTIONS[activation](super().forward(x))


def _is_compiled(x: Tensor, weight: Tensor) -> bool:
    rounds = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    types = x.dtype in (torch.float32, torch.bfloat16) and weight.dtype == torch.float32
    return x.device.type == "cpu" and rounds and types and x.numel() > 0 and has_library()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
        rows, half = x.to(torch.bfloat16).reshape(-1, x.shape[-1]), weight.to(torch.bfloat16)
        before = _multiply(rows, half, bias.to(torch.bfloat16))
        y = _FUNCTIONS[activation](before)
        # ReLU's slope is known from its output, which the next layer saves anyway.
        ctx.save_for_backward(rows, half, y if activation == "relu" else None, before if activation == "gelu" else None)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, y, before = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, len(weight)).contiguous()
        if before is not None:
            gradient = torch.ops.aten.gelu_backward(gradient, before)
        gradient, of_bias = _differentiate(gradient, y)
        product = rows.T @ gradient if rows.shape[1] < gradient.shape[1] else (gradient.T @ rows).T
        of_weight = product.T.to(torch.float32, memory_format=torch.contiguous_format)
        of_x = (gradient @ weight).to(ctx.dtype).view(ctx.shape) if ctx.needs_input_grad[0] else None
        return of_x, of_weight, of_bias, None


def _multiply(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return x [rows, K] times the transpose of `weight` [N, K], plus `bias`, all in bfloat16 with sums in float32."""
    if not _has_one_dnn():
        return functional.linear(x, weight, bias)
    # The operation could apply ReLU as well, but oneDNN's ReLU of NaN is 0.
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@functools.cache
def _has_one_dnn() -> bool:
    """Return whether torch's operation that adds the bias as it writes supports bfloat16 on this processor."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and multiplies_bf16()


def _differentiate(gradient: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradient [rows, N] before a ReLU with output y (None: no ReLU), and its float32 sum [N] over rows."""
    rows, width = gradient.shape
    before = gradient if y is None else torch.empty_like(gradient)
    sums = torch.zeros(min(_PIECES, rows), width)
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in (gradient, y, before, sums))
    structure = read_structure("model/linear_layers.cpp", "BiasCall")
    call = structure(torch.get_num_threads(), rows, width, len(sums), *pointers)
    load_function("lintx_bias_gradient", ctypes.c_void_p)(ctypes.byref(call))
    return before, sums.sum(dim=0)
