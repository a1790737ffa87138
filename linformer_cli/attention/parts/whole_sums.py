"""Sums over whole sequences: the core of the bidirectional forms of kernel mechanisms."""

from collections.abc import Callable

from torch import Tensor

from linformer_cli.attention.tensors import fill_padding


def read_whole_sums(phi_q: Tensor, phi_k: Tensor, v: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """phi_q s [B, H, T, V] and phi_q . z [B, H, T], for phi_q, phi_k [B, H, T, C] and v [B, H, T, V].

    s is the sum of phi(k_j) v_j^T over all positions of a sequence, and z is the sum of phi(k_j).
    """
    phi_k = fill_padding(phi_k, lengths)
    weights = phi_q @ phi_k.sum(dim=2).unsqueeze(-1)
    return phi_q @ (phi_k.transpose(-1, -2) @ v), weights.squeeze(-1)


def sum_both_ways(run: Callable[..., Tensor], *x: Tensor) -> Tensor:
    """run(*x) plus its result for the reversed `x`; all tensors are [B, H, T, W].

    Padding comes first in the reversed sequences. Its keys and values are 0, so it adds nothing to a state of 0.
    """
    return run(*x) + run(*(part.flip(2) for part in x)).flip(2)
