"""Reference for softmax attention, computed with T x T weights. It uses no code from the package."""

import math

import torch
from attention.inputs import Case
from torch import Tensor


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    future = torch.ones_like(scores).triu(1) == 1
    return scores.masked_fill(future, -math.inf).softmax(-1) @ v


def softmax_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ v


CASES = {
    "softmax": Case(
        "softmax",
        {},
        lambda x, _: softmax(x.q, x.k, x.v),
        # After a prefix, torch needs a mask and saves it. Without a mask, it saves only the total weight of each query.
        keeps_pairs="after a prefix",
        oracle_all=lambda x, _: softmax_all(x.q, x.k, x.v),
    )
}
