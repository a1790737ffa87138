"""Sums of exponentials that are divided by the exponential of their maximum, so that none overflows."""

import math

import torch
from torch import Tensor

from .padding import fill_padding


def exp_below_maximum(exponents: Tensor, lengths: Tensor | None) -> Tensor:
    """exp(x - maximum of x over the sequence) for x [B, H, T, C], and 0 at the padding."""
    exponents = fill_padding(exponents, lengths, -math.inf)
    return (exponents - exponents.detach().amax(dim=2, keepdim=True)).exp()


def raise_maximum(c: Tensor, exponents: Tensor) -> Tensor:
    """Raise the running maxima c in place; returns the factor that rescales sums divided by the old exp(c)."""
    before = c.clone()
    torch.maximum(c, exponents, out=c)
    return before.sub_(c).exp_()


def add_and_read(s: Tensor, phi_q: Tensor, phi_k: Tensor, values: Tensor) -> Tensor:
    """Add phi_k values^T to s [B, H, C, V] in place; returns phi_q s [B, H, V]."""
    s.addcmul_(phi_k.unsqueeze(-1), values.unsqueeze(-2))
    return (phi_q.unsqueeze(-2) @ s).squeeze(-2)
