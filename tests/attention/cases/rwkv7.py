"""Reference for RWKV-7, computed by the recurrence of its state. It uses no code from the package."""

import functools
import math

import torch
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor, nn


def recurrence(x: Inputs, tensors: Tensors, bonus: bool) -> Tensor:
    """Compute s = (diag(w) - (a * kappa) kappa^T) s + c v^T and y = r s / rms(r s) + (r . (rho * c)) v."""
    r, k, v = x.q, x.k, x.v
    tables = {name: table.unsqueeze(1) for name, table in tensors.items()}
    decay, rate = x.extra.chunk(2, dim=-1)
    w = (-math.exp(-0.5) * (decay + tables["decay_bias"]).sigmoid()).exp()
    a = (rate + tables["rate_bias"]).sigmoid()
    kappa = k * tables["removal"]
    kappa = kappa / (kappa.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    added = k * (1 + (a - 1) * tables["replacement"])
    s, outputs = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), []
    for t in range(k.shape[2]):
        moved = w[:, :, t].diag_embed() - (a * kappa)[:, :, t].unsqueeze(-1) * kappa[:, :, t].unsqueeze(-2)
        s = moved @ s + added[:, :, t].unsqueeze(-1) * v[:, :, t].unsqueeze(-2)
        outputs.append((r[:, :, t].unsqueeze(-2) @ s).squeeze(-2))
    y = torch.stack(outputs, dim=2)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return y + (r * tables["bonus"] * added).sum(-1, keepdim=True) * v if bonus else y


def scatter(mechanism: nn.Module) -> None:
    """Change every parameter; initial values of 0 and 1 would hide mistakes."""
    generator = torch.Generator().manual_seed(4)
    for parameter in mechanism.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


def rwkv7_case(bonus: bool) -> Case:
    return Case("rwkv7", {"bonus": bonus, "chunk": 8}, functools.partial(recurrence, bonus=bonus), prepare=scatter)


CASES = {"rwkv7": rwkv7_case(bonus=True), "rwkv7-without-bonus": rwkv7_case(bonus=False)}
