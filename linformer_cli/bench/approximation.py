"""How well performer's random features stand for softmax: errors by number of features and by norm of the inputs."""

import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from linformer_cli.attention.base import AttentionShape
from linformer_cli.attention.performer import PerformerAttention
from linformer_cli.config import OptionValue
from linformer_cli.errors import UsageError
from linformer_cli.model.mixers import build_attention

SOFTMAX_FEATURE_MAPS = ("positive", "hyperbolic", "trig")
# The part of all pairs that counts as small ones.
SMALL_SHARE = 0.25


@dataclass(frozen=True)
class Spread:
    """The mean and the quartiles over draws."""

    mean: float
    first_quartile: float
    median: float
    third_quartile: float


@dataclass(frozen=True)
class Approximation:
    """Mean squared errors of one kind of features against softmax, each with its spread over `draws`.

    `features` is m, what the state holds, so that kinds are compared at equal cost. `norm` is the length of queries and
    keys in units of sqrt(K). `output` is the error of the outputs that the features alone give, as in the source, and
    `bounded_output` that of the mechanism, whose `trig` bounds its denominator: for all others they are the same.
    `kernel` is the error of phi(x) . phi(y) against exp(x . y), over the pairs j <= t, and `small_kernel` that over the
    quarter of them with the smallest exp(x . y).
    """

    feature_map: str
    orthogonal: bool
    features: int
    norm: float
    draws: int
    output: Spread
    bounded_output: Spread
    kernel: Spread
    small_kernel: Spread


def measure_approximation(
    features: Sequence[int],
    norms: Sequence[float],
    feature_maps: Sequence[str] = SOFTMAX_FEATURE_MAPS,
    orthogonal: Sequence[bool] = (True, False),
    draws: int = 20,
    seed: int = 0,
    positions: int = 128,
    key_width: int = 32,
    value_width: int = 32,
) -> list[Approximation]:
    """One entry for every feature map, kind of directions, number of features and norm, looped over in this order.

    Attention is causal, in float64, over `positions` queries and keys of random direction and of length norm sqrt(K),
    that of entries of variance norm^2; values are N(0, 1). Every draw has inputs and directions of its own, fixed by
    `seed` and the number of the draw alone: all entries meet the same inputs up to their norm. Raises `UsageError` for
    features that the mechanism refuses, a feature map that does not estimate softmax, and less than one draw.
    """
    for feature_map in feature_maps:
        if feature_map not in SOFTMAX_FEATURE_MAPS:
            known = ", ".join(SOFTMAX_FEATURE_MAPS)
            raise UsageError(f"feature map '{feature_map}' does not estimate softmax; those that do: {known}")
    # The square of exp(|q| |k| / sqrt(K)), the largest that softmax is compared with, has to be a number.
    largest = math.sqrt(math.log(sys.float_info.max) / 2) / key_width**0.25
    if (norm := max(norms, default=0.0)) > largest:
        raise UsageError(
            f"at K = {key_width} norms above {largest:.3g} leave the numbers that there are, found {norm:g}"
        )
    if draws < 1:
        raise UsageError(f"errors are measured over at least one draw, found {draws}")
    inputs = [_draw_inputs(seed + draw, positions, key_width, value_width) for draw in range(draws)]
    exact = {norm: [_Exact.of(norm * q, norm * k, v) for q, k, v in inputs] for norm in norms}
    shape = AttentionShape(heads=1, key_width=key_width, value_width=value_width, positions=positions, row=positions)
    found = []
    for feature_map, is_orthogonal, count in itertools.product(feature_maps, orthogonal, features):
        # Built without touching the process's random numbers; the directions that count are drawn below.
        with torch.random.fork_rng(devices=[]):
            options: dict[str, OptionValue] = {"feature_map": feature_map, "features": count, "redraw_every": 1}
            options["orthogonal"] = is_orthogonal
            attention = cast(PerformerAttention, build_attention("performer", options, shape).double())
        for norm in norms:
            errors = [_measure_draw(attention, seed, draw, wanted) for draw, wanted in enumerate(exact[norm])]
            spreads = [_spread(values) for values in zip(*errors, strict=True)]
            found.append(Approximation(feature_map, is_orthogonal, count, norm, draws, *spreads))
    return found


@dataclass(frozen=True)
class _Exact:
    """q, k, v [1, 1, T, width], exp(x . y) of all pairs [T, T], and what softmax makes of it [T, V]."""

    q: Tensor
    k: Tensor
    v: Tensor
    kernel: Tensor
    output: Tensor

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor) -> "_Exact":
        kernel = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).exp()
        return _Exact(q[None, None], k[None, None], v[None, None], kernel, _average(kernel, v))


def _draw_inputs(seed: int, positions: int, key_width: int, value_width: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [T, K] of length sqrt(K), v [T, V]."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(positions, width, generator=generator, dtype=torch.float64)
        for width in (key_width, key_width, value_width)
    )
    q, k = (math.sqrt(key_width) * torch.nn.functional.normalize(part, dim=-1) for part in (q, k))
    return q, k, v


def _average(kernel: Tensor, v: Tensor) -> Tensor:
    """Values weighted by the kernel over j <= t; nothing holds the denominator away from 0."""
    weights = kernel.tril()
    return weights @ v / weights.sum(dim=-1, keepdim=True)


@torch.no_grad()
def _measure_draw(
    attention: PerformerAttention, seed: int, draw: int, exact: _Exact
) -> tuple[float, float, float, float]:
    """The errors of output, bounded output, kernel and small kernel."""
    attention.on_training_step(draw, seed)
    kernel = attention.kernel(exact.q, exact.k)[0, 0]
    bounded, _ = attention.attend(exact.q, exact.k, exact.v)
    past = torch.ones_like(kernel, dtype=torch.bool).tril()
    squares, sizes = (kernel - exact.kernel).square()[past], exact.kernel[past]
    tensors = (
        (_average(kernel, exact.v[0, 0]) - exact.output).square(),
        (bounded[0, 0] - exact.output).square(),
        squares,
        squares[sizes <= sizes.quantile(SMALL_SHARE)],
    )
    output, bounded_output, all_pairs, small_pairs = (float(tensor.mean()) for tensor in tensors)
    return output, bounded_output, all_pairs, small_pairs


def _spread(values: Sequence[float]) -> Spread:
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], values[0])
    return Spread(statistics.fmean(values), *statistics.quantiles(values, n=4, method="inclusive"))
