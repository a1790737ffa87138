"""Compiled causal sums, with or without decay, for CPUs (sums.cpp). The textbook forms are in `parts`."""

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linformer_cli.native.compiler import has_library, load_function

from .tensors import View, fill_call, require_fit, with_dense_rows

SOURCE = Path(__file__).with_name("sums.cpp")
_SIZE, _POINTER = ctypes.c_int64, ctypes.c_void_p
_TYPES = (torch.float32, torch.float64)
_VIEWS = ("q", "k", "v", "y", "log_decay", "grad_q", "grad_k", "grad_v", "grad_log_decay")
_STATES = ("carried", "total", "grad_carried")


class _Call(ctypes.Structure):
    """`Call` of sums.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("threads", "B", "H", "T", "C", "V", "decays", "logarithms")),
        *((name, View) for name in _VIEWS),
        *((name, ctypes.c_void_p) for name in _STATES),
    ]


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether compiled sums of this type run on this device."""
    return device.type == "cpu" and dtype in _TYPES and has_library(SOURCE)


def sum_causally(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    carried: Tensor | None = None,
    logarithms: bool = False,
) -> tuple[Tensor, Tensor]:
    """y [B, H, T, V] and the last s [B, H, C, V] for q, k [B, H, T, C], v [B, H, T, V].

    log d is [B or 1, H, T, 1 or C] (None: no decay), and `carried` is s before these positions (None: 0). All
    tensors have one type that `serves` accepts. With `logarithms`, the gradients of q and k are those of the logarithms
    that `exponentiate` has overwritten. The result is differentiable once, in all inputs. Raises what
    `require_fit` raises.
    """
    decay = None if log_decay is None else log_decay.expand(q.shape[0], -1, -1, -1)
    require_fit(q, k, v, carried, *(() if decay is None else (decay,)))
    result: tuple[Tensor, Tensor] = _Sums.apply(q, k, v, decay, carried, logarithms)
    return result


def exponentiate(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
    """Overwrite logarithms of features of queries a and keys b [B, H, T, C], in place, because these tensors are large.

    b becomes exp(b - c), where c [B, H, C] is the maximum of all b and of the given c. a becomes exp(a + c), divided by
    its largest feature. Returns c.
    """
    if not (a.is_contiguous() and b.is_contiguous() and a.shape == b.shape and a.dtype == b.dtype):
        raise ValueError("logarithms of features must be dense and of one size and type")
    batch, heads, length, width = a.shape
    maxima = a.new_full((batch, heads, width), -torch.inf) if c is None else c.clone()
    function = load_function(SOURCE, "lintx_sums_exponentiate", *[_SIZE] * 4, *[_POINTER] * 3, _SIZE)
    pointers = (x.data_ptr() for x in (a, b, maxima))
    sizes = torch.get_num_threads(), batch * heads, length, width
    function(*sizes, *pointers, int(a.dtype == torch.float64))
    return maxima


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        carried: Tensor | None,
        logarithms: bool,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = map(with_dense_rows, (q, k, v))
        log_decay = None if log_decay is None else with_dense_rows(log_decay)
        carried = None if carried is None else carried.contiguous()
        y, total = with_dense_rows(torch.empty_like(v)), q.new_empty(*q.shape[:2], q.shape[3], v.shape[3])
        views = {"q": q, "k": k, "v": v, "y": y, "log_decay": log_decay}
        _call("lintx_sums_forward", views, {"carried": carried, "total": total}, logarithms)
        ctx.save_for_backward(q, k, v, log_decay, carried)
        ctx.logarithms = logarithms
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, carried = ctx.saved_tensors
        y, total = gradients
        found: dict[str, Tensor | None] = {
            f"grad_{name}": with_dense_rows(torch.empty_like(x)) for name, x in (("q", q), ("k", k), ("v", v))
        }
        found["grad_log_decay"] = with_dense_rows(torch.empty_like(log_decay)) if ctx.needs_input_grad[3] else None
        grad_carried = None if carried is None else torch.empty_like(carried)
        y = torch.zeros_like(v) if y is None else with_dense_rows(y)
        _call(
            "lintx_sums_backward",
            {"q": q, "k": k, "v": v, "y": y, "log_decay": log_decay, **found},
            {"carried": carried, "total": None if total is None else total.contiguous(), "grad_carried": grad_carried},
            ctx.logarithms,
        )
        return *found.values(), grad_carried, None


def _call(name: str, views: dict[str, Tensor | None], states: dict[str, Tensor | None], logarithms: bool) -> None:
    q, v, log_decay = views["q"], views["v"], views["log_decay"]
    assert q is not None and v is not None
    call = _Call(
        torch.get_num_threads(), *q.shape, v.shape[-1], 0 if log_decay is None else log_decay.shape[-1], logarithms
    )
    fill_call(call, views, states)
    function = load_function(SOURCE, name, ctypes.POINTER(_Call), ctypes.c_int64)
    function(ctypes.byref(call), int(q.dtype == torch.float64))
