"""Sparse attention (Child 2019, arXiv 1904.10509): two fixed patterns of near positions and every l-th position."""

from typing import Literal

from torch import Tensor

from linformer_cli.errors import UsageError
from .base import AttentionOptions, AttentionShape, setting
from .parts.spans import FEWEST_QUERIES, MANY, Pattern, Span, SpanAttention

DEFAULT_SUMMARY = 4


class SparseOptions(AttentionOptions):
    pattern: Literal["strided", "fixed"] = setting(
        "strided",
        "what a query sees; 'strided': the last l positions and every l-th position before them; "
        "'fixed': its own block and the ends of earlier blocks",
    )
    heads: Literal["merged", "split"] = setting(
        "merged",
        "'merged': all heads see both parts of the pattern; 'split': even heads see the first part, "
        "odd heads the second",
    )
    stride: int | None = setting(None, "l, the stride, also the length of a block (default: one image row)", gt=0)
    summary: int | None = setting(
        None,
        "c, number of positions at the end of a block that later blocks see (default: 4, at most l); 'fixed' only",
        gt=0,
    )

    def check(self) -> None:
        if self.summary is not None and self.pattern != "fixed":
            raise ValueError("'summary' is for pattern 'fixed'; 'strided' has no blocks")
        if self.summary is not None and self.stride is not None and self.summary > self.stride:
            raise ValueError(f"'summary' must be at most 'stride' ({self.stride}), found {self.summary}")


class SparseAttention(SpanAttention[SparseOptions]):
    """y_t = sum over j in S(t) of softmax_j(q_t . k_j / sqrt(K)) v_j, where S(t) is a subset of the positions j <= t.

    S(t) has two parts. In `strided`, the first part is all j with t - j < l, and the second part is all j with
    (t - j) mod l = 0. In `fixed`, the first part is the query's block of l positions, and the second part is all j with
    j mod l >= l - c. S(t) always contains t. With `merged` heads, every head sees the union of both parts, each
    position once. With `split` heads, even heads see the first part and odd heads see the second part.

    This follows sections 4.2 and 4.3 of the source, without the variants that use different summary positions per head
    or put the two parts into alternating layers. If l is one image row, the second part of `strided` is the column
    above the query. The work is O(T (l + T / l)), which is O(T sqrt T) for l near sqrt T. The memory is O(T).

    The bidirectional form drops j <= t, and has |t - j| instead of t - j. The source has no such form.
    """

    name = "sparse"
    source = "Child 2019, arXiv 1904.10509"
    family = "sparse"
    method = "two fixed patterns, near and every l-th"
    bidirectional = True

    def __init__(self, options: SparseOptions, shape: AttentionShape) -> None:
        self.stride = options.stride or shape.row
        super().__init__(options, shape, max(self.stride, FEWEST_QUERIES))
        self.summary = options.summary or min(DEFAULT_SUMMARY, self.stride)
        if self.summary > self.stride:
            raise UsageError(
                f"'summary' must be at most the block length {self.stride} (one row), found {self.summary}"
            )
        if options.heads == "split" and shape.heads == 1:
            raise UsageError("heads 'split' needs two heads or more, found 1; use 'merged'")

    def list_patterns(self, position: Tensor, length: int | None = None) -> list[Pattern]:
        stride, block, place = self.stride, position // self.stride, position % self.stride
        if self.options.pattern == "strided":
            near, own = [Span(position - stride + 1, 1, 2 * stride - 1)], [Span(position, 1, 1)]
            apart, far = stride, [Span(place, stride, block), Span(position + stride, stride, MANY)]
        else:
            first = stride - self.summary
            near = [Span(block * stride, 1, stride)]
            own = [Span(block * stride + first, 1, self.summary), Span(position, 1, (place < first).long())]
            apart, far = 1, [Span(column, stride, block) for column in range(first, stride)]
            far += [Span((block + 1) * stride + column, stride, MANY) for column in range(first, stride)]
        if self.options.heads == "merged":
            return [Pattern(slice(None), [(1, near), (apart, far)])]
        return [Pattern(slice(0, None, 2), [(1, near)]), Pattern(slice(1, None, 2), [(1, own), (apart, far)])]
