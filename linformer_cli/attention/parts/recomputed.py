"""Functions whose intermediate results are not saved for the backward pass."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from linformer_cli.attention.tensors import Context

# The largest number of scores of a head that are usually kept for the backward pass.
SCORES_KEPT = 2**18


def run_within(limit: int, scores: int, run: Callable[..., Tensor], *x: Tensor) -> Tensor:
    """run(*x), which computes `scores` scores. If these are more than `limit`, only `x` is saved.

    The backward pass then calls `run` again, and the result can be differentiated once. This is equivalent to
    `torch.utils.checkpoint`, whose import takes seconds.
    """
    if scores <= limit or not torch.is_grad_enabled():
        return run(*x)
    y: Tensor = _Recomputed.apply(run, *x)
    return y


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context[Callable[..., Tensor]], run: Callable[..., Tensor], *x: Tensor) -> Tensor:
        ctx.settings = run
        ctx.save_for_backward(*x)
        return run(*x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[Callable[..., Tensor]], gradient: Tensor) -> tuple[Tensor | None, ...]:
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad(), torch.autocast(gradient.device.type, enabled=False):
            y = ctx.settings(*leaves)
        return None, *torch.autograd.grad(y, leaves, gradient)
