"""Reference for LogSparse attention: a T x T softmax with a mask by distance. It uses no code from the package."""

import math
from typing import Any

import torch
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor


def seen_distances(length: int, window: int, restart: int | None) -> set[int]:
    powers = {window - 1 + 2**i for i in range(length.bit_length())}
    once = {distance for distance in {*range(window), *powers} if distance < (restart or length)}
    return {distance + again for distance in once for again in range(0, length, restart or length)}


def logsparse(x: Inputs, window: int, restart: int | None) -> Tensor:
    length = x.v.shape[2]
    seen = torch.zeros(length, length, dtype=torch.bool)
    for distance in seen_distances(length, window, restart):
        for t in range(distance, length):
            seen[t, t - distance] = True
    scores = x.q @ x.k.transpose(-1, -2) / math.sqrt(x.q.shape[-1])
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ x.v


def logsparse_case(window: int, restart: int | None) -> Case:
    def oracle(x: Inputs, _: Tensors) -> Tensor:
        return logsparse(x, window, restart)

    options: dict[str, Any] = {"window": window} | ({} if restart is None else {"restart": restart})
    return Case("logsparse", options, oracle)


CASES = {
    "logsparse": logsparse_case(1, None),
    "logsparse-local": logsparse_case(5, None),
    "logsparse-restart": logsparse_case(3, 20),
}
