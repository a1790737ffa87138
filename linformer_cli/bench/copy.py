"""`lintx bench copy` and `recall`: losses of different mechanisms after the same number of updates."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from linformer_cli.errors import TrainingError
from linformer_cli.evaluation.agreement import require_agreement
from linformer_cli.model.mixers import Variant
from linformer_cli.report.plots import Curve, Panel, PlotFormat, Scale, render_plot
from linformer_cli.report.tables import Column, Output, RecordTable, Report, Shown, TableStyle, list_columns
from linformer_cli.system.signals import StopRequest
from linformer_cli.system.timing import time_work
from linformer_cli.training.loop import Trainer
from linformer_cli.units import format_bytes, format_milliseconds
from .columns import choose_columns
from .measure.attention_pass import PassSetup, build_checked_model
from .sequence_tasks import BATCH, CopySettings, CopyTask

CopyEnding = Literal["finished", "budget", "interrupted", "failed"]
_ENDINGS = {"budget": "the budget was spent", "interrupted": "interrupted", "failed": "every model failed"}
_SHOWN_POINTS = 10  # the number of rows in the table of losses


@dataclass(frozen=True)
class CopyPoint:
    """Means over the `points_every` updates up to `update`; `loss` is in nats per predicted symbol."""

    update: int
    loss: float
    accuracy: float
    learning_rate: float


@dataclass(frozen=True, kw_only=True)
class CopyRow:
    """The results of one mechanism. `state_bytes` is for one sequence at its end, in float32."""

    task: str
    reduced: bool
    name: Annotated[str, Shown("attention")]
    attention: str
    attention_options: Mapping[str, object]
    device: str
    parameters: int
    state_bytes: Annotated[int, Shown("state", format_bytes)]
    updates: Annotated[int, Shown("updates", ",")] = 0
    loss: Annotated[float | None, Shown("loss, nats per symbol", ".4f")] = None
    accuracy: Annotated[float | None, Shown("accuracy", ".1%")] = None
    seconds_per_update: Annotated[float | None, Shown("time per update", format_milliseconds)] = None
    failed: Annotated[str | None, Shown("failed")]
    points: tuple[CopyPoint, ...]


@dataclass(frozen=True, kw_only=True)
class CopyReport(Report):
    rows: tuple[CopyRow, ...]
    ended: CopyEnding
    settings: Mapping[str, Any]

    def show(self, style: TableStyle) -> Output:
        if style == "csv":
            points = [{**vars(row), **vars(point)} for row in self.rows for point in row.points]
            tables = [RecordTable(points, _POINT_COLUMNS)]
        else:
            losses = _tabulate_losses(self.rows)
            tables = [RecordTable(self.rows, choose_columns(self.rows, list_columns(CopyRow)))]
            tables += [losses] if len(losses.records) > 1 else []
        title = self.settings["task"]
        done = f"{self.settings['updates']:,} of {self.settings['updates_wanted']:,} updates"
        ended = [] if self.ended == "finished" else [f"{done}: {_ENDINGS[self.ended]}"]
        return Output(
            tables,
            {"plot": partial(_render_curves, self.rows, title)} if any(row.points for row in self.rows) else {},
            title,
            remarks=ended,
            stopped=f"Stopped after {done}; their results are shown",
            failure="every model failed; the table says why" if self.ended == "failed" else None,
        )


class _Update(NamedTuple):
    loss: float
    accuracy: float
    seconds: float


class CopyRun:
    """The training of one mechanism. `failed` says why it ended early."""

    def __init__(self, variant: Variant, settings: CopySettings) -> None:
        self.variant = variant
        self.failed: str | None = None
        self._settings = settings
        self.trainer = Trainer(CopyTask(variant, settings))
        self._steps = self.trainer.steps()
        self.updates: list[_Update] = []

    def time_update(self) -> _Update | str:
        """Train on one batch and time it, without recording it. If this fails, return the reason."""
        found: list[tuple[float, float]] = []
        try:
            seconds = time_work(lambda: found.append(self.update()), self._settings.device)
        except TrainingError as error:
            return str(error)
        return _Update(*found[0], seconds)

    def update(self) -> tuple[float, float]:
        """Train on one batch. Return loss and accuracy before the update."""
        return next(self._steps).nats, float(self.trainer.task.accuracy)

    def point(self, update: int) -> CopyPoint:
        rate = self._settings.learning_rate_at(update - 1)
        losses, accuracies, _ = zip(*self.updates[max(0, update - self._settings.points_every) : update], strict=True)
        return CopyPoint(update, statistics.fmean(losses), statistics.fmean(accuracies), rate)

    def row(self) -> CopyRow:
        """Return all points so far. Unless the model has failed, the last point is at the last update."""
        done, every = len(self.updates), self._settings.points_every
        places = list(range(every, done + 1, every))
        if self.failed is None and done % every:
            places.append(done)
        points, figures = tuple(self.point(place) for place in places), dict[str, Any]()
        if points:
            figures = {"updates": points[-1].update, "loss": points[-1].loss, "accuracy": points[-1].accuracy}
        model = self.trainer.task.model
        if self.failed is None and done:
            figures["seconds_per_update"] = statistics.fmean(one.seconds for one in self.updates)
        return CopyRow(
            task=self._settings.title,
            reduced=self._settings.reduced,
            **self.variant.described,
            device=self._settings.device,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            state_bytes=model.state_bytes,
            failed=self.failed,
            points=points,
            **figures,
        )


def run_copy_task(
    variants: Sequence[Variant],
    settings: CopySettings,
    budget_seconds: float | None = None,
    stop: StopRequest | None = None,
    report: Callable[[int, dict[str, CopyPoint]], None] = lambda update, points: None,
) -> CopyReport:
    """Train one model per variant on the same sequences, one update each in turn.

    It ends after all updates, after `budget_seconds`, or when `stop` is set. An update counts only if all models that
    have not failed finished it, so curves are comparable wherever they end. `report` receives new points. Raises
    `UsageError` for sizes that a mechanism does not support, and `DisagreementError` if its forms disagree.
    """
    began = time.monotonic()
    stop = stop or StopRequest()
    for variant in variants:
        setup = PassSetup(variant, settings.heads, settings.width // settings.heads, settings.length)
        require_agreement(build_checked_model(setup))
    runs = [CopyRun(variant, settings) for variant in variants]

    def is_over() -> bool:
        late = budget_seconds is not None and time.monotonic() - began >= budget_seconds
        return late or stop.signal_number is not None

    def report_points(update: int) -> None:
        report(update, {one.variant.label: one.point(update) for one in runs if one.failed is None})

    done = 0
    while done < settings.updates and not is_over() and _measure_round(runs, done, is_over):
        done += 1
        if done % settings.points_every == 0:
            report_points(done)
    if done % settings.points_every:
        report_points(done)
    ended: CopyEnding = "finished"
    if done < settings.updates:
        failed = all(run.failed is not None for run in runs)
        ended = "interrupted" if stop.signal_number is not None else "failed" if failed else "budget"
    conditions = {
        **asdict(settings),
        "task": settings.title,
        "reduced": settings.reduced,
        "symbols": settings.symbols,
        "layers": settings.layers,
        "heads": settings.heads,
        "short_convolution": settings.short_convolution,
        "batch": BATCH,
        "optimizer": "radam",
        "updates_wanted": settings.updates,
        "updates": done,
        "budget_seconds": budget_seconds,
        "precision": "fp32",
    }
    return CopyReport(rows=tuple(run.row() for run in runs), ended=ended, settings=conditions)


def _measure_round(runs: Sequence[CopyRun], number: int, is_over: Callable[[], bool]) -> bool:
    """Update every model that has not failed. Return False if all have, or if time runs out, which drops the round."""
    learning = [run for run in runs if run.failed is None]
    learning[0].trainer.task.load_batch(number, range(BATCH))  # drawn here, so that no update includes the time
    updates: list[_Update | str] = []
    for run in learning:
        if updates and is_over():
            return False
        updates.append(run.time_update())
    for run, update in zip(learning, updates, strict=True):
        if isinstance(update, str):
            run.failed = update
        else:
            run.updates.append(update)
    return any(run.failed is None for run in learning)


def _tabulate_losses(rows: Sequence[CopyRow]) -> RecordTable:
    losses = {row.name: {point.update: point.loss for point in row.points} for row in rows if row.points}
    updates = sorted({update for points in losses.values() for update in points}, reverse=True)
    shown = sorted(updates[:: max(1, -(-len(updates) // _SHOWN_POINTS))])
    records = [{"update": one, **{name: points.get(one) for name, points in losses.items()}} for one in shown]
    names = [Column(row.name, row.name, format=".4f") for row in rows]
    return RecordTable(records, [Column("update", "loss at update", format=","), *names])


_POINT_COLUMNS = (
    *list_columns(CopyRow, "task reduced name attention device"),
    *list_columns(CopyPoint, "update loss accuracy learning_rate"),
)


def _render_curves(rows: Sequence[CopyRow], title: str, kind: PlotFormat) -> bytes:
    """Plot loss and accuracy against updates, with one colour for each mechanism."""

    def build_panel(key: str, label: str, scale: Scale) -> Panel:
        curves = [Curve(row.name, [(point.update, getattr(point, key)) for point in row.points]) for row in rows]
        return Panel("", curves, y_label=label, x_scale="linear", y_scale=scale)

    losses = build_panel("loss", "loss (nats per predicted symbol)", "log")
    accuracies = build_panel("accuracy", "accuracy (share)", "linear")
    return render_plot([losses, accuracies], "updates", "", kind, title=title)
