"""Compiled linear attention for CPUs (linear.cpp).

The forward pass visits all positions once and the backward pass twice. Outputs and sums are defined by

    y_t = phi(q_t) s_t / (phi(q_t) . z_t),    s_t = s + sum over j <= t of phi(k_j) v_j^T,    z_t = z + sum of phi(k_j)

The sums of one head are updated and read in order of position, four positions at a time, while they are in the L1
cache. The same pass applies the feature map, divides, and converts bfloat16. The backward pass needs only the inputs
and the denominators: it recomputes s forwards for the queries, and sums the gradient of s backwards for keys and
values. The reference form is `causal_sums` and `divide_by_weight`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from linformer_cli.attention.tensors import Context, accumulator_dtype
from linformer_cli.native.constants import COMPILED_MAPS
from .cpu_calls import (
    Kernels,
    empty_like_projection,
    empty_like_projections,
    require_fit,
    require_sums_fit,
    with_dense_rows,
)

_KERNELS = Kernels("attention/kernels/linear_maps.h", "LinearCall", "BHTK")
_EXPONENTIAL = -1  # the number of the map that linear_maps.h calls EXPONENTIAL_MAP


class _Form(NamedTuple):
    """A map's number in linear_maps.h, whether sums are whole, and W [K, C] and c [B, H, C] of exponential maps."""

    map: int
    whole: bool = False
    columns: Tensor | None = None
    maxima: Tensor | None = None

    def run(self, name: str, q: Tensor, v: Tensor, **fields: Tensor | None) -> None:
        features = q.shape[3] if self.columns is None else self.columns.shape[1]
        numbers = {"C": features, "V": v.shape[3], "map": self.map, "mode": int(self.whole)}
        _KERNELS.run(name, q, **numbers, q=q, v=v, columns=self.columns, maxima=self.maxima, **fields)


def attend(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor | None, z: Tensor | None, feature_map: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs [B, H, T, V] for q, k [B, H, T, C] and v [B, H, T, V], and s [B, H, C, V], z [B, H, C] after them.

    `s` and `z` are the sums before these positions (None: 0), in the accumulator type of q, k, v and y. `feature_map`
    is one of `COMPILED_MAPS`. Differentiable once, in all inputs. Raises the errors of `require_sums_fit`.
    """
    require_sums_fit(q, k, v, s, z)
    y, total_s, total_z, _ = _attend(q, k, v, s, z, _Form(COMPILED_MAPS[feature_map]))
    return y, total_s, total_z


def attend_all(q: Tensor, k: Tensor, v: Tensor, feature_map: str) -> Tensor:
    """Return outputs of the bidirectional form, else as `attend`. A key of minus infinity has the features 0."""
    require_fit(q, k, v, None, narrow=True)
    return _attend(q, k, v, None, None, _Form(COMPILED_MAPS[feature_map], whole=True))[0]


class ExponentialSums(NamedTuple):
    """y, the denominators [B, H, T] (without a gradient), and s, z and c after these positions."""

    y: Tensor
    weights: Tensor
    s: Tensor
    z: Tensor
    c: Tensor


def attend_exponential(
    q: Tensor, k: Tensor, v: Tensor, columns: Tensor, before: tuple[Tensor, Tensor] | None
) -> ExponentialSums:
    """Linear attention with the features exp(q_t W) and exp(k_j W - |k_j|^2 / (2 sqrt(K))).

    W is `columns` [K, C], in the accumulator type of q, k [B, H, T, K] and v [B, H, T, V]. c is the maximum of the
    exponents of all keys and of the c in `before`, which has s with z as its last column [B, H, C, V + 1], and c. s and
    z are divided by exp(c). Differentiable once, in all inputs but W and c. Features are never in memory.
    """
    dtype = accumulator_dtype(q.dtype)
    require_fit(q, k, v, None, narrow=True)
    if columns.dtype != dtype or columns.shape[0] != q.shape[-1]:
        raise ValueError(f"columns do not match: {list(columns.shape)}, {columns.dtype}")
    sizes = *q.shape[:2], columns.shape[1]
    if before is None:
        s, z, c = None, None, torch.full(sizes, -torch.inf, dtype=dtype)
    else:
        s, z, c = before[0][..., :-1], before[0][..., -1], before[1]
        shapes = s.shape == (*sizes, v.shape[-1]) and z.shape == c.shape == sizes
        if not shapes or any(x.dtype != dtype for x in before):
            raise ValueError(f"the state does not match: {[(list(x.shape), x.dtype) for x in before]}")
    with torch.no_grad():
        c = c.clone(memory_format=torch.contiguous_format)
        form = _Form(_EXPONENTIAL, columns=columns.contiguous(), maxima=c)
        form.run("lintx_linear_maxima", with_dense_rows(q), with_dense_rows(v), k=with_dense_rows(k))
    if s is not None and z is not None and before is not None:
        rescale = (before[1] - c).exp()
        s, z = s * rescale.unsqueeze(-1), z * rescale
    y, total_s, total_z, weights = _attend(q, k, v, s, z, form)
    return ExponentialSums(y, weights, total_s, total_z, c)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor | None, z: Tensor | None, form: _Form
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = map(with_dense_rows, (q, k, v))
    s, z = (None if x is None else x.contiguous() for x in (s, z))
    return _LinearAttention.apply(q, k, v, s, z, form)


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context[tuple[int, bool]], q: Tensor, k: Tensor, v: Tensor, s: Tensor | None, z: Tensor | None, form: _Form
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype = accumulator_dtype(q.dtype)
        batch, heads, length, width = q.shape
        features = width if form.columns is None else form.columns.shape[1]
        y = empty_like_projection(v)
        total_s = torch.empty(batch, heads, features, v.shape[-1], dtype=dtype)
        total_z = torch.empty(batch, heads, features, dtype=dtype)
        weights = torch.empty(batch, heads, length, dtype=dtype)
        sums = {"s": s, "z": z, "total_s": total_s, "total_z": total_z, "weights": weights}
        form.run("lintx_linear_forward", q, v, k=k, y=y, **sums)
        if form.whole:
            s, z = total_s, total_z  # the backward pass reads these
        # This includes the tensors of the map, so that autograd notices if the caller changes them.
        ctx.save_for_backward(q, k, v, s, z, weights, form.columns, form.maxima)
        ctx.settings = form.map, form.whole
        ctx.mark_non_differentiable(weights)
        ctx.set_materialize_grads(False)
        return y, total_s, total_z, weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context[tuple[int, bool]], *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, s, z, weights, columns, maxima = ctx.saved_tensors
        y, total_s, total_z, _ = gradients
        form = _Form(*ctx.settings, columns, maxima)
        y = torch.zeros_like(v) if y is None else y
        grad_q, grad_k, grad_v = empty_like_projections(q, k, v)
        grad_s, grad_z = (None if x is None else torch.empty_like(x) for x in (s, z))
        total_s, total_z = (None if x is None else x.contiguous() for x in (total_s, total_z))
        form.run(
            "lintx_linear_backward",
            q,
            v,
            **{"k": k, "y": with_dense_rows(y), "s": s, "z": z, "weights": weights},
            **{"total_s": total_s, "total_z": total_z, "grad_weights": torch.empty_like(weights)},
            **{"grad_q": grad_q, "grad_k": grad_k, "grad_v": grad_v, "grad_s": grad_s, "grad_z": grad_z},
        )
        of_sums = (None, None) if form.whole else (grad_s, grad_z)  # if whole, these are the kernel's own memory
        return grad_q, grad_k, grad_v, *of_sums, None
