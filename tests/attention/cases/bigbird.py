"""Reference for BigBird attention: a T x T softmax in which each query sees only its visible blocks.

Blocks are drawn with Python integers, as docs/reference/attention/bigbird.md describes.
"""

import math

import torch
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor


def mix(*numbers: int) -> int:
    """Return a 64-bit hash of several numbers."""
    z = 0
    for number in numbers:
        z = (z + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        z ^= z >> 31
    return z


def drawn_blocks(seed: int, layer: int, head: int, block: int, first: int, count: int) -> list[int]:
    """Draw `count` of the blocks from `first` to `block` - 3 by Floyd's algorithm; draw all if there are fewer."""
    return draw(seed, layer, head, block, list(range(first, block - 2)), count)


def draw(seed: int, layer: int, head: int, block: int, candidates: list[int], count: int) -> list[int]:
    chosen: list[int] = []
    picks = min(count, len(candidates))
    for column in range(picks):
        top = len(candidates) - picks + column
        number = (mix(seed, layer, head, block, column) >> 32) * (top + 1) >> 32
        chosen.append(top if number in chosen else number)
    return [candidates[number] for number in chosen]


def bigbird(
    q: Tensor, k: Tensor, v: Tensor, block: int, first: int, count: int, seed: int = 0, layer: int = 0
) -> Tensor:
    heads, length = q.shape[1:3]
    seen = torch.zeros(heads, length, length, dtype=torch.bool)
    for head in range(heads):
        for t in range(length):
            own = t // block
            drawn = drawn_blocks(seed, layer, head, own, first, count)
            visible = {*range(first), own - 2, own - 1, own, *drawn}
            for j in range(t + 1):
                seen[head, t, j] = j // block in visible
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v


def bigbird_all(
    q: Tensor, k: Tensor, v: Tensor, block: int, first: int, count: int, seed: int = 0, layer: int = 0
) -> Tensor:
    """Draw from all blocks of an image of 784 positions; blocks after the end have no positions."""
    heads, length = q.shape[1:3]
    seen = torch.zeros(heads, length, length, dtype=torch.bool)
    for head in range(heads):
        for own in range(math.ceil(length / block)):
            near = {own - 1, own, own + 1}
            others = [other for other in range(first, math.ceil(784 / block)) if other not in near]
            visible = {*range(first), *near, *draw(seed, layer, head, own, others, count)}
            columns = [j for j in range(length) if own < first or j // block in visible]
            seen[head, own * block : (own + 1) * block, columns] = True
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v


def bigbird_case(block: int | None, first: int, count: int, seed: int = 0) -> Case:
    def oracle(x: Inputs, _: Tensors) -> Tensor:
        return bigbird(x.q, x.k, x.v, block or 28, first, count, seed)

    def oracle_all(x: Inputs, _: Tensors) -> Tensor:
        return bigbird_all(x.q, x.k, x.v, block or 28, first, count, seed)

    options = {"block": block, "globals": first, "random": count, "seed": seed}
    return Case("bigbird", options, oracle, steady_steps=True, oracle_all=oracle_all)


CASES = {
    "bigbird": bigbird_case(7, 1, 2),
    "bigbird-many-drawn": bigbird_case(5, 2, 9, seed=11),
    "bigbird-nearby-alone": bigbird_case(8, 0, 0),
    "bigbird-drawn-alone": bigbird_case(6, 0, 3, seed=2),
    "bigbird-row": bigbird_case(None, 0, 1),
    "bigbird-single-positions": bigbird_case(1, 4, 6),
}
