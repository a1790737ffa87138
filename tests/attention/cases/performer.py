"""Reference for Performer, computed with T x T weights. It uses no code from the package.

Positive terms are added with logsumexp, so inputs may have any size.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from attention.inputs import Case, Inputs, Oracle, Tensors
from torch import Tensor


def scale(x: Inputs) -> tuple[Tensor, Tensor]:
    return x.q * x.q.shape[-1] ** -0.25, x.k * x.k.shape[-1] ** -0.25


def hide_future(x: Tensor, causal: bool) -> Tensor:
    return x.masked_fill(torch.ones_like(x[0, 0]).triu(1) == 1, -math.inf) if causal else x


def by_logarithms(log_phi: Callable[[Tensor, Tensor], Tensor], causal: bool = True) -> Oracle:
    """Build an oracle: a softmax over j <= t, or over all j, of log A_tj.

    A_tj is the sum over features i of exp(a_ti + b_ji).
    """

    def oracle(x: Inputs, tensors: Tensors) -> Tensor:
        a, b = (log_phi(part, tensors["directions"]) for part in scale(x))
        log_a = (a.unsqueeze(3) + b.unsqueeze(2)).logsumexp(-1)
        return hide_future(log_a, causal).softmax(-1) @ x.v

    return oracle


def positive(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.T - x.square().sum(-1, keepdim=True) / 2


def hyperbolic(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat([positive(x, w), positive(x, -w)], dim=-1)


def relu(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w.T).clamp(min=0) + 1e-3).log()


def trig(x: Inputs, tensors: Tensors, causal: bool = True) -> Tensor:
    """Average with weights exp(|k_j|^2 / 2) * mean of cos(w . (q_t - k_j)).

    The denominator is raised to at least a tenth of the sum of exp(|k_j|^2 / 2).
    """
    q, k = scale(x)
    w = tensors["directions"]
    kernel = ((q @ w.T).unsqueeze(3) - (k @ w.T).unsqueeze(2)).cos().mean(-1)
    size = (k.square().sum(-1) / 2).unsqueeze(2).expand(kernel.shape)
    share = hide_future(size, causal).softmax(-1)  # adds up to 1
    weights = share * kernel
    return weights @ x.v / weights.sum(-1, keepdim=True).clamp(min=0.1)


def performer_case(feature_map: str, oracle: Oracle, oracle_all: Oracle, **options: Any) -> Case:
    options = {"feature_map": feature_map, "features": 16, "chunk": 16, **options}
    return Case("performer", options, oracle, oracle_all=oracle_all)


def exponential_case(feature_map: str, log_phi: Callable[[Tensor, Tensor], Tensor], **options: Any) -> Case:
    return performer_case(feature_map, by_logarithms(log_phi), by_logarithms(log_phi, causal=False), **options)


CASES = {
    "performer-positive": exponential_case("positive", positive),
    "performer-independent": exponential_case("positive", positive, orthogonal=False, features=11),
    "performer-hyperbolic": exponential_case("hyperbolic", hyperbolic),
    "performer-relu": exponential_case("relu", relu),
    "performer-trig": performer_case("trig", trig, lambda x, tensors: trig(x, tensors, causal=False)),
}
