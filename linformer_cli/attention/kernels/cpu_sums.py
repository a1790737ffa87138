"""Compiled causal sums, with or without decay, for CPUs (sums.cpp). The reference forms are in `parts`."""

import torch
from torch import Tensor

from linformer_cli.attention.tensors import Context, accumulator_dtype

from .cpu_calls import Kernels, require_fit, with_dense_rows

_KERNELS = Kernels("attention/kernels/sums.cpp", "SumsCall")


def sum_causally(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    carried: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """y [B, H, T, V], times `scale`, and the last s [B, H, C, V] for q, k [B, H, T, C], v [B, H, T, V].

    log d is [B or 1, H, T, 1 or C] (None: no decay), and `carried` is s before these positions (None: 0). q, k and v
    have one type of `CPU_TYPES` in registry.py, and all other tensors have its accumulator type. The result is
    differentiable once, in all inputs. Raises what `require_fit` raises.
    """
    decay = None if log_decay is None else log_decay.expand(q.shape[0], -1, -1, -1)
    require_fit(q, k, v, carried, *(() if decay is None else (decay,)), narrow=True)
    result: tuple[Tensor, Tensor] = _Sums.apply(q, k, v, decay, carried, scale)
    return result


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context[float],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        carried: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulator_dtype(q.dtype)
        q, k, v = map(with_dense_rows, (q, k, v))
        log_decay = None if log_decay is None else with_dense_rows(log_decay)
        carried = None if carried is None else carried.contiguous()
        y = with_dense_rows(torch.empty_like(v, dtype=dtype))
        total = q.new_empty(*q.shape[:2], q.shape[3], v.shape[3], dtype=dtype)
        sizes = {"V": v.shape[3], "decays": _count_decays(log_decay), "scale": scale}
        tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay, "carried": carried, "y": y, "total": total}
        _KERNELS.run("lintx_sums_forward", q, **sizes, **tensors)
        ctx.save_for_backward(q, k, v, log_decay, carried)
        ctx.settings = scale
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context[float], *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, carried = ctx.saved_tensors
        y, total = gradients
        dtype = accumulator_dtype(q.dtype)
        found: dict[str, Tensor | None] = {
            f"grad_{name}": with_dense_rows(torch.empty_like(x)) for name, x in (("q", q), ("k", k), ("v", v))
        }
        found["grad_log_decay"] = with_dense_rows(torch.empty_like(log_decay)) if ctx.needs_input_grad[3] else None
        grad_carried = None if carried is None else torch.empty_like(carried)
        y = torch.zeros_like(v, dtype=dtype) if y is None else with_dense_rows(y)
        total = None if total is None else total.contiguous()
        sizes = {"V": v.shape[3], "decays": _count_decays(log_decay), "scale": ctx.settings}
        tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay, "carried": carried, "y": y, "total": total}
        _KERNELS.run("lintx_sums_backward", q, **sizes, **tensors, **found, grad_carried=grad_carried)
        return *found.values(), grad_carried, None


def _count_decays(log_decay: Tensor | None) -> int:
    return 0 if log_decay is None else log_decay.shape[3]
