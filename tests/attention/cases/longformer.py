"""Reference for Longformer attention: a T x T softmax in which each query sees only its visible positions."""

import math

import torch
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor


def longformer(x: Inputs, window: int, dilations: list[int], global_count: int, causal: bool = True) -> Tensor:
    """Without `causal`, windows reach as far to both sides, and global positions see all positions."""
    q, k, v = x[:3]
    length = q.shape[2]
    seen = torch.zeros(len(dilations), length, length, dtype=torch.bool)
    for head, dilation in enumerate(dilations):
        for t in range(length):
            places = range(window) if causal else range(1 - window, window)
            for j in [*range(global_count), *(t - place * dilation for place in places)]:
                if 0 <= j <= (t if causal else length - 1):
                    seen[head, t, j] = True
    if not causal:
        seen[:, :global_count] = True
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v


def longformer_case(window: int, dilation: int | str | None, dilations: list[int], global_count: int = 0) -> Case:
    def oracle(x: Inputs, _: Tensors) -> Tensor:
        return longformer(x, window, dilations, global_count)

    def oracle_all(x: Inputs, _: Tensors) -> Tensor:
        return longformer(x, window, dilations, global_count, causal=False)

    options = {"window": window, "dilation": dilation, "globals": global_count}
    return Case("longformer", options, oracle, oracle_all=oracle_all)


CASES = {
    "longformer": longformer_case(9, 1, [1, 1]),
    "longformer-globals-alone": longformer_case(1, 1, [1, 1], 4),
    "longformer-globals": longformer_case(12, 1, [1, 1], 20),
    "longformer-default-dilation": longformer_case(7, None, [1, 4], 1),
    "longformer-dilated": longformer_case(6, 3, [3, 3], 2),
    "longformer-two-dilations": longformer_case(5, "5,2", [5, 2], 3),
    # This window is longer than a block of the parallel form and longer than some blocks in the split tests.
    "longformer-wide": longformer_case(40, "1,2", [1, 2], 1),
}
