"""Base of Hua 2022's gated mechanisms (arXiv 2202.10447): one head, with queries and keys from one projection Z.

Z [B, 1, T, K] is passed as q and as k. Queries and keys are Z * scale + offset, each with its own scale and offset.
relu(x)^2 replaces softmax, and weights are not normalised.
"""

import math
from dataclasses import replace
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from linformer_cli.attention.base import Attention, AttentionOptions, AttentionShape, State, setting


class GatedOptions(AttentionOptions):
    z_width: int = setting(128, "width of Z, the projection that queries and keys share", gt=0, le=65_536)
    value_width: int | None = setting(None, "width of the values; default: twice the model's width", gt=0, le=65_536)
    scale: Literal["length", "width"] = setting(
        "length",
        "'length' divides q.k by the number of positions in an image (for flash, in a chunk) and adds "
        "a learned bias for each distance; 'width' divides q.k by sqrt(z_width) and adds no bias",
    )


Options = TypeVar("Options", bound=GatedOptions)


class ScaleOffset(nn.Module):
    """x * scale + offset. Both parameters have size `width`; the scale is initialised near `start`, the offset to 0."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))
        self.offset = nn.Parameter(torch.zeros(width))
        nn.init.normal_(self.scale, mean=start, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return x * scale + offset [..., width], in the type of `x`."""
        return torch.addcmul(self.offset.to(x.dtype), x, self.scale.to(x.dtype))


class GatedAttention(Attention[Options, State]):
    """Computes queries, keys, the bias for each distance, and weights.

    `span` is the number of distances with a bias. Scores (with `scale = "length"`) or outputs (with "width") are
    divided by it, and not by the length of a block, because outputs must not depend on how a sequence is cut.
    """

    family = "gated"
    shared_query_key = True
    gated = True

    def __init__(self, options: Options, shape: AttentionShape, span: int) -> None:
        super().__init__(options, shape)
        if shape.heads != 1:
            raise ValueError(f"'{self.name}' has one head, found {shape.heads}")
        self.span = span
        by_length = options.scale == "length"
        self.query, self.key = (self.build_scale_offset() for _ in range(2))
        self.bias = nn.Parameter(torch.empty(span).normal_(std=0.1)) if by_length else None
        # The factors by which q.k and the weights are multiplied.
        self.score_scale = 1 / span if by_length else shape.key_width**-0.5
        self.weight_scale = 1.0 if by_length else 1 / span

    @classmethod
    def fit_shape(cls, options: Options, shape: AttentionShape, width: int) -> AttentionShape:
        return replace(shape, heads=1, key_width=options.z_width, value_width=options.value_width or 2 * width)

    def list_constants(self, *scaled: tuple["ScaleOffset", float]) -> Tensor:
        """Return the scales and offsets that a program needs, each times its factor: [2 * count, K]."""
        return torch.cat([factor * torch.stack([each.scale, each.offset]) for each, factor in scaled])

    def reversed_bias(self) -> Tensor:
        """Return the bias [span] with the largest distance first; zeros if there is none."""
        return self.key.scale.new_zeros(self.span) if self.bias is None else self.bias.flip(0)

    def build_scale_offset(self) -> ScaleOffset:
        """Return a scale and offset for Z. The scale starts near 0 with 'length', and near 1 with 'width'."""
        return ScaleOffset(self.shape.key_width, 0.0 if self.options.scale == "length" else 1.0)

    def activate(self, scores: Tensor) -> Tensor:
        """Return weights from scores; a score of minus infinity gives a weight of exactly 0 and a gradient of 0."""
        return scores.relu().square()

    def mix(self, q: Tensor, k: Tensor, v: Tensor, first: int | Tensor, causal: bool = True) -> Tensor:
        """Return outputs [N, R, V] of queries [N, R, K] from position `first` on (a number, or one on their device).

        Keys and values start at position 0. Without `causal`, queries see later keys too, with the bias of |d|.
        """
        start = self.start_scores(q.shape[1], k.shape[1], first, q, causal)
        y = self.activate(torch.baddbmm(start, q, k.transpose(1, 2), alpha=self.score_scale)) @ v
        return y if self.weight_scale == 1 else self.weight_scale * y

    def start_scores(self, rows: int, columns: int, first: int | Tensor, like: Tensor, causal: bool = True) -> Tensor:
        """Return the bias [rows, columns] of distance |d|, d = first + row - column; if `causal`, -inf for d < 0.

        Rows are windows of one descending sequence of distances, as the gradient of table look-ups is slow.
        """
        distances = torch.arange(rows - 1, -columns, -1, device=like.device) + first
        bias = like.new_zeros(len(distances)) if self.bias is None else self.bias.to(like.dtype)[distances.abs()]
        if causal:
            bias = bias.masked_fill(distances < 0, -math.inf)
        return bias.unfold(0, columns, 1).flip(0)
