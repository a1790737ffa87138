"""Causal sums over features, in chunks: the core of linear attention.

    y_t = sum over j <= t of (phi(q_t) . phi(k_j)) v_j

On CPUs, a compiled kernel visits the positions in order. The plain torch form computes the products of all pairs of
positions within a chunk, under a triangular mask. Earlier chunks enter through one running [C, V] sum per chunk. Time
and memory are linear in T: autograd keeps T * chunk products and T / chunk sums.
"""

import torch
from torch import Tensor

from linformer_cli.attention.kernels.registry import CAUSAL_SUMS, kernel_for

from .chunks import cut_chunks


def causal_sums(phi_q: Tensor, phi_k: Tensor, v: Tensor, carried: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    """y [B, H, T, V] for phi_q, phi_k [B, H, T, C] and v [B, H, T, V], and the last sum of phi(k_j) v_j^T [B, H, C, V].

    The outputs and the last sum include `carried` [B, H, C, V], the sum before these positions (None: no positions).
    Append a column of ones to v to get the normaliser phi(q_t) . z_t from the same products.
    """
    if sum_causally := kernel_for(CAUSAL_SUMS, v):
        return sum_causally(phi_q, phi_k, v, None, carried)
    length = phi_q.shape[2]
    # The last chunk is filled up with zero features, which add nothing to any sum.
    queries, keys, values = (cut_chunks(x, min(chunk, length)) for x in (phi_q, phi_k, v))
    y = (queries @ keys.transpose(-1, -2)).tril() @ values
    per_chunk = keys.transpose(-1, -2) @ values
    if carried is not None or per_chunk.shape[2] > 1:
        first = torch.zeros_like(per_chunk[:, :, :1]) if carried is None else carried.unsqueeze(2)
        sums = torch.cat([first, per_chunk], dim=2).cumsum(dim=2)
        y = y + queries @ sums[:, :, :-1]
        total = sums[:, :, -1].clone()  # a view would keep the sums of all chunks in memory
    else:
        total = per_chunk[:, :, 0]
    return y.flatten(2, 3)[:, :, :length], total


def update_and_read(s: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None = None) -> Tensor:
    """Multiply s [B, H, C, V] by `decay` and add key value^T, in place; returns query s [B, H, V].

    query and key are [B, H, C] and value is [B, H, V]. `decay` broadcasts to [B, H, C] (None: 1).
    """
    if decay is not None:
        s.mul_(decay.unsqueeze(-1))
    s.addcmul_(key.unsqueeze(-1), value.unsqueeze(-2))
    return (query.unsqueeze(-2) @ s).squeeze(-2)


def divide_by_weight(numerator: Tensor, weight: Tensor) -> Tensor:
    """numerator [..., V] / weight [...], and 0 where the weight is exactly 0."""
    weight = weight.unsqueeze(-1)
    nothing = weight == 0
    return (numerator / torch.where(nothing, torch.ones_like(weight), weight)).masked_fill(nothing, 0)
