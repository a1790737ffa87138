"""Dropout of residual branches (Srivastava 2014, JMLR 15) and LayerNorm of the sum, compiled as one threaded pass."""

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.attention.kernels.registry import Unnormed
from linformer_cli.native.library import has_library, load_function, read_structure

_SOURCE = "model/dropout.cpp"
_PIECES = 64  # the rows are divided into this many pieces, each with its own sum of parameter gradients


class Rounded(NamedTuple):
    """Vectors in float32, and their copy in bfloat16, which matrix products read without rounding them again."""

    exact: Tensor
    copy: Tensor


# What blocks pass on. Only norms after a sum in bfloat16 training on the CPU make copies. Only fused steps leave norms.
Vectors = Tensor | Rounded | Unnormed


def exact(x: Vectors) -> Tensor:
    """Return x without its rounded copy, if it has one, and after its norm, if that was left out."""
    if isinstance(x, Unnormed):
        return x.x if x.norm is None else x.norm(x.x)
    return x.exact if isinstance(x, Rounded) else x


def add_dropped(x: Tensor, branch: Tensor, probability: float) -> Tensor:
    """Add `branch` to x after dropout with `probability`. The compiled form draws other masks than torch."""
    if probability == 0:
        return x + branch
    if _is_compiled(x, branch):
        return _AddDropped.apply(x.contiguous(), branch.contiguous(), _draw_seed(), probability)
    return x + functional.dropout(branch, probability)


def add_and_normalise(x: Tensor, branch: Tensor, probability: float, norm: nn.LayerNorm) -> Vectors:
    """Apply the LayerNorm `norm` to `add_dropped(...)`, with a bfloat16 copy if compiled for a bfloat16 `branch`."""
    if not (_is_compiled(x, branch) and norm.weight.dtype == torch.float32):
        return norm(add_dropped(x, branch, probability))
    seed = _draw_seed() if probability else 0
    parts = x.contiguous(), branch.contiguous(), norm.weight, norm.bias, norm.eps
    y, half = _AddAndNormalise.apply(*parts, seed, probability)
    return y if half is None else Rounded(y, half)


def _is_compiled(x: Tensor, branch: Tensor) -> bool:
    types = branch.dtype in (torch.float32, torch.bfloat16) and x.dtype == torch.float32
    return x.device.type == "cpu" and types and has_library()


def _draw_seed() -> int:
    return int(torch.empty((), dtype=torch.int64).random_())


class _AddDropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, seed: int, probability: float) -> Tensor:
        ctx.dtype, ctx.mask = branch.dtype, (seed, probability)
        total = torch.empty_like(x)
        _call("lintx_dropout_add", ctx, None, x, branch, total)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].contiguous()
        of_branch = torch.empty_like(gradient, dtype=ctx.dtype)
        _call("lintx_dropout_gradient", ctx, None, gradient, of_branch)
        return gradient, of_branch, None, None


class _AddAndNormalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, *constants: Any) -> Any:
        ctx.set_materialize_grads(False)
        epsilon, *ctx.mask = constants
        ctx.dtype, ctx.sizes = branch.dtype, (x.shape[-1], min(_PIECES, x.numel() // x.shape[-1]), epsilon)
        total, y, statistics = torch.empty_like(x), torch.empty_like(x), x.new_empty(*x.shape[:-1], 2)
        half = torch.empty_like(branch) if branch.dtype == torch.bfloat16 else None
        parts = {"weight": weight, "bias": bias, "sum": total, "statistics": statistics, "y": y, "rounded": half}
        _call("lintx_dropout_norm", ctx, parts, x, branch)
        ctx.save_for_backward(total, statistics, weight)
        return y, half

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        total, statistics, weight = ctx.saved_tensors
        y, half = (None if gradient is None else gradient.contiguous() for gradient in gradients)
        of_x, of_branch = torch.empty_like(total), torch.empty_like(total, dtype=ctx.dtype)
        width, pieces, _ = ctx.sizes
        shares = total.new_zeros(pieces, 2, width)
        parts = {"weight": weight, "sum": total, "statistics": statistics, "y": y, "rounded": half}
        _call("lintx_dropout_norm_gradient", ctx, {**parts, "of_parameters": shares}, of_x, of_branch)
        of_weight, of_bias = shares.sum(dim=0)
        return of_x, of_branch, of_weight, of_bias, None, None, None


def _call(name: str, ctx: Any, parts: dict[str, Tensor | None] | None, *tensors: Tensor) -> None:
    """Call a kernel with dense tensors of the same size, and the arrays of a norm if there is one."""
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    mask = read_structure(_SOURCE, "Dropout")(torch.get_num_threads(), tensors[0].numel(), *ctx.mask)
    norms = []
    if parts is not None:
        addresses = {key: x.data_ptr() for key, x in parts.items() if x is not None}
        norms.append(ctypes.byref(read_structure(_SOURCE, "Norm")(*ctx.sizes, **addresses)))
    function = load_function(name, pointer, number, *[pointer] * (len(norms) + len(tensors)))
    function(ctypes.byref(mask), int(ctx.dtype == torch.bfloat16), *norms, *(x.data_ptr() for x in tensors))
