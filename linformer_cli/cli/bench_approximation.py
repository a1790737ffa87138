"""`lintx bench approximation`: how well random features stand for softmax."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linformer_cli.report.tables import Column

from . import options
from .output import print_json, print_records, write_plot

if TYPE_CHECKING:
    from linformer_cli.bench.approximation import Approximation
    from linformer_cli.report.plots import Panel


class ErrorName(StrEnum):
    OUTPUT = "output"
    BOUNDED_OUTPUT = "bounded-output"
    KERNEL = "kernel"
    SMALL_KERNEL = "small-kernel"

    @property
    def key(self) -> str:
        """Its name in a record."""
        return self.value.replace("-", "_")


_LABELS = {
    ErrorName.OUTPUT: "output",
    ErrorName.BOUNDED_OUTPUT: "output, bounded",
    ErrorName.KERNEL: "kernel exp(x . y)",
    ErrorName.SMALL_KERNEL: "kernel exp(x . y), smallest quarter",
}
_SETTINGS = (
    Column("norm", "norm", format="g", names=True),
    Column("features", "m", names=True),
    Column("feature_map", "map", names=True),
    Column("directions", "directions", names=True),
)
_SPREAD = ("mean", "first_quartile", "median", "third_quartile")
_CSV_COLUMNS = (
    *(Column(column.key, column.key) for column in _SETTINGS),
    Column("draws", "draws"),
    *(Column(f"{error.key}_{part}", f"{error.key}_{part}") for error in ErrorName for part in _SPREAD),
)


def approximation(
    features: Annotated[
        str, typer.Option("--features", help="Numbers of features m, separated by commas.", metavar="LIST")
    ] = "16,32,64,128,256",
    norms: Annotated[
        str, typer.Option("--norms", help="Lengths of queries and keys, in units of sqrt(K).", metavar="LIST")
    ] = "0.25,0.5,1,2",
    maps: Annotated[
        str,
        typer.Option("--maps", help="Feature maps: positive, hyperbolic, trig.", metavar="LIST"),
    ] = "positive,hyperbolic,trig",
    draws: Annotated[int, typer.Option("--draws", min=1, help="Draws of inputs and directions.")] = 20,
    positions: Annotated[int, typer.Option("--positions", min=2, help="T.")] = 128,
    head_width: Annotated[int, typer.Option("--head-width", min=2, help="K, the width of a head.")] = 32,
    seed: options.Seed = 0,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Also curves of medians and quartiles: .png or .svg.", show_default=False),
    ] = None,
    error: Annotated[ErrorName, typer.Option("--error", help="What table and plot show.")] = ErrorName.OUTPUT,
    style: options.Style = options.TableFormat.TABLE,
    json: options.Json = False,
) -> None:
    """Measure how well random features stand for softmax.

    Mean squared errors of performer's features against exact softmax, causal and in float64: by number of features and
    by norm of the inputs; orthogonal against independent directions; positive and hyperbolic against trigonometric
    features. Each is the mean over draws of inputs and directions, with the quartiles.

    `output` is the error of the outputs of values N(0, 1); `bounded-output` that with the lower bound that the
    mechanism gives to the denominator of `trig`; `kernel` that of the estimate of exp(x . y), x = q K^(-1/4), over all
    pairs, and `small-kernel` over the quarter of them where it is smallest. CSV and JSON have all four.

    Examples:

    - `lintx bench approximation`
    - `lintx bench approximation --features 32,64,128 --norms 1,2 --plot errors.svg`
    - `lintx bench approximation --maps positive --draws 100 --format csv`
    """
    from linformer_cli.report.plots import render_plot

    counts = options.parse_sizes(features, "--features", "64,128")
    sizes = options.parse_numbers(norms, "--norms", "0.5,1,2")
    options.require_plots(plot)

    from linformer_cli.bench.approximation import measure_approximation
    from linformer_cli.system.environment import describe_environment

    found = measure_approximation(
        counts,
        sizes,
        [name.strip() for name in maps.split(",")],
        draws=draws,
        seed=seed,
        positions=positions,
        key_width=head_width,
    )
    settings = {"positions": positions, "head_width": head_width, "draws": draws, "seed": seed, "precision": "fp64"}
    if json:
        print_json({"rows": found, "settings": settings, "plot": plot, "environment": describe_environment()})
    else:
        _print(found, error, style)
    label = f"mean squared error of the {_LABELS[error]}"
    write_plot(plot, lambda kind: render_plot(_build_panels(found, error), "features m", label, kind))


def _print(found: "list[Approximation]", error: ErrorName, style: options.TableFormat) -> None:
    rows = sorted((_flatten(row, error) for row in found), key=lambda row: (row["norm"], row["features"]))
    shown = (
        *_SETTINGS,
        Column(f"{error.key}_mean", f"error of {error.value}", format=".2e"),
        Column("quartiles", "quartiles"),
    )
    print_records(rows, _CSV_COLUMNS if style.value == "csv" else shown, style.value)


def _flatten(row: "Approximation", shown: ErrorName) -> dict[str, Any]:
    record: dict[str, Any] = {
        "norm": row.norm,
        "features": row.features,
        "feature_map": row.feature_map,
        "directions": _directions(row),
        "draws": row.draws,
    }
    for error in ErrorName:
        spread = getattr(row, error.key)
        record |= {f"{error.key}_{part}": getattr(spread, part) for part in _SPREAD}
    spread = getattr(row, shown.key)
    return record | {"quartiles": f"{spread.first_quartile:.2e} - {spread.third_quartile:.2e}"}


def _directions(row: "Approximation") -> str:
    return "orthogonal" if row.orthogonal else "independent"


def _build_panels(found: "list[Approximation]", error: ErrorName) -> "list[Panel]":
    """One panel for each norm: a colour for each feature map, dashed where directions are independent."""
    from linformer_cli.report.plots import Curve, Panel

    maps = list(dict.fromkeys(row.feature_map for row in found))
    panels = []
    for norm in dict.fromkeys(row.norm for row in found):
        curves: dict[str, list[Approximation]] = {}
        for row in found:
            if row.norm == norm:
                curves.setdefault(f"{row.feature_map}, {_directions(row)}", []).append(row)
        lines = []
        for label, rows in curves.items():
            rows = sorted(rows, key=lambda row: row.features)
            spreads = [getattr(row, error.key) for row in rows]
            lines.append(
                Curve(
                    label,
                    x=[row.features for row in rows],
                    y=[spread.median for spread in spreads],  # a mean of heavy tails lies above its own band
                    low=[spread.first_quartile for spread in spreads],
                    high=[spread.third_quartile for spread in spreads],
                    colour=maps.index(rows[0].feature_map),
                    dash=0 if rows[0].orthogonal else 1,
                )
            )
        panels.append(Panel(f"norm {norm:g} sqrt(K)", lines))
    return panels
