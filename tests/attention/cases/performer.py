"""Reference for Performer, computed with T x T weights. It uses no code from the package.

Positive terms are added with logsumexp, so inputs may have any size.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor


def scale(x: Inputs) -> tuple[Tensor, Tensor]:
    return x.q * x.q.shape[-1] ** -0.25, x.k * x.k.shape[-1] ** -0.25


def by_logarithms(log_phi: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Inputs, Tensors], Tensor]:
    """Build an oracle: a softmax over j <= t of log A_tj. A_tj is the sum over features i of exp(a_ti + b_ji)."""

    def oracle(x: Inputs, tensors: Tensors) -> Tensor:
        a, b = (log_phi(part, tensors["directions"]) for part in scale(x))
        log_a = (a.unsqueeze(3) + b.unsqueeze(2)).logsumexp(-1)
        future = torch.ones_like(log_a[0, 0]).triu(1) == 1
        return log_a.masked_fill(future, -math.inf).softmax(-1) @ x.v

    return oracle


def positive(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.T - x.square().sum(-1, keepdim=True) / 2


def hyperbolic(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat([positive(x, w), positive(x, -w)], dim=-1)


def relu(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w.T).clamp(min=0) + 1e-3).log()


def trig(x: Inputs, tensors: Tensors) -> Tensor:
    """Average with weights exp(|k_j|^2 / 2) * mean of cos(w . (q_t - k_j)).

    The denominator is raised to at least a tenth of the sum of exp(|k_j|^2 / 2).
    """
    q, k = scale(x)
    w = tensors["directions"]
    kernel = ((q @ w.T).unsqueeze(3) - (k @ w.T).unsqueeze(2)).cos().mean(-1)
    size = (k.square().sum(-1) / 2).unsqueeze(2).expand(kernel.shape)
    future = torch.ones_like(kernel[0, 0]).triu(1) == 1
    share = size.masked_fill(future, -math.inf).softmax(-1)  # adds up to 1 over j <= t
    weights = share * kernel
    return weights @ x.v / weights.sum(-1, keepdim=True).clamp(min=0.1)


def performer_case(feature_map: str, oracle: Callable[[Inputs, Tensors], Tensor], **options: Any) -> Case:
    return Case("performer", {"feature_map": feature_map, "features": 16, "chunk": 16, **options}, oracle)


CASES = {
    "performer-positive": performer_case("positive", by_logarithms(positive)),
    "performer-independent": performer_case("positive", by_logarithms(positive), orthogonal=False, features=11),
    "performer-hyperbolic": performer_case("hyperbolic", by_logarithms(hyperbolic)),
    "performer-relu": performer_case("relu", by_logarithms(relu)),
    "performer-trig": performer_case("trig", trig),
}
