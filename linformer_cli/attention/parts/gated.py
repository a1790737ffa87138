"""What the gated attentions of Hua 2022 (arXiv 2202.10447) share: one head whose queries and keys are both made of Z.

Z [B, 1, T, K] arrives as q and as k. A query or a key is Z times a scale plus an offset, both of its own. Weights are
not normalised; relu(x)^2 stands where softmax would.
"""

import math
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.attention.base import Attention, AttentionOptions, AttentionShape


class GatedOptions(AttentionOptions):
    """Options of every gated attention."""

    z_width: Annotated[int, Field(gt=0, le=65_536, description="width of Z, of which queries and keys are made")] = 128
    scale: Annotated[
        Literal["length", "width"],
        Field(
            description="what divides q.k: 'length', the positions of an image (of a chunk in flash), and a bias by "
            "distance is added; 'width', sqrt(z_width), without a bias"
        ),
    ] = "length"


class ScaleOffset(nn.Module):
    """x * scale + offset, of `width` each; the offset starts at 0, the scale near `start`."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))
        self.offset = nn.Parameter(torch.zeros(width))
        nn.init.normal_(self.scale, mean=start, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width], in the type of `x`."""
        return torch.addcmul(self.offset.to(x.dtype), x, self.scale.to(x.dtype))


class GatedAttention(Attention):
    """Queries, keys, the bias by distance, and the weights they give.

    `span` is how many distances have a bias, and n: what products or outputs are divided by. A constant, never the
    number of positions seen, for which no step form could give what the parallel one does.
    """

    family = "gated"
    shared_query_key = True
    gated = True
    options: GatedOptions

    def __init__(self, options: GatedOptions, shape: AttentionShape, span: int) -> None:
        super().__init__(options, shape)
        if shape.heads != 1:
            raise ValueError(f"'{self.name}' has one head, {shape.heads} were asked for")
        self.span = span
        by_length = options.scale == "length"
        self.query, self.key = (self.build_scale_offset() for _ in range(2))
        self.bias = nn.Parameter(torch.empty(span)) if by_length else None
        if self.bias is not None:
            nn.init.normal_(self.bias, std=0.1)
        # What q.k is multiplied with, and what the weights are.
        self.score_scale = 1 / span if by_length else shape.key_width**-0.5
        self.weight_scale = 1.0 if by_length else 1 / span

    @classmethod
    def fit_shape(cls, options: Any, shape: AttentionShape, width: int) -> AttentionShape:
        return replace(shape, heads=1, key_width=options.z_width, value_width=2 * width)

    def build_scale_offset(self) -> ScaleOffset:
        """One more scale and offset for Z: the products of `length` start small, those of `width` are made so."""
        return ScaleOffset(self.shape.key_width, 0.0 if self.options.scale == "length" else 1.0)

    def activate(self, scores: Tensor) -> Tensor:
        """Weights from scores; exactly 0, with a gradient of 0, for a score of minus infinity."""
        return scores.relu().square()

    def mix(self, q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
        """Outputs [N, R, V] of queries [N, R, K] at places first .. first + R - 1, keys and values at 0 and on."""
        start = self.start_scores(q.shape[1], k.shape[1], first, q)
        y = self.activate(torch.baddbmm(start, q, k.transpose(1, 2), alpha=self.score_scale)) @ v
        return y if self.weight_scale == 1 else self.weight_scale * y

    def start_scores(self, rows: int, columns: int, first: int, like: Tensor) -> Tensor:
        """[rows, columns]: the bias of distance d = first + row - column, and minus infinity for the future, d < 0.

        Every row is a window of one descending sequence of distances. Windows add up their gradient quickly, where a
        table looked up rows * columns times would scatter it.
        """
        furthest, nearest = first + rows - 1, max(0, first - columns + 1)
        if self.bias is None:
            descending = like.new_zeros(furthest + 1 - nearest)
        else:
            descending = self.bias[nearest : furthest + 1].to(like.dtype).flip(0)
        future = columns - 1 - first
        if future > 0:
            descending = functional.pad(descending, (0, future), value=-math.inf)
        return descending.unfold(0, columns, 1).flip(0) if rows > 1 else descending.unsqueeze(0)
