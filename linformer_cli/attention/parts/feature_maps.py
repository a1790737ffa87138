"""Feature maps phi of linear attention, which map x [B, H, T, K] or [B, H, K] to phi(x) [..., C].

The kernel of a map is phi(q) . phi(k), which is never negative. None adds an epsilon: the division handles 0.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from linformer_cli.attention.tensors import Context


class FeatureMap(nn.Module, ABC):
    """One feature map. A learned map has separate weights for each of the `heads` heads, and may be given its C."""

    def __init__(self, heads: int, key_width: int, width: int | None = None) -> None:
        super().__init__()
        self.key_width = key_width
        self.width = width or key_width  # C

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Return phi(x); x must be float32 or wider."""


def _elu_plus_one(x: Tensor) -> Tensor:
    return x.clamp(max=0).exp_().add_(x.clamp(min=0))


class _EluPlusOne(torch.autograd.Function):
    """elu(x) + 1 without elu's rounding to -1 for x < -17 in float32. The slope is min(phi, 1): only phi is saved."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        y = _elu_plus_one(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Context, *grad_outputs: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        slope: Tensor = y.clamp(max=1)
        return grad_outputs[0] * slope


class Elu(FeatureMap):
    """elu(x) + 1, the map of Katharopoulos 2020, equation 7; C = K."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # an autograd Function would add noticeable time to a step
            return _elu_plus_one(x)
        return _EluPlusOne.apply(x)


class Relu(FeatureMap):
    """max(x, 0); C = K. If all features of a query are 0, its output is 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


def _clamp_huge(x: Tensor) -> Tensor:
    """Return x clamped to +-(largest number of its type)^(1/5)."""
    limit = torch.finfo(x.dtype).max ** 0.2
    return x.clamp(-limit, limit)


class Poly2(FeatureMap):
    """The kernel (q . k)^2, computed from the K (K + 1) / 2 distinct products of two coordinates.

    A product of different coordinates stands for two terms, hence sqrt(2). The cost T C V is below that of T^2 weights
    for T well above K^2 (Katharopoulos 2020, section 3.2.1). Coordinates are limited to 5e7 in float32, so that no
    product of four overflows.
    """

    pairs: Tensor

    def __init__(self, heads: int, key_width: int, width: int | None = None) -> None:
        super().__init__(heads, key_width, width or key_width * (key_width + 1) // 2)
        self.register_buffer("pairs", torch.triu_indices(key_width, key_width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self._multiply_pairs(_clamp_huge(x))

    def _multiply_pairs(self, x: Tensor) -> Tensor:
        first, second = self.pairs
        # The weights are not a buffer, because casting the model to bfloat16 would round them.
        weights = torch.where(first == second, 1.0, torch.full((), 2.0, dtype=x.dtype, device=x.device).sqrt())
        # On a CPU, index_select is faster than x[..., first] in the forward and the backward pass.
        return x.index_select(-1, first) * x.index_select(-1, second) * weights


class Taylor2(Poly2):
    """The kernel 1 + x.y + (x.y)^2 / 2 with x = q K^(-1/4) and y = k K^(-1/4): exp(q.k / sqrt(K)) to second order.

    It is at least 1/2, and C = 1 + K + K (K + 1) / 2. Coordinates of x and y are limited as in `Poly2`.
    """

    def __init__(self, heads: int, key_width: int, width: int | None = None) -> None:
        super().__init__(heads, key_width, 1 + key_width + key_width * (key_width + 1) // 2)

    def forward(self, x: Tensor) -> Tensor:
        x = _clamp_huge(x * self.key_width**-0.25)
        return torch.cat([torch.ones_like(x[..., :1]), x, self._multiply_pairs(x) * math.sqrt(0.5)], dim=-1)


class Learned(FeatureMap):
    """relu(W x + b) with W [H, C, K] and b [H, C], at first 0.1 (Kasai 2021, arXiv 2103.13076), for q and k."""

    def __init__(self, heads: int, key_width: int, width: int | None = None) -> None:
        super().__init__(heads, key_width, width)
        self.weight = nn.Parameter(torch.empty(heads, self.width, key_width))
        self.bias = nn.Parameter(torch.full((heads, self.width), 0.1))
        nn.init.normal_(self.weight, std=key_width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        if x.dim() == 3:
            return (torch.einsum("bhk,hck->bhc", x, weight) + bias).relu()
        return (x @ weight.transpose(-1, -2) + bias.unsqueeze(1)).relu()


FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    "elu": Elu,
    "relu": Relu,
    "poly2": Poly2,
    "taylor2": Taylor2,
    "learned": Learned,
}
