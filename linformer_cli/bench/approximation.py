"""`lintx bench approximation`: the errors of performer's random features as an approximation of softmax attention."""

import contextlib
import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from linformer_cli.attention.base import AttentionShape
from linformer_cli.attention.performer import PerformerAttention
from linformer_cli.config import OptionValue
from linformer_cli.errors import Interrupted, UsageError
from linformer_cli.model.mixers import build_attention
from linformer_cli.report.plots import Curve, Panel, PlotFormat, render_plot
from linformer_cli.report.tables import Column, Ending, Output, RecordTable, Report, Shown, TableStyle, list_columns
from linformer_cli.system.signals import Check, never_stop

SOFTMAX_FEATURE_MAPS = ("positive", "hyperbolic", "trig")
# `small_kernel` covers this share of the pairs: those with the smallest exp(x . y).
SMALL_SHARE = 0.25
VALUE_WIDTH = 32

# What a plot calls the errors. Their fields in a row have underscores.
_LABELS = {
    "output": "output",
    "bounded-output": "output, bounded",
    "kernel": "kernel exp(x . y)",
    "small-kernel": "kernel exp(x . y), smallest quarter",
}


@dataclass(frozen=True)
class Draws:
    """The number and size of the draws. Each draw has `positions` queries and keys of width `head_width`."""

    positions: int = 128
    head_width: int = 32
    draws: int = 20
    seed: int = 0
    precision: Literal["fp64"] = "fp64"

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise UsageError(f"errors are measured over at least one draw, found {self.draws}")


@dataclass(frozen=True)
class Spread:
    mean: float
    first_quartile: float
    median: float
    third_quartile: float


@dataclass(frozen=True)
class Approximation:
    """Mean squared errors of one kind of features relative to softmax, each with its spread over `draws` draws.

    `features` is m, which determines the size of the state. `norm` is the length of queries and keys in units of
    sqrt(K). `output` is the error of the outputs computed from the features alone, as in the Performer paper,
    `bounded_output` that of the mechanism's own, whose denominator is bounded for `trig`. `kernel` is the error of
    phi(x) . phi(y) as an estimate of exp(x . y), with x = q_t K^(-1/4) and y = k_j K^(-1/4), over the pairs j <= t, and
    `small_kernel` that over the quarter of these pairs with the smallest exp(x . y).
    """

    feature_map: Annotated[str, Shown("map", names=True)]
    orthogonal: bool
    features: Annotated[int, Shown("m", names=True)]
    norm: Annotated[float, Shown("norm", "g", names=True)]
    draws: int
    output: Spread
    bounded_output: Spread
    kernel: Spread
    small_kernel: Spread

    @property
    def directions(self) -> Annotated[str, Shown("directions", names=True)]:
        return "orthogonal" if self.orthogonal else "independent"


@dataclass(frozen=True, kw_only=True)
class ApproximationReport(Report):
    """All rows. Tables and the plot show one `error`."""

    rows: Sequence[Approximation]
    ended: Ending
    settings: Draws
    error: str

    def show(self, style: TableStyle) -> Output:
        rows = sorted(self.rows, key=lambda row: (row.norm, row.features))
        tables = [RecordTable(rows, _CSV_COLUMNS if style == "csv" else _list_error_columns(self.error))]
        done = f"{self.rows[0].draws if rows else 0:,} of {self.settings.draws:,} draws"
        plots = {"plot": partial(render_approximation, self.rows, self.error)}
        return Output(tables, plots, stopped=f"Stopped after {done}; their results are shown")


def measure_approximation(
    features: Sequence[int],
    norms: Sequence[float],
    feature_maps: Sequence[str] = SOFTMAX_FEATURE_MAPS,
    orthogonal: Sequence[bool] = (True, False),
    draws: Draws | None = None,
    error: str = "output",
    check: Check = never_stop,
) -> ApproximationReport:
    """Measure a row for each combination of the arguments. The norm varies fastest, the feature map slowest.

    Attention is causal and in float64. Queries and keys have random directions and the length norm * sqrt(K), values
    are drawn from N(0, 1). Inputs and directions depend only on the seed and the number of the draw, so all rows get
    the same ones, scaled to their norms. If `check` raises `Interrupted`, the rows have only the finished draws. Raises
    `UsageError` for features that the mechanism refuses, a feature map that does not estimate softmax, and a norm at
    which the square of the kernel overflows float64.
    """
    draws = draws or Draws()
    for feature_map in feature_maps:
        if feature_map not in SOFTMAX_FEATURE_MAPS:
            known = ", ".join(SOFTMAX_FEATURE_MAPS)
            raise UsageError(f"feature map '{feature_map}' does not estimate softmax; those that do: {known}")
    # The largest kernel is exp(|q| |k| / sqrt(K)). Its square must be finite.
    largest = math.sqrt(math.log(sys.float_info.max) / 2) / draws.head_width**0.25
    if (norm := max(norms, default=0.0)) > largest:
        raise UsageError(f"at K = {draws.head_width} norms above {largest:.3g} overflow float64, found {norm:g}")
    kinds = list(itertools.product(feature_maps, orthogonal, features))
    attentions = {kind: _build_attention(*kind, draws) for kind in kinds}
    pairs = list(itertools.product(kinds, norms))
    finished: list[list[list[float]]] = []
    with contextlib.suppress(Interrupted):
        for draw in range(draws.draws):
            exact = {norm: _attend_exactly(draws, draw, norm) for norm in norms}
            errors = []
            for kind, norm in pairs:
                check()
                errors.append(_measure_draw(attentions[kind], draws.seed, draw, exact[norm]))
            finished.append(errors)
    rows = [
        Approximation(*kind, norm, len(finished), *map(summarise, zip(*found, strict=True)))
        for (kind, norm), found in zip(pairs, zip(*finished, strict=True), strict=False)
    ]
    ended: Ending = "finished" if len(finished) == draws.draws else "interrupted"
    return ApproximationReport(rows=rows, ended=ended, settings=draws, error=error)


