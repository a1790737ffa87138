"""`lintx bench approximation`: how well random features approximate softmax."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from linformer_cli.config import LARGEST_SIZE

from . import options
from .config_options import count, option, several, with_fields
from .output import print_json, print_records, write_plot


@dataclass(frozen=True, kw_only=True)
class ApproximationOptions:
    """The options of the command."""

    features: str = several("16,32,64,128,256", "Numbers of features m, separated by commas.")
    norms: str = several("0.25,0.5,1,2", "Lengths of queries and keys in units of sqrt(K), separated by commas.")
    maps: str = several("positive,hyperbolic,trig", "Feature maps, separated by commas: positive, hyperbolic, trig.")
    draws: int = count(20, "Number of draws of random inputs and directions.")
    positions: int = option(128, "Sequence length T.", min=2, max=LARGEST_SIZE)
    head_width: int = option(32, "Width K of a head.", min=2, max=LARGEST_SIZE)
    seed: options.Seed = 0
    plot: Path | None = option(None, "Also plot medians and quartiles to a .png or .svg file.")
    error: Literal["output", "bounded-output", "kernel", "small-kernel"] = option(
        "output", "The error that the table and the plot show."
    )
    style: options.Style = "table"
    json: options.Json = False


@with_fields
def approximation(asked: ApproximationOptions) -> None:
    """Measure the errors of random features.

    Reports mean squared errors of performer attention relative to causal softmax attention in float64, with orthogonal
    or independent random directions. Each figure is the mean over draws of inputs and directions, with quartiles. CSV
    and JSON contain all errors. Ctrl-C shows the results of the finished draws.

    - output: of the attention outputs, for values drawn from N(0, 1).
    - bounded-output: the same, with the mechanism's lower bound on the denominator of `trig`.
    - kernel: of the estimate of exp(x . y) over all pairs of a query q and a key k at an earlier or the same position,
      where x = q K^(-1/4) and y = k K^(-1/4).
    - small-kernel: the same over the quarter of pairs with the smallest exp(x . y).

    Examples:

    - `lintx bench approximation --features 32,64,128 --norms 1,2 --plot errors.svg`
    - `lintx bench approximation --maps positive --draws 100 --format csv`
    """
    counts = options.parse_sizes(asked.features, "--features", "64,128")
    sizes = options.parse_numbers(asked.norms, "--norms", "0.5,1,2")
    options.require_plots(asked.plot)

    from linformer_cli.bench import approximation as bench
    from linformer_cli.system.environment import describe_environment
    from linformer_cli.system.signals import catch_signals

    names = [name.strip() for name in asked.maps.split(",")]
    settings = bench.Draws(asked.positions, asked.head_width, asked.draws, asked.seed)
    with catch_signals() as stop:
        rows = bench.measure_approximation(counts, sizes, names, draws=settings, check=stop.raise_if_set)
    done = rows[0].draws if rows else 0
    if not done:
        stop.raise_if_set("Stopped before anything was measured")
    if asked.json:
        report = {"rows": rows, "ended": "finished" if done == asked.draws else "interrupted", "settings": settings}
        print_json({**report, "plot": asked.plot, "environment": describe_environment()})
    else:
        columns = bench.CSV_COLUMNS if asked.style == "csv" else bench.list_error_columns(asked.error)
        by_cost = sorted(rows, key=lambda row: (row.norm, row.features))
        print_records(by_cost, columns, asked.style)
    write_plot(asked.plot, lambda kind: bench.render_approximation(rows, asked.error, kind))
    stop.raise_if_set(f"Stopped after {done:,} of {asked.draws:,} draws; their results are shown")
