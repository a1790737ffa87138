"""What every mechanism computes, written down as plainly as possible: T x T weights and nothing from the package.

q and k are [B, H, T, K], v is [B, H, T, V]; a kernel gives [B, H, T, T], its row the query's position.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Kernel = Callable[[Tensor, Tensor], Tensor]


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    future = torch.ones_like(scores).triu(1) == 1
    return scores.masked_fill(future, -math.inf).softmax(-1) @ v


def linear(q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
    """sum over j <= t of kernel(q_t, k_j) v_j over the sum of the weights; 0 where that is exactly 0."""
    weights = kernel(q, k).tril()
    total = weights.sum(-1, keepdim=True)
    return torch.where(total == 0, torch.zeros_like(v), weights @ v / torch.where(total == 0, 1.0, total))


def linear_condition(q: Tensor, k: Tensor, kernel: Kernel) -> Tensor:
    """[B, H, T]: how many times larger than their sum the terms are that add up to the denominator.

    For kernels that are polynomials of products with positive factors: all terms are positive for |q|, |k|.
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
    """relu(W x + b) with weight [H, C, K] and bias [H, C]."""

    def kernel(q: Tensor, k: Tensor) -> Tensor:
        q, k = (torch.einsum("hck,bhtk->bhtc", weight, x) + bias[:, None] for x in (q, k))
        return relu_kernel(q, k)

    return kernel
