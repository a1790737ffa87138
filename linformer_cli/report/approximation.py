"""The table and the plot of `lintx bench approximation`."""

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from .plots import Curve, Panel, PlotFormat, render_plot
from .tables import Column, Record

if TYPE_CHECKING:
    from linformer_cli.bench.approximation import Approximation, Spread


class ErrorName(StrEnum):
    OUTPUT = "output"
    BOUNDED_OUTPUT = "bounded-output"
    KERNEL = "kernel"
    SMALL_KERNEL = "small-kernel"

    @property
    def key(self) -> str:
        """The field of a row that holds this error."""
        return self.value.replace("-", "_")

    def of(self, row: "Approximation") -> "Spread":
        spread: Spread = getattr(row, self.key)
        return spread


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
CSV_COLUMNS = (
    *_SETTINGS,
    Column("draws"),
    *(Column(f"{error.key}_{part}") for error in ErrorName for part in _SPREAD),
)


def choose_columns(error: ErrorName) -> tuple[Column, ...]:
    """Return the columns of a table that shows one of the errors."""
    mean = Column(f"{error.key}_mean", f"error of {error.value}", format=".2e")
    return (*_SETTINGS, mean, Column("quartiles", "quartiles"))


def flatten_rows(rows: Sequence["Approximation"], shown: ErrorName) -> list[Record]:
    """Return a record for each row, sorted by norm and features, with separate columns for every spread."""
    return [_flatten(row, shown) for row in sorted(rows, key=lambda row: (row.norm, row.features))]


def _flatten(row: "Approximation", shown: ErrorName) -> Record:
    spreads = {f"{error.key}_{part}": getattr(error.of(row), part) for error in ErrorName for part in _SPREAD}
    spread = shown.of(row)
    quartiles = f"{spread.first_quartile:.2e} - {spread.third_quartile:.2e}"
    return {**vars(row), "directions": row.directions, **spreads, "quartiles": quartiles}


def render_approximation(rows: Sequence["Approximation"], error: ErrorName, kind: PlotFormat) -> bytes:
    """Plot medians and quartiles against features, with a panel per norm and dashes for independent directions."""
    maps = list(dict.fromkeys(row.feature_map for row in rows))
    panels = []
    for norm in dict.fromkeys(row.norm for row in rows):
        curves: dict[str, list[Approximation]] = {}
        for row in rows:
            if row.norm == norm:
                curves.setdefault(f"{row.feature_map}, {row.directions}", []).append(row)
        lines = [_build_curve(label, found, error, maps) for label, found in curves.items()]
        panels.append(Panel(f"norm {norm:g} sqrt(K)", lines))
    return render_plot(panels, "features m", f"mean squared error of the {_LABELS[error]}", kind)


def _build_curve(label: str, rows: Sequence["Approximation"], error: ErrorName, maps: Sequence[str]) -> Curve:
    spreads = [(row.features, error.of(row)) for row in sorted(rows, key=lambda row: row.features)]
    # The median, because the mean of a heavy-tailed error can lie above the quartiles.
    points = [(m, spread.median, spread.first_quartile, spread.third_quartile) for m, spread in spreads]
    return Curve.through(label, points, (maps.index(rows[0].feature_map), 0 if rows[0].orthogonal else 1))
