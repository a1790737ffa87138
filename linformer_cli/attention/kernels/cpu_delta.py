"""The compiled delta rule for CPUs (delta.cpp). The reference form is `delta_sums` of parts/delta_rule.py."""

import torch
from torch import Tensor

from linformer_cli.attention.tensors import Context

from .cpu_calls import Kernels, require_fit, with_dense_rows

_KERNELS = Kernels("attention/kernels/delta.cpp", "DeltaCall")
_INPUTS = ("q", "k", "v", "d", "beta", "log_decay")


def follow_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_a: Tensor, d: Tensor | None, carried: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y [B, H, T, V] and the last s [B, H, C, V] for q, k and d [B, H, T, C], v [B, H, T, V].

    beta is [B, H, T, 1] and log a [B, H, T, 1 or C], or both broadcast to these sizes. None for d means k.
    `carried` is s before these positions (None: 0). All tensors are float32, or all float64. The result is
    differentiable once, in all inputs. Raises what `require_fit` raises.
    """
    beta, log_decay = (x.expand(*q.shape[:3], -1) for x in (beta, log_a))
    require_fit(q, k, v, carried, beta, log_decay, *([] if d is None else [d]))
    result: tuple[Tensor, Tensor] = _DeltaRule.apply(q, k, v, d, beta, log_decay, carried)
    return result


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        *parts, carried = inputs
        views = {name: None if x is None else with_dense_rows(x) for name, x in zip(_INPUTS, parts, strict=True)}
        carried = None if carried is None else carried.contiguous()
        q, v, log_decay = views["q"], views["v"], views["log_decay"]
        assert q is not None and v is not None and log_decay is not None
        y, error = (with_dense_rows(torch.empty_like(v)) for _ in range(2))
        total = q.new_empty(*q.shape[:2], q.shape[3], v.shape[3])
        sizes = {"V": v.shape[3], "decays": log_decay.shape[3]}
        more = {"y": y, "error": error, "carried": carried, "total": total}
        _KERNELS.run("lintx_delta_forward", q, **sizes, **views, **more)
        ctx.save_for_backward(*views.values(), error, carried)
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        *parts, error, carried = ctx.saved_tensors
        y, total = gradients
        views = dict(zip(_INPUTS, parts, strict=True))
        found = {
            f"grad_{name}": None if x is None else with_dense_rows(torch.empty_like(x)) for name, x in views.items()
        }
        grad_carried = None if carried is None else torch.empty_like(carried)
        y = torch.zeros_like(views["v"]) if y is None else with_dense_rows(y)
        total = None if total is None else total.contiguous()
        sizes = {"V": views["v"].shape[3], "decays": views["log_decay"].shape[3]}
        more = {"y": y, "error": error, "carried": carried, "total": total, "grad_carried": grad_carried}
        _KERNELS.run("lintx_delta_backward", views["q"], **sizes, **views, **found, **more)
        return *found.values(), grad_carried
