"""Reference for linear attention, computed with T x T weights. It uses no code from the package.

A kernel returns [B, H, T, T]; its rows are query positions.
"""

import math
from collections.abc import Callable

import torch
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor

Kernel = Callable[[Tensor, Tensor], Tensor]


def linear(q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, causal: bool = True) -> Tensor:
    """Average v_j over j <= t, or over all j, with weights kernel(q_t, k_j); return 0 where the weights add up to 0."""
    weights = kernel(q, k).tril() if causal else kernel(q, k)
    total = weights.sum(-1, keepdim=True)
    return torch.where(total == 0, torch.zeros_like(v), weights @ v / torch.where(total == 0, 1.0, total))


def linear_condition(q: Tensor, k: Tensor, kernel: Kernel) -> Tensor:
    """Return [B, H, T]: the sum of the absolute values of the denominator's terms, divided by the denominator.

    The kernel must be a polynomial in q . k with positive coefficients. Then |q| and |k| make every term positive.
    """
    return kernel(q.abs(), k.abs()).tril().sum(-1) / kernel(q, k).tril().sum(-1)


def elu_kernel(q: Tensor, k: Tensor) -> Tensor:
    q, k = (torch.where(x > 0, x + 1, x.clamp(max=0).exp()) for x in (q, k))
    return q @ k.transpose(-1, -2)


def relu_kernel(q: Tensor, k: Tensor) -> Tensor:
    return q.clamp(min=0) @ k.clamp(min=0).transpose(-1, -2)


def poly2_kernel(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)) ** 2


def taylor2_kernel(q: Tensor, k: Tensor) -> Tensor:
    product = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return 1 + product + product**2 / 2


def learned_kernel(weight: Tensor, bias: Tensor) -> Kernel:
    """Apply relu(W x + b) with weight [H, C, K] and bias [H, C]."""

    def kernel(q: Tensor, k: Tensor) -> Tensor:
        q, k = (torch.einsum("hck,bhtk->bhtc", weight, x) + bias[:, None] for x in (q, k))
        return relu_kernel(q, k)

    return kernel


def linear_case(feature_map: str, kernel: Kernel, cancels: bool = False) -> Case:
    return Case(
        "linear",
        {"feature_map": feature_map, "chunk": 16},
        lambda x, _: linear(x.q, x.k, x.v, kernel),
        (lambda x: linear_condition(x.q, x.k, kernel)) if cancels else None,
        oracle_all=lambda x, _: linear(x.q, x.k, x.v, kernel, causal=False),
    )


def learned_linear(x: Inputs, tensors: Tensors, causal: bool = True) -> Tensor:
    kernel = learned_kernel(tensors["feature_map.weight"], tensors["feature_map.bias"])
    return linear(x.q, x.k, x.v, kernel, causal)


CASES = {
    "linear-elu": linear_case("elu", elu_kernel),
    "linear-relu": linear_case("relu", relu_kernel),
    "linear-poly2": linear_case("poly2", poly2_kernel, cancels=True),
    "linear-taylor2": linear_case("taylor2", taylor2_kernel, cancels=True),
    "linear-learned": Case(
        "linear",
        {"feature_map": "learned", "features": 7, "chunk": 16},
        learned_linear,
        oracle_all=lambda x, tensors: learned_linear(x, tensors, causal=False),
    ),
}
