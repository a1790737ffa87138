"""Random features of queries and keys, as products with random directions (Choromanski 2020, arXiv 2009.14794)."""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

FeatureMapName = Literal["positive", "hyperbolic", "trig", "relu"]
RELU_OFFSET = 1e-3


class PerformerMap(NamedTuple):
    """The feature map `name` with the directions w [directions, K], the same for all heads.

    Inputs are queries q or keys k [..., K]. Features are those of x = q K^(-1/4) or k K^(-1/4).
    """

    directions: Tensor
    name: FeatureMapName

    @property
    def width(self) -> int:
        """K, the width of a query."""
        return self.directions.shape[1]

    def columns(self, dtype: torch.dtype) -> Tensor:
        """w_i K^(-1/4), as columns [K, directions]."""
        columns: Tensor = (self.directions.to(dtype) * self.width**-0.25).transpose(0, 1)
        return columns

    def exponent_columns(self, dtype: torch.dtype) -> Tensor:
        """W [K, m], so that q W is the logarithm of the features of q, without -|x|^2 / 2."""
        columns = self.columns(dtype)
        return torch.cat([columns, -columns], dim=1) if self.name == "hyperbolic" else columns

    def project(self, q: Tensor) -> Tensor:
        """w_i . x [..., directions]."""
        projected: Tensor = q @ self.columns(q.dtype)
        return projected

    def half_square(self, q: Tensor) -> Tensor:
        """|x|^2 / 2 [...]."""
        # The clamp keeps the result finite if squares overflow, because infinity minus infinity is NaN.
        squares = q.square().sum(dim=-1).clamp(max=torch.finfo(q.dtype).max / 4)
        return squares * (0.5 / math.sqrt(self.width))

    def log_query(self, q: Tensor) -> Tensor:
        """Logarithms [..., m] of a query's features, without -|x|^2 / 2, which cancels in the quotient."""
        a = self.project(q)
        return torch.cat([a, -a], dim=-1) if self.name == "hyperbolic" else a

    def log_key(self, k: Tensor) -> Tensor:
        """Logarithms [..., m] of a key's features."""
        # |x|^2 / 2 is subtracted in the same product, which is faster than subtracting it from every feature.
        columns = self.exponent_columns(k.dtype)
        extended = torch.cat([k, self.half_square(k).unsqueeze(-1)], dim=-1)
        return extended @ torch.cat([columns, -torch.ones_like(columns[:1])])

    def relu(self, q: Tensor) -> Tensor:
        """max(w_i . x, 0) + 1e-3 [..., m]."""
        return self.project(q).relu() + RELU_OFFSET
