"""Compiled recurrences for CPUs: those of parts/sums.py, parts/delta_rule.py and attention/mesa.py."""

from typing import NamedTuple

import torch
from torch import Tensor

from linformer_cli.attention.tensors import Context, accumulator_dtype
from .cpu_calls import Kernels, require_fit, with_dense_rows

_SUMS = Kernels("attention/kernels/sums.cpp", "SumsCall")
_DELTA = Kernels("attention/kernels/delta.cpp", "DeltaCall")
_MESA = Kernels("attention/kernels/mesa.cpp", "MesaCall", "BHTK")


def sum_causally(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, carried: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return y [B, H, T, V], times `scale`, and the last s [B, H, C, V] for q, k [B, H, T, C], v [B, H, T, V].

    log d is [B or 1, H, T, 1 or C] (None: no decay), and `carried` is s before these positions (None: 0). q, k and v
    have one type of `CPU_TYPES` in registry.py, the others its accumulator type. Differentiable once, in all inputs.
    Raises what `require_fit` raises.
    """
    decay = None if log_decay is None else log_decay.expand(q.shape[0], -1, -1, -1)
    require_fit(q, k, v, carried, *(() if decay is None else (decay,)), narrow=True)
    numbers = {"V": v.shape[3], "decays": 0 if decay is None else decay.shape[3], "scale": scale}
    differentiated = ("q", "k", "v", "log_decay") if decay is not None and decay.requires_grad else ("q", "k", "v")
    call = _Call(_SUMS, "lintx_sums", numbers, ("q", "k", "v", "log_decay"), differentiated)
    return _Recurrence.apply(call, carried, q, k, v, decay)


def follow_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_a: Tensor, d: Tensor | None, carried: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return y [B, H, T, V] and the last s [B, H, C, V] for q, k and d [B, H, T, C] (None: k), v [B, H, T, V].

    beta [B, H, T, 1] and log a [B, H, T, 1 or C] may broadcast. `carried` is s before these positions (None: 0). All
    are float32, or all float64. Differentiable once, in all inputs. Raises what `require_fit` raises.
    """
    beta, log_decay = (x.expand(*q.shape[:3], -1) for x in (beta, log_a))
    require_fit(q, k, v, carried, beta, log_decay, *([] if d is None else [d]))
    inputs = ("q", "k", "v", "d", "beta", "log_decay")
    call = _Call(_DELTA, "lintx_delta", {"V": v.shape[3], "decays": log_decay.shape[3]}, (*inputs, "error"), inputs)
    return _Recurrence.apply(call, carried, q, k, v, d, beta, log_decay, torch.empty_like(v))


def solve(
    right: Tensor,
    keys: Tensor,
    written: Tensor,
    log_decay: Tensor,
    carried: Tensor | None,
    penalty: Tensor,
    iterations: int,
) -> Tensor:
    """Return x [B, H, T, K] with (h_t + Lambda) x_t near `right`, detached. h_t is the decayed sum of written keys^T.

    `right`, `keys` and `written` are [B, H, T, K], `log_decay` is [B, H, T], `carried` is h before these positions
    (None: 0), and `penalty` is the diagonal of Lambda [H, K]. All are float32 or float64. Raises as `require_fit`.
    """
    log_decay = log_decay.unsqueeze(-1)
    require_fit(right, keys, written, carried, log_decay, penalty.unsqueeze(1).expand_as(right))
    right, keys, written, log_decay = map(with_dense_rows, (right, keys, written, log_decay))
    x = with_dense_rows(torch.empty_like(right))
    views = {"right": right, "keys": keys, "written": written, "log_decay": log_decay, "x": x}
    states = {"carried": None if carried is None else carried.contiguous(), "penalty": penalty.contiguous()}
    _MESA.run("lintx_mesa_solve", right, iterations=iterations, **views, **states)
    return x


class _Call(NamedTuple):
    """The functions `<name>_forward` and `<name>_backward` of some kernels, and the fields of their structure.

    `views` are the fields of the inputs. The second function writes `grad_<view>` for those that are `differentiated`;
    the others may be memory of the first.
    """

    kernels: Kernels
    name: str
    numbers: dict[str, float]
    views: tuple[str, ...]
    differentiated: tuple[str, ...]


class _Recurrence(torch.autograd.Function):
    """The outputs y, like v in the accumulator type, and the state after the positions, which starts as `carried`."""

    @staticmethod
    def forward(
        ctx: Context[_Call], call: _Call, carried: Tensor | None, *given: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        views = {key: None if x is None else with_dense_rows(x) for key, x in zip(call.views, given, strict=True)}
        carried = None if carried is None else carried.contiguous()
        q, v = views["q"], views["v"]
        assert q is not None and v is not None
        dtype = accumulator_dtype(q.dtype)
        y = with_dense_rows(torch.empty_like(v, dtype=dtype))
        total = q.new_empty(*q.shape[:2], q.shape[3], v.shape[3], dtype=dtype)
        call.kernels.run(f"{call.name}_forward", q, **call.numbers, **views, carried=carried, y=y, total=total)
        ctx.save_for_backward(carried, *views.values())
        ctx.settings = call
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context[_Call], *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (carried, *inputs), call = ctx.saved_tensors, ctx.settings
        y, total = gradients
        views = dict(zip(call.views, inputs, strict=True))
        found = {
            f"grad_{key}": with_dense_rows(torch.empty_like(x))
            if x is not None and key in call.differentiated
            else None
            for key, x in views.items()
        }
        states = {"carried": carried, "grad_carried": None if carried is None else torch.empty_like(carried)}
        q, v = views["q"], views["v"]
        y = torch.zeros_like(v, dtype=accumulator_dtype(q.dtype)) if y is None else with_dense_rows(y)
        total = None if total is None else total.contiguous()
        call.kernels.run(f"{call.name}_backward", q, **call.numbers, **views, **found, **states, y=y, total=total)
        return None, states["grad_carried"], *found.values()
