"""Reference for retention, computed with T x T weights. It uses no code from the package."""

import math

import torch
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor

# The contract tests use images of this size.
POSITIONS, ROW = 784, 28


def weigh(t: int, j: int, memory: float, waves: int | None) -> float:
    """Return the weight w(t, j), which depends on the raster distance or, with `waves`, on rows and columns."""
    if waves is None:
        return math.exp(-abs(t - j) / memory)
    rows, columns = abs(t // ROW - j // ROW), t % ROW - j % ROW
    return math.exp(-rows * ROW / memory) * math.cos(math.pi * columns / (2 * ROW)) ** (2 * waves)


def retention(x: Inputs, memories: list[float], waves: int | None, causal: bool = True) -> Tensor:
    length = x.v.shape[2]
    pairs = [
        [[weigh(t, j, m, waves) if j <= t or not causal else 0.0 for j in range(length)] for t in range(length)]
        for m in memories
    ]
    weights = torch.tensor(pairs, dtype=x.v.dtype)
    u = (weights * (x.q @ x.k.transpose(-1, -2))) @ x.v / math.sqrt(x.q.shape[-1])
    y = u / (u.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return y if x.extra is None else y * x.extra * x.extra.sigmoid()


def retention_case(memories: list[float], waves: int | None = None, **options: bool | float | str) -> Case:
    def oracle(x: Inputs, _: Tensors) -> Tensor:
        return retention(x, memories, waves)

    def oracle_all(x: Inputs, _: Tensors) -> Tensor:
        return retention(x, memories, waves, causal=False)

    return Case("retention", {"chunk": 16, **options}, oracle, oracle_all=oracle_all)


SHORT = {"shortest_memory": 2, "longest_memory": 50, "output_gate": False}
CASES = {
    "retention": retention_case([784, 28]),
    "retention-ungated": retention_case([50, 2], **SHORT),
    "retention-plane": retention_case([784, 28], 2, distance="plane"),
    "retention-plane-ungated": Case(
        "retention",
        {"chunk": 16, "distance": "plane", "waves": 3, **SHORT},
        lambda x, _: retention(x, [50, 2], 3),
        oracle_all=lambda x, _: retention(x, [50, 2], 3, causal=False),
    ),
}
