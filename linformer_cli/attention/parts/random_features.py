"""Random directions and sine features, for kernels that are expectations over a random w.

exp(x . y)         = E exp(w . x - |x|^2 / 2) exp(w . y - |y|^2 / 2)
exp(-|x - y|^2/2)  = E cos(w . (x - y)) = E [sin(w . x) sin(w . y) + cos(w . x) cos(w . y)],   w ~ N(0, I)
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from linformer_cli.attention.tensors import Context, fill_padding, may_check
from .chunks import cut_chunks
from .sums import divide_by_weight, scan_with_decay

# Sums of sines and cosines can be 0 or negative, so a denominator is at least this share of its largest possible value.
WEIGHT_FLOOR = 0.1


def draw_directions(
    count: int, width: int, orthogonal: bool, normal: Callable[[int, int, int], Tensor] = torch.randn
) -> Tensor:
    """Return `count` directions w [count, width], each N(0, I); `normal(*shape)` draws standard normal numbers.

    Orthogonal directions come in blocks of `width`. Their lengths are independent of their angles, so each is N(0, I).
    """
    if not orthogonal:
        return normal(1, count, width)[0]
    blocks = normal(-(-count // width), width, width)
    if blocks.is_meta:  # only the shape is wanted; torch.linalg.qr would import torch's compiler, which takes seconds
        return blocks.flatten(0, 1)[:count]
    # Q times the signs of R's diagonal is uniform over all orthogonal matrices. QR alone does not guarantee this.
    q, r = torch.linalg.qr(blocks)
    angles = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).transpose(-1, -2).flatten(0, 1)[:count]
    lengths: Tensor = torch.linalg.vector_norm(normal(1, count, width)[0], dim=-1, keepdim=True)
    return angles * lengths


def seeded_normal(seed: int, layer: int, step: int) -> Callable[[int, int, int], Tensor]:
    """Return a source of normal numbers (float64, on the CPU) that depend on (seed, layer, step), not the machine."""
    # numpy guarantees raw words for all versions, but not normal numbers. A float64 has 53 bits.
    words = np.random.Philox(key=np.array([seed, layer], dtype=np.uint64), counter=[0, 0, 0, step])

    def normal(blocks: int, rows: int, columns: int) -> Tensor:
        raw = words.random_raw(blocks * rows * columns) >> np.uint64(11)
        uniform = torch.from_numpy((raw.astype(np.float64) + 0.5) * 2.0**-53)
        drawn: Tensor = torch.special.ndtri(uniform)
        return drawn.reshape(blocks, rows, columns)

    return normal


def sine_features(phases: Tensor) -> Tensor:
    """Return the vectors [sin, cos] / sqrt(F) [..., 2F] of phases w . x [..., F]; their length is 1."""
    return _SineFeatures.apply(phases)


class _SineFeatures(torch.autograd.Function):
    """Saves only the features, without a copy, since they are the largest tensors of the mechanisms that use them."""

    @staticmethod
    def forward(ctx: Context, phases: Tensor) -> Tensor:
        count = phases.shape[-1]
        features = phases.new_empty(*phases.shape[:-1], 2 * count)
        torch.sin(phases, out=features[..., :count])
        torch.cos(phases, out=features[..., count:])
        features *= float(count**-0.5)
        ctx.save_for_backward(features)
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *gradients: Tensor) -> Tensor:
        (features,), (gradient,) = ctx.saved_tensors, gradients
        (sines, cosines), (of_sines, of_cosines) = features.chunk(2, dim=-1), gradient.chunk(2, dim=-1)
        return (of_sines * cosines).addcmul_(of_cosines, sines, value=-1)


def divide_by_floored_weight(sums: Tensor, total: Tensor) -> Tensor:
    """Divide the first V columns of sums [.., V + 1] by max(last, 0.1 total); `total` [..] is the keys' weight."""
    # `split` rather than slices, because its gradient is one copy.
    numerator, weight = sums.split([sums.shape[-1] - 1, 1], dim=-1)
    return divide_by_weight(numerator, torch.maximum(weight.squeeze(-1), WEIGHT_FLOOR * total))


FeatureMapName = Literal["positive", "hyperbolic", "trig", "relu"]
RELU_OFFSET = 1e-3


class PerformerMap(NamedTuple):
    """Feature map `name` of x = q or k [.., K] times K^(-1/4), with directions w [directions, K] for all heads."""

    directions: Tensor
    name: FeatureMapName

    @property
    def width(self) -> int:
        return self.directions.shape[1]

    def columns(self, dtype: torch.dtype) -> Tensor:
        """Return w_i K^(-1/4), as columns [K, directions]."""
        return (self.directions.to(dtype) * self.width**-0.25).transpose(0, 1)

    def exponent_columns(self, dtype: torch.dtype) -> Tensor:
        """W [K, m], so that q W is the logarithm of the features of q, without -|x|^2 / 2."""
        columns = self.columns(dtype)
        return torch.cat([columns, -columns], dim=1) if self.name == "hyperbolic" else columns

    def project(self, q: Tensor) -> Tensor:
        """Return w_i . x [..., directions]."""
        return q @ self.columns(q.dtype)

    def half_square(self, q: Tensor) -> Tensor:
        """Return |x|^2 / 2 [...]."""
        # The clamp keeps the result finite if squares overflow, because infinity minus infinity is NaN.
        squares = q.square().sum(dim=-1).clamp(max=torch.finfo(q.dtype).max / 4)
        return squares * (0.5 / math.sqrt(self.width))

    def log_query(self, q: Tensor) -> Tensor:
        """Return logarithms [..., m] of a query's features, without -|x|^2 / 2, which cancels in the quotient."""
        a = self.project(q)
        return torch.cat([a, -a], dim=-1) if self.name == "hyperbolic" else a

    def log_key(self, k: Tensor) -> Tensor:
        """Return logarithms [..., m] of a key's features."""
        # |x|^2 / 2 is subtracted in the same product, which is faster than subtracting it from every feature.
        columns = self.exponent_columns(k.dtype)
        extended = torch.cat([k, self.half_square(k).unsqueeze(-1)], dim=-1)
        return extended @ torch.cat([columns, -torch.ones_like(columns[:1])])

    def relu(self, q: Tensor) -> Tensor:
        """Return max(w_i . x, 0) + 1e-3 [..., m]."""
        return self.project(q).relu() + RELU_OFFSET


