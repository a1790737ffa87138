"""Compiled scaling of outputs for CPUs (scale.cpp). The reference form is `scale_outputs` of parts/scaling.py."""

import torch
from torch import Tensor

from linformer_cli.attention.tensors import Context
from .cpu_calls import Kernels, empty_like_projection, with_dense_rows

_KERNELS = Kernels("attention/kernels/scale.cpp", "ScaleCall", "BHTV")


def scale(sums: Tensor, gate: Tensor, epsilon: float) -> Tensor:
    """Return sums / rms(sums) * SiLU(gate) for sums [B, H, T, V] of the accumulator type; differentiable once."""
    return _Scale.apply(sums, gate, epsilon)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context[float], sums: Tensor, gate: Tensor, epsilon: float) -> Tensor:
        sums, gate = map(with_dense_rows, (sums, gate))
        y = empty_like_projection(gate)
        _KERNELS.run("lintx_scale_forward", gate, epsilon=epsilon, sums=sums, gate=gate, y=y)
        ctx.save_for_backward(sums, gate)
        ctx.settings = epsilon
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context[float], *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sums, gate = ctx.saved_tensors
        of_sums, of_gate = map(empty_like_projection, (sums, gate))
        found = {"grad_sums": of_sums, "grad_gate": of_gate}
        y = with_dense_rows(gradients[0])
        _KERNELS.run("lintx_scale_backward", gate, epsilon=ctx.settings, sums=sums, gate=gate, y=y, **found)
        return of_sums, of_gate, None
