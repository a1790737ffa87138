"""The tables and the plot of `lintx bench copy`."""

from collections.abc import Mapping, Sequence

from linformer_cli.report.plots import Curve, Panel, PlotFormat, Scale, number_styles, render_plot
from linformer_cli.report.tables import Column, list_columns

from .copy import CopyRow

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
