"""Causal sums that fade: what `causal_sums` adds up, with everything before a position scaled down by its decay.

    s_t = d_t s_{t-1} + phi(k_t) v_t^T,    y_t = phi(q_t) s_t,    0 <= d_t <= 1

A gate is such a decay; so is moving a sum to a new running maximum.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class _ScanWithDecay(torch.autograd.Function):
    """states[0] = first, states[n + 1] = decay[n] states[n] + parts[n]; the backward pass is the same in reverse."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, decay: Tensor, first: Tensor) -> Tensor:
        states = torch.empty_like(parts[:, :1]).repeat(1, parts.shape[1] + 1, 1, 1)
        states[:, 0] = first
        for n in range(parts.shape[1]):
            torch.addcmul(parts[:, n], decay[:, n], states[:, n], out=states[:, n + 1])
        ctx.save_for_backward(states, decay)
        return states

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        states, decay = ctx.saved_tensors
        grad = grad_outputs[0].clone()
        for n in reversed(range(decay.shape[1])):
            grad[:, n].addcmul_(decay[:, n], grad[:, n + 1])
        grad_decay = None
        if ctx.needs_input_grad[1]:
            grad_decay = (grad[:, 1:] * states[:, :-1]).sum_to_size(decay.shape)
        return grad[:, 1:], grad_decay, grad[:, 0]


def scan_with_decay(parts: Tensor, decay: Tensor, first: Tensor) -> Tensor:
    """The running sums [R, N + 1, C, V] of parts [R, N, C, V] behind first [R, C, V], each faded by the next decay.

    decay [R, N, C, 1] or [R, N, 1, 1]. Entry n is what stands before part n, the last one the end.
    """
    states: Tensor = _ScanWithDecay.apply(parts, decay, first)
    return states


def decayed_causal_sums(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, log_decay: Tensor, carried: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """y [B, H, T, V] and the last s [B, H, C, V], for phi_q, phi_k [B, H, T, C], v [B, H, T, V], log d [B, H, T].

    Chunks as in `causal_sums`. Weights inside a chunk are exp(c_t - c_j) with c the sum of log d from the chunk's
    start, so none is above 1 or a quotient of two that have vanished. `carried` is s before these positions.
    """
    batch, heads, length = phi_q.shape[:3]
    chunk = min(chunk, length)
    chunks = -(-length // chunk)
    fill = chunks * chunk - length
    # Zero features add nothing, and a log decay of 0 leaves the sum as it is.
    queries, keys, values = (
        functional.pad(x, (0, 0, 0, fill)).reshape(batch * heads, chunks, chunk, x.shape[-1]) for x in (phi_q, phi_k, v)
    )
    c = functional.pad(log_decay, (0, fill)).reshape(batch * heads, chunks, chunk).cumsum(dim=-1)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).triu(1)
    # Masked before exp: behind the diagonal the difference is positive and may overflow.
    weights = (c.unsqueeze(-1) - c.unsqueeze(-2)).masked_fill(later, -math.inf).exp()
    y = (queries @ keys.transpose(-1, -2) * weights) @ values
    end = c[..., -1:]
    parts = keys.transpose(-1, -2) @ (values * (end - c).exp().unsqueeze(-1))
    first = torch.zeros_like(parts[:, 0]) if carried is None else carried.flatten(0, 1)
    states = scan_with_decay(parts, end.exp().unsqueeze(-1), first)
    y = y + (queries @ states[:, :-1]) * c.exp().unsqueeze(-1)
    # A copy: a view would keep the states of all chunks alive.
    total = states[:, -1].clone().unflatten(0, (batch, heads))
    return y.reshape(batch, heads, chunks * chunk, -1)[:, :, :length], total
