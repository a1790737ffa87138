"""Reference for causal ProbSparse attention, computed query by query. It uses no code from the package."""

import math

import torch
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor


def attends(q: Tensor, k: Tensor, sample: Tensor, factor: float, block: int) -> list[bool]:
    """Decide for each position of one sequence whether its query attends; q and k are [T, K]."""
    wanted, count = min(block, math.ceil(factor * math.log(block))), len(sample)
    measures: list[float] = []
    decisions = []
    for t in range(len(q)):
        start = t // block * block
        fractions = [(i + int(sample[i]) / 2**20) / count for i in range(count)]
        sampled = [math.floor(fraction * (start + block)) for fraction in fractions]
        scores = [float(q[t] @ k[j]) for j in [*sampled, t] if j < t] + [float(q[t] @ k[t])]
        measures.append(max(scores) - sum(scores) / len(scores))
        decisions.append(start == 0 or measures[t] >= sorted(measures[start - block : start])[-wanted])
    return decisions


def probsparse(x: Inputs, tensors: Tensors, factor: float, block: int) -> Tensor:
    assert len(tensors["sample"]) == math.ceil(factor * math.log(784))
    length = x.v.shape[2]
    scores = x.q @ x.k.transpose(-1, -2) / math.sqrt(x.q.shape[-1])
    y = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf).softmax(-1) @ x.v
    means = x.v.cumsum(2) / torch.arange(1, length + 1).unsqueeze(1)
    active = [
        [attends(q, k, tensors["sample"], factor, block) for q, k in zip(*pair, strict=True)]
        for pair in zip(x.q.detach(), x.k.detach(), strict=True)
    ]
    return torch.where(torch.tensor(active).unsqueeze(-1), y, means)


def probsparse_all(x: Inputs, tensors: Tensors, factor: float) -> Tensor:
    length, count = x.v.shape[2], len(tensors["sample"])
    wanted = min(length, max(1, math.ceil(factor * math.log(length))))
    sampled = [math.floor((i + int(part) / 2**20) / count * length) for i, part in enumerate(tensors["sample"])]
    scores = x.q @ x.k.transpose(-1, -2)
    measures = scores[..., sampled].amax(-1) - scores[..., sampled].mean(-1)
    active = measures >= measures.sort(dim=-1, descending=True).values[..., wanted - 1 : wanted]
    y = (scores / math.sqrt(x.q.shape[-1])).softmax(-1) @ x.v
    return torch.where(active.unsqueeze(-1), y, x.v.mean(2, keepdim=True))


def probsparse_case(factor: float, block: int) -> Case:
    def oracle(x: Inputs, tensors: Tensors) -> Tensor:
        return probsparse(x, tensors, factor, block)

    def oracle_all(x: Inputs, tensors: Tensors) -> Tensor:
        return probsparse_all(x, tensors, factor)

    return Case("probsparse", {"factor": factor, "block": block}, oracle, oracle_all=oracle_all)


CASES = {
    "probsparse": probsparse_case(1.0, 16),
    "probsparse-many": probsparse_case(3.0, 9),
}