PAIRWISE_CHUNK = 8  # positions


def exp_below_maximum(exponents: Tensor, lengths: Tensor | None) -> Tensor:
    """Return exp(x - maximum of x over the sequence) for x [B, H, T, C], and 0 at the padding."""
    exponents = fill_padding(exponents, lengths, -math.inf)
    return (exponents - exponents.detach().amax(dim=2, keepdim=True)).exp()


def raise_maximum(c: Tensor, exponents: Tensor) -> Tensor:
    """Raise the running maxima c in place; returns the factor that rescales sums divided by the old exp(c)."""
    before = c.clone()
    torch.maximum(c, exponents, out=c)
    return before.sub_(c).exp_()


def divide_sums(
    sums: Tensor,
    log_features: Callable[[], tuple[Tensor, Tensor]],
    values: Tensor,
    before: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Divide the first V columns of sums [B, H, T, V + 1] by the last; the rest is that of `replace_vanished`."""
    numerator, weight = sums.split([sums.shape[-1] - 1, 1], dim=-1)
    weight = weight.squeeze(-1)
    vanished = weight < smallest_weight(sums.dtype)
    y = numerator / weight.masked_fill(vanished, 1).unsqueeze(-1)
    return replace_vanished(y, weight, log_features, values, before)


def replace_vanished(
    y: Tensor,
    weight: Tensor,
    log_features: Callable[[], tuple[Tensor, Tensor]],
    values: Tensor,
    before: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return y [B, H, T, V], recomputed for the images and heads that have too small a denominator `weight` [B, H, T].

    Key features are divided by their maximum over all positions. From `smallest_weight` on, features that underflow add
    up to less than a rounding error. Where some keys outweigh earlier ones by many orders of magnitude,
    `attend_pairwise` computes y from a, b = log_features(), values [B, H, T, V + 1] and the state `before`, without
    later positions. While checks are deferred, y is NaN there instead.
    """
    vanished = weight < smallest_weight(weight.dtype)
    if not may_check(y.device):
        return y.masked_fill(vanished.unsqueeze(-1), math.nan)
    if not bool(vanished.any()):
        return y
    rows = vanished.any(dim=-1).flatten().nonzero().squeeze(-1)
    a, b, values = (x.to(weight.dtype).flatten(0, 1)[rows] for x in (*log_features(), values))
    if before is not None:
        before = before[0].flatten(0, 1)[rows], before[1].flatten(0, 1)[rows]
    replaced = attend_pairwise(a, b, values, before).to(y.dtype)
    return y.flatten(0, 1).index_copy(0, rows, replaced).unflatten(0, y.shape[:2])


def smallest_weight(dtype: torch.dtype) -> float:
    """Return the smallest denominator for which underflowing features do not matter."""
    limits = torch.finfo(dtype)
    return limits.tiny / limits.eps**2


def attend_pairwise(a: Tensor, b: Tensor, values: Tensor, before: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return y [R, T, V] from log features a, b [R, T, C] and values [R, T, V + 1]; stable for all finite inputs.

    `before` holds s and c of the earlier positions, as in `PerformerState`. Chunks are short, because the log weight of
    j at t in a chunk is the logsumexp of a_ti + b_ji over features i. The sums of earlier chunks are divided by the
    exponential of each feature's running maximum at the start of the chunk.
    """
    length = a.shape[1]
    a, b, values = (cut_chunks(x, PAIRWISE_CHUNK) for x in (a, b, values))
    first = torch.full_like(b[:, 0, 0], -math.inf) if before is None else before[1]
    maxima = torch.cat([first.unsqueeze(1), b.detach().amax(dim=2)], dim=1).cummax(dim=1).values
    starts, ends = maxima[:, :-1], maxima[:, 1:]
    parts = (b - ends.unsqueeze(2)).exp().transpose(-1, -2) @ values
    carried = torch.zeros_like(parts[:, 0]) if before is None else before[0]
    states = scan_with_decay(parts, (starts - ends).exp().unsqueeze(-1), carried)
    later = torch.ones(PAIRWISE_CHUNK, PAIRWISE_CHUNK, dtype=torch.bool, device=a.device).triu(1)
    pairs = (a.unsqueeze(3) + b.unsqueeze(2)).logsumexp(dim=-1).masked_fill(later, -math.inf)
    earlier = a + starts.unsqueeze(2)
    highest = torch.maximum(pairs.detach().amax(dim=-1, keepdim=True), earlier.detach().amax(dim=-1, keepdim=True))
    sums = (earlier - highest).exp() @ states[:, :-1] + (pairs - highest).exp() @ values
    # Cut off the padding before the division, because it has no valid denominator.
    sums = sums.flatten(1, 2)[:, :length]
    return sums[..., :-1] / sums[..., -1:]
