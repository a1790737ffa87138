"""Reference for gated linear attention, computed with a weight for every pair of positions and every dimension.

It uses no code from the package.
"""

import math

import torch
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor


def gla(x: Inputs, memories: Tensor, temperature: float, gated: bool) -> Tensor:
    """Compute gated linear attention; `memories` is [K] or [H, 1, 1].

    If the extra scalars are 0, a weight falls to 1/e after `memories` positions.
    """
    assert x.extra is not None
    gates = memories.shape[-1]
    at_zero = (-temperature / memories).exp()
    a = (x.extra[..., :gates] + (at_zero / (1 - at_zero)).log()).sigmoid() ** (1 / temperature)
    length, rows = x.v.shape[2], []
    # Row t holds, for every j, the product of the gates from j + 1 to t.
    faded = torch.ones_like(a[:, :, :0])
    for t in range(length):
        faded = torch.cat([faded * a[:, :, t : t + 1], torch.ones_like(a[:, :, :1])], dim=2)
        scores = (x.q[:, :, t : t + 1] * faded * x.k[:, :, : t + 1]).sum(-1)
        rows.append((scores.unsqueeze(-1) * x.v[:, :, : t + 1]).sum(2) / math.sqrt(x.q.shape[-1]))
    u = torch.stack(rows, dim=2)
    y = u / (u.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    output_gate = x.extra[..., gates:]
    return y * output_gate * output_gate.sigmoid() if gated else y


def spaced(longest: float, shortest: float, count: int) -> Tensor:
    """Return `count` geometrically spaced memories."""
    logs = torch.linspace(math.log(longest), math.log(shortest), count, dtype=torch.float64)
    return logs.exp()


def vector(x: Inputs, _: Tensors) -> Tensor:
    return gla(x, spaced(784, 28, x.k.shape[-1]), 16, gated=True)


def vector_of_short_memory(x: Inputs, _: Tensors) -> Tensor:
    return gla(x, spaced(20, 1.5, x.k.shape[-1]), 1, gated=False)


def scalar(x: Inputs, _: Tensors) -> Tensor:
    return gla(x, spaced(784, 28, 2).view(2, 1, 1), 4, gated=True)


def scalar_ungated(x: Inputs, _: Tensors) -> Tensor:
    return gla(x, spaced(784, 28, 2).view(2, 1, 1), 16, gated=False)


SHORT = {"shortest_memory": 1.5, "longest_memory": 20}
CASES = {
    "gla": Case("gla", {"chunk": 16}, vector),
    "gla-ungated": Case("gla", {"chunk": 8, "temperature": 1, "output_gate": False, **SHORT}, vector_of_short_memory),
    "gla-scalar": Case("gla", {"chunk": 16, "gate": "scalar", "temperature": 4}, scalar),
    "gla-scalar-ungated": Case("gla", {"chunk": 16, "gate": "scalar", "output_gate": False}, scalar_ungated),
}