class _Exact(NamedTuple):
    """The inputs q, k and v [1, 1, T, width], exp(x . y) of all pairs [T, T], and softmax attention's output [T, V]."""

    q: Tensor
    k: Tensor
    v: Tensor
    kernel: Tensor
    output: Tensor


def _attend_exactly(draws: Draws, draw: int, norm: float) -> _Exact:
    generator = torch.Generator().manual_seed(draws.seed + draw)
    q, k, v = (
        torch.randn(draws.positions, width, generator=generator, dtype=torch.float64)
        for width in (draws.head_width, draws.head_width, VALUE_WIDTH)
    )
    length = norm * math.sqrt(draws.head_width)
    q, k = (length * torch.nn.functional.normalize(part, dim=-1) for part in (q, k))
    kernel = (q @ k.transpose(-1, -2) / math.sqrt(draws.head_width)).exp()
    return _Exact(q[None, None], k[None, None], v[None, None], kernel, _average(kernel, v))


def _build_attention(feature_map: str, orthogonal: bool, features: int, draws: Draws) -> PerformerAttention:
    """Build performer attention in float64. Its directions are drawn later. The global random state does not change."""
    shape = AttentionShape(1, draws.head_width, VALUE_WIDTH, draws.positions, draws.positions)
    options: dict[str, OptionValue] = {"feature_map": feature_map, "features": features}
    options |= {"orthogonal": orthogonal, "redraw_every": 1}
    with torch.random.fork_rng(devices=[]):
        return cast(PerformerAttention, build_attention("performer", options, shape).double())


def _average(kernel: Tensor, v: Tensor) -> Tensor:
    """Average the values at j <= t, weighted by the kernel. The denominator has no lower bound."""
    weights = kernel.tril()
    return weights @ v / weights.sum(dim=-1, keepdim=True)


@torch.no_grad()
def _measure_draw(attention: PerformerAttention, seed: int, draw: int, exact: _Exact) -> list[float]:
    """Return the mean squared errors of a draw, in the order of `_LABELS`."""
    attention.on_training_step(draw, seed)
    kernel = attention.kernel(exact.q, exact.k)[0, 0]
    bounded, _ = attention.attend(exact.q, exact.k, exact.v)
    past = torch.ones_like(kernel, dtype=torch.bool).tril()
    errors, sizes = (kernel - exact.kernel)[past], exact.kernel[past]
    small = sizes <= float(np.quantile(sizes.numpy(), SMALL_SHARE))  # torch's limit is 2^24 numbers
    outputs = _average(kernel, exact.v[0, 0]) - exact.output, bounded[0, 0] - exact.output
    return [float(error.square().mean()) for error in (*outputs, errors, errors[small])]


def summarise(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), *np.quantile(values, (0.25, 0.5, 0.75)).tolist())


_SETTINGS = list_columns(Approximation, "norm features feature_map directions")
_FIGURES = [f"{error.replace('-', '_')}.{part.name}" for error in _LABELS for part in fields(Spread)]
_CSV_COLUMNS = (*_SETTINGS, Column("draws"), *map(Column, _FIGURES))


def _list_error_columns(error: str) -> tuple[Column, ...]:
    key = error.replace("-", "_")
    mean = Column(f"{key}.mean", f"error of {error}", format=".2e")
    return (*_SETTINGS, mean, Column(key, "quartiles", format="{0.first_quartile:.2e} - {0.third_quartile:.2e}".format))


def render_approximation(rows: Sequence[Approximation], error: str, kind: PlotFormat) -> bytes:
    """Plot medians and quartiles against features, with a panel per norm and dashes for independent directions."""
    maps = list(dict.fromkeys(row.feature_map for row in rows))
    panels = []
    for norm in dict.fromkeys(row.norm for row in rows):
        curves: dict[tuple[str, str], list[tuple[float, ...]]] = {}
        for row in sorted(rows, key=lambda row: row.features):
            if row.norm == norm:
                spread: Spread = getattr(row, error.replace("-", "_"))
                # The median, because the mean of a heavy-tailed error can lie above the quartiles.
                point = (row.features, spread.median, spread.first_quartile, spread.third_quartile)
                curves.setdefault((row.feature_map, row.directions), []).append(point)
        lines = [
            Curve(f"{name}, {directions}", points, (maps.index(name), int(directions == "independent")))
            for (name, directions), points in curves.items()
        ]
        panels.append(Panel(f"norm {norm:g} sqrt(K)", lines))
    return render_plot(panels, "features m", f"mean squared error of the {_LABELS[error]}", kind)
