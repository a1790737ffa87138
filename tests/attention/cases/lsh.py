"""Reference for LSH attention, computed with T x T masks. It uses no code from the package.

Masks are [R, B, H, T, T]; their rows are query positions.
"""

import math

import torch
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor


def hashes(q: Tensor, rotations: Tensor) -> Tensor:
    """Return the bucket of every query in every round, [R, B, H, T]; rotations are [H, K, R, buckets / 2]."""
    products = torch.einsum("bhtk,hkrc->rbhtc", q.double(), rotations.double())
    return torch.cat([products, -products], dim=-1).argmax(dim=-1)


def seen_by_rounds(q: Tensor, rotations: Tensor, window: int) -> Tensor:
    """Return bool [R, B, H, T, T]: whether j is one of the last `window` positions before t in the same bucket."""
    bucket = hashes(q, rotations)
    alike = (bucket.unsqueeze(-1) == bucket.unsqueeze(-2)).tril(-1)
    number = alike.sum(dim=-1)  # number of earlier positions in the bucket
    return alike & (number.unsqueeze(-1) - number.unsqueeze(-2) <= window)


def scores(q: Tensor) -> Tensor:
    keys = q / torch.linalg.vector_norm(q, dim=-1, keepdim=True)
    return q @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])


def lsh(x: Inputs, rotations: Tensor, window: int) -> Tensor:
    """Take one softmax over all positions that any round sees."""
    seen = seen_by_rounds(x.k, rotations, window).any(dim=0)
    alone = ~seen.any(dim=-1, keepdim=True)
    weights = scores(x.k).masked_fill(~seen & ~alone, -math.inf).softmax(dim=-1)
    return torch.where(alone, x.v, weights @ x.v)


def lsh_all(x: Inputs, rotations: Tensor, chunk: int, average: bool) -> Tensor:
    """Weigh the softmax of every round by its total weight, or equally; a single position sees itself."""
    length = x.v.shape[2]
    slot = hashes(x.k, rotations).argsort(dim=-1, stable=True).argsort(dim=-1)
    mine, theirs = slot.unsqueeze(-1) // chunk, slot.unsqueeze(-2) // chunk
    seen = (mine == theirs) | ((mine - 1) % -(-length // chunk) == theirs)
    if length > 1:
        seen = seen & (torch.eye(length) == 0)
    weights = scores(x.k).masked_fill(~seen, -math.inf)
    outputs, totals = weights.softmax(-1) @ x.v, weights.logsumexp(-1, keepdim=True)
    return outputs.mean(0) if average else (totals.softmax(0) * outputs).sum(0)


def lsh_case(rounds: int, buckets: int, window: int, average: bool = False) -> Case:
    def oracle(x: Inputs, tensors: Tensors) -> Tensor:
        return lsh(x, tensors["rotations"], window)

    def oracle_all(x: Inputs, tensors: Tensors) -> Tensor:
        return lsh_all(x, tensors["rotations"], window, average)

    options = {"rounds": rounds, "buckets": buckets, "window": window, "average": average}
    return Case("lsh", options, oracle, sees_itself=False, steady_steps=True, oracle_all=oracle_all)


CASES = {
    "lsh-1": lsh_case(1, 4, 8),
    "lsh-4": lsh_case(4, 6, 7),
    "lsh-average": lsh_case(3, 8, 16, average=True),
    # This case has ring buffers of one position and some empty buckets.
    "lsh-narrow": lsh_case(2, 64, 1),
}
