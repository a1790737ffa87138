"""Exponential features: divided by the exponential of their maximum, and pair by pair where sums would underflow."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from linformer_cli.attention.tensors import fill_padding, may_check
from .chunks import cut_chunks
from .sums import scan_with_decay

# Positions per chunk.
PAIRWISE_CHUNK = 8


def exp_below_maximum(exponents: Tensor, lengths: Tensor | None) -> Tensor:
    """exp(x - maximum of x over the sequence) for x [B, H, T, C], and 0 at the padding."""
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
    """y [B, H, T, V]: the first V columns of sums [B, H, T, V + 1], divided by the last.

    Key features in the sums were divided by their maximum over all positions. The other arguments are those of
    `replace_vanished`.
    """
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
    """y [B, H, T, V], recomputed for the images and heads that have too small a denominator `weight` [B, H, T].

    Key features are divided by their maximum over all positions, so each is at most 1. If the denominator is at least
    `smallest_weight`, features that underflow add up to less than a rounding error. The denominator is smaller only if
    some keys outweigh earlier keys by many orders of magnitude. There, `attend_pairwise` computes y from
    a, b = log_features(), values [B, H, T, V + 1] and the state `before`. It uses no later position. While checks are
    deferred, y is NaN there instead.
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
    """The smallest denominator for which underflowing features do not matter."""
    limits = torch.finfo(dtype)
    return limits.tiny / limits.eps**2


def attend_pairwise(a: Tensor, b: Tensor, values: Tensor, before: tuple[Tensor, Tensor] | None) -> Tensor:
    """y [R, T, V] from log features a, b [R, T, C] and values [R, T, V + 1]; numerically stable for all finite inputs.

    `before` holds s and c of the earlier positions, as in `PerformerState`. Pairs inside a chunk are computed feature
    by feature, so chunks are short. Earlier chunks enter through their sums, which are divided by the exponential of
    each feature's running maximum at the start of the chunk. Inside a chunk, the log weight of position j at t is the
    logsumexp over features i of a_ti + b_ji.
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
