"""Reference for gated linear attention, computed with a weight for every pair of positions and every dimension.

It uses no code from the package.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor


def gla(x: Inputs, memories: Tensor, temperature: float, gated: bool, causal: bool = True) -> Tensor:
    """Compute gated linear attention; `memories` is [K] or [H, 1, 1].

    If the extra scalars are 0, a weight falls to 1/e after `memories` positions. Without `causal`, the sums of the
    reversed sequence are added; they include each position itself, as the other sums do, so it is subtracted once.
    """
    gates = memories.shape[-1]
    at_zero = (-temperature / memories).exp()
    a = (x.extra[..., :gates] + (at_zero / (1 - at_zero)).log()).sigmoid() ** (1 / temperature)
    u = decayed_sums(x, a)
    if not causal:
        own = (x.q * x.k).sum(-1, keepdim=True) * x.v / math.sqrt(x.q.shape[-1])
        u = u + decayed_sums(x.map(lambda part: part.flip(2)), a.flip(2)).flip(2) - own
    y = u / (u.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    output_gate = x.extra[..., gates:]
    return y * output_gate * output_gate.sigmoid() if gated else y


def decayed_sums(x: Inputs, a: Tensor) -> Tensor:
    """Return u; a holds the gates [B, H, T, K or 1]."""
    length, rows = x.v.shape[2], []
    # Row t holds, for every j, the product of the gates from j + 1 to t.
    faded = torch.ones_like(a[:, :, :0])
    for t in range(length):
        faded = torch.cat([faded * a[:, :, t : t + 1], torch.ones_like(a[:, :, :1])], dim=2)
        scores = (x.q[:, :, t : t + 1] * faded * x.k[:, :, : t + 1]).sum(-1)
        rows.append((scores.unsqueeze(-1) * x.v[:, :, : t + 1]).sum(2) / math.sqrt(x.q.shape[-1]))
    return torch.stack(rows, dim=2)


def spaced(longest: float, shortest: float, count: int) -> Tensor:
    """Return `count` geometrically spaced memories."""
    logs = torch.linspace(math.log(longest), math.log(shortest), count, dtype=torch.float64)
    return logs.exp()


def vector(x: Inputs, _: Tensors, causal: bool = True) -> Tensor:
    return gla(x, spaced(784, 28, x.k.shape[-1]), 16, gated=True, causal=causal)


def vector_of_short_memory(x: Inputs, _: Tensors, causal: bool = True) -> Tensor:
    return gla(x, spaced(20, 1.5, x.k.shape[-1]), 1, gated=False, causal=causal)


def scalar(x: Inputs, _: Tensors, causal: bool = True) -> Tensor:
    return gla(x, spaced(784, 28, 2).view(2, 1, 1), 4, gated=True, causal=causal)


def scalar_ungated(x: Inputs, _: Tensors, causal: bool = True) -> Tensor:
    return gla(x, spaced(784, 28, 2).view(2, 1, 1), 16, gated=False, causal=causal)


SHORT = {"shortest_memory": 1.5, "longest_memory": 20}


def gla_case(oracle: Callable[..., Tensor], **options: Any) -> Case:
    return Case("gla", options, oracle, oracle_all=functools.partial(oracle, causal=False))


CASES = {
    "gla": gla_case(vector, chunk=16),
    "gla-ungated": gla_case(vector_of_short_memory, chunk=8, temperature=1, output_gate=False, **SHORT),
    "gla-scalar": gla_case(scalar, chunk=16, gate="scalar", temperature=4),
    "gla-scalar-ungated": gla_case(scalar_ungated, chunk=16, gate="scalar", output_gate=False),
}
