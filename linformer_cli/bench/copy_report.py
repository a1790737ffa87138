"""The report of `lintx bench copy`: its rows, tables and plot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from linformer_cli.report.plots import Curve, Panel, PlotFormat, Scale, number_styles, render_plot
from linformer_cli.report.tables import Column, Shown, list_columns
from linformer_cli.units import format_milliseconds, format_percent

from .copy_task import BATCH, HEADS, LAYERS, LEARNING_RATE, LOWER_AFTER_UPDATES, LOWER_LEARNING_RATE, SYMBOLS
from .measure.ceilings import CeilingsReport

CopyEnding = Literal["finished", "budget", "interrupted", "failed"]


@dataclass(frozen=True)
class CopyPoint:
    """A point of a learning curve: the mean loss and accuracy over the `points_every` updates up to `update`.

    `loss` is in nats per copied symbol. `accuracy` is the share of correct predictions.
    """

    update: int
    loss: float
    accuracy: float
    learning_rate: float


@dataclass(frozen=True)
class CopyRow:
    """The results of one mechanism: the last point of its curve, its speed, and all points.

    `product_gigaflops` is the rate of the matrix products of an update in GFLOP/s. `product_share` is this rate as a
    share of the machine's highest rate. `failed` says why the model's training ended early.
    """

    task: str
    reduced: bool
    name: Annotated[str, Shown("attention")]
    attention: str
    attention_options: Mapping[str, object]
    device: str
    parameters: int
    updates: Annotated[int, Shown("updates", ",")]
    loss: Annotated[float | None, Shown("loss, nats per symbol", ".4f")]
    accuracy: Annotated[float | None, Shown("accuracy", ".1%")]
    seconds_per_update: Annotated[float | None, Shown("time per update", format_milliseconds)]
    product_gigaflops: float | None
    product_share: Annotated[float | None, Shown("products", format_percent)]
    failed: Annotated[str | None, Shown("failed")]
    points: tuple[CopyPoint, ...]


@dataclass(frozen=True, kw_only=True)
class CopyConditions:
    """All settings that the figures of a report depend on, except the machine."""

    task: str
    reduced: bool
    length: int
    symbols: int = SYMBOLS
    layers: int = LAYERS
    heads: int = HEADS
    width: int
    feed_forward: int
    batch: int = BATCH
    optimizer: str = "radam"
    learning_rate: float = LEARNING_RATE
    learning_rate_later: float = LOWER_LEARNING_RATE
    learning_rate_later_from_update: int = LOWER_AFTER_UPDATES
    updates_wanted: int
    updates: int
    points_every: int
    budget_seconds: float | None
    interleaved: bool = True
    precision: str = "fp32"
    seed: int


@dataclass(frozen=True)
class CopyReport:
    """One row for each mechanism, and how the benchmark ended."""

    rows: tuple[CopyRow, ...]
    ended: CopyEnding
    settings: CopyConditions
    environment: dict[str, Any]
    ceilings: CeilingsReport


COPY_COLUMNS = list_columns(CopyRow)
CSV_COLUMNS = tuple(
    Column(key)
    for key in ("task", "reduced", "name", "attention", "device", "update", "loss", "accuracy", "learning_rate")
)
_SHOWN_POINTS = 10


def list_points(rows: Sequence[CopyRow]) -> list[dict[str, object]]:
    """Return one record for each point of each mechanism, for CSV."""
    return [{**vars(row), **vars(point)} for row in rows for point in row.points]


def tabulate_losses(rows: Sequence[CopyRow]) -> tuple[list[Mapping[str, object]], list[Column]]:
    """Return records and columns with the losses of all mechanisms at the last and at evenly spaced earlier updates."""
    losses = {row.name: {point.update: point.loss for point in row.points} for row in rows if row.points}
    updates = sorted({update for points in losses.values() for update in points}, reverse=True)
    shown = sorted(updates[:: max(1, -(-len(updates) // _SHOWN_POINTS))])
    records = [{"update": update, **{name: points.get(update) for name, points in losses.items()}} for update in shown]
    names = [Column(row.name, row.name, format=".4f") for row in rows]
    return list(records), [Column("update", "loss at update", format=","), *names]


def render_copy(rows: Sequence[CopyRow], title: str, kind: PlotFormat) -> bytes:
    """Plot loss and accuracy against updates, with one colour for each mechanism."""

    def build_panel(key: str, label: str, scale: Scale) -> Panel:
        curves = [
            Curve.through(row.name, [(point.update, getattr(point, key)) for point in row.points], style)
            for row, style in zip(rows, number_styles(len(rows)), strict=True)
        ]
        return Panel("", curves, y_label=label, x_scale="linear", y_scale=scale)

    panels = [
        build_panel("loss", "loss (nats per copied symbol)", "log"),
        build_panel("accuracy", "accuracy on the copy (share)", "linear"),
    ]
    return render_plot(panels, "updates", "", kind, title=title)
