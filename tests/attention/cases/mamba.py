"""Reference for Mamba, computed by the recurrence of a complex state. It uses no code from the package.

A pair of rotated coordinates is one complex coordinate of the state. The state is rotated, not the queries and keys.
"""

import functools
import math

import torch
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor, nn


def normalised(x: Tensor, tensors: Tensors, which: int) -> Tensor:
    gain, bias = (tensors[name][which].unsqueeze(1) for name in ("gain", "bias"))
    return gain * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() + bias


def as_complex(x: Tensor, angles: int) -> Tensor:
    """Return complex [..., K - angles]: the rotated pairs first, then the other coordinates as real numbers."""
    pairs, rest = x[..., : 2 * angles], x[..., 2 * angles :]
    pairs = torch.complex(pairs[..., 0::2], pairs[..., 1::2])
    return torch.cat([pairs, torch.complex(rest, torch.zeros_like(rest))], dim=-1)


def rate_of(logit: Tensor) -> Tensor:
    return torch.where(logit >= 0, 1 + logit, 1 / (1 - logit.clamp(max=0)))


def recurrence(x: Inputs, tensors: Tensors, trapezoidal: bool, rotation: bool, normalise: bool, rate: str) -> Tensor:
    """Compute h = alpha R h + beta R B' x'^T + gamma B x^T and y = Re(conj(C) h) + D x, position by position."""
    width = x.k.shape[-1]
    angles = max(width // 4, min(1, width // 2)) if rotation else 0
    size, *others = (x.extra[..., n] for n in range(x.extra.shape[-1]))
    size = (1 + (size + tensors["step_bias"].unsqueeze(1)).exp()).log()
    a = rate_of(others.pop(0)) if rate == "input" else tensors["log_rate"].exp().unsqueeze(1)
    share = others.pop(0).sigmoid() if trapezoidal else torch.ones_like(size)
    turns = [math.pi * w.tanh() * size for w in others] + [torch.zeros_like(size)] * (width - 2 * angles)
    alpha = (-a * size).exp()
    q, k = (normalised(part, tensors, n) if normalise else part for n, part in enumerate(x[:2]))
    q, k = as_complex(q, angles), as_complex(k, angles)
    rotated = torch.stack([torch.polar(torch.ones_like(turn), -turn) for turn in turns], dim=-1)
    h, outputs = torch.zeros_like(k[:, :, 0].unsqueeze(-1) * x.v[:, :, 0].unsqueeze(-2)), []
    previous = torch.zeros_like(h)
    for t in range(x.v.shape[2]):
        turn = rotated[:, :, t].unsqueeze(-1)
        alpha_t, size_t, share_t = (part[:, :, t, None, None] for part in (alpha, size, share))
        own = k[:, :, t].unsqueeze(-1) * x.v[:, :, t].unsqueeze(-2)
        h = alpha_t * turn * (h + (1 - share_t) * size_t * previous) + share_t * size_t * own
        previous = own
        outputs.append((q[:, :, t].conj().unsqueeze(-1) * h).sum(-2).real)
    return torch.stack(outputs, dim=2) + tensors["skip"].view(-1, 1, 1) * x.v


def vary(mechanism: nn.Module) -> None:
    """Shorten the memories, and make all parameters differ."""
    generator = torch.Generator().manual_seed(4)
    for parameter in mechanism.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    mechanism.step_bias.data += 1.5


def mamba_case(trapezoidal: bool, rotation: bool, normalise: bool, rate: str) -> Case:
    options = {"trapezoidal": trapezoidal, "rotation": rotation, "normalise": normalise, "rate": rate}
    return Case("mamba", {"chunk": 16, **options}, functools.partial(recurrence, **options), prepare=vary)


CASES = {
    "mamba": mamba_case(trapezoidal=True, rotation=True, normalise=True, rate="input"),
    "mamba-2": mamba_case(trapezoidal=False, rotation=False, normalise=False, rate="head"),
    "mamba-mixed": mamba_case(trapezoidal=False, rotation=True, normalise=False, rate="input"),
}
