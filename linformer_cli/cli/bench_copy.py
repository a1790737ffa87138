"""`lintx bench copy`: how fast models with different attentions learn to copy a string."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linformer_cli.report.benchmarks import COPY_COLUMNS, render_copy
from linformer_cli.report.tables import Column, TableStyle

from . import options
from .output import print_json, print_records, talk, write_plot

if TYPE_CHECKING:
    from linformer_cli.bench.copy_task import CopyPoint, CopyReport

_TALK_SECONDS = 10.0
_SHOWN_POINTS = 10
_ENDINGS = {"budget": "the budget was spent", "interrupted": "it was stopped", "failed": "every model failed"}

_FAILED = Column("failed", "failed")
_CSV_COLUMNS = tuple(
    Column(key, key)
    for key in ("task", "reduced", "name", "attention", "device", "update", "loss", "accuracy", "learning_rate")
)


def copy(
    names: Annotated[
        str,
        typer.Option(
            "--attention",
            help="Mechanisms, separated by commas, lstm too. With options: lsh:rounds=4, or NAME=lsh:rounds=4.",
            metavar="LIST",
        ),
    ] = "softmax,linear,lsh:rounds=4",
    budget: Annotated[
        str, typer.Option("--budget", help="Time for all of it. Below 1h the task is smaller: length 32, width 128.")
    ] = "10m",
    updates: Annotated[int, typer.Option("--updates", min=1, help="The most updates of each model.")] = 10_000,
    length: Annotated[
        int | None, typer.Option("--length", min=1, help="Of a sequence; default 128, or 32.", show_default=False)
    ] = None,
    width: Annotated[
        int | None, typer.Option("--width", min=1, help="Of the models; default 256, or 128.", show_default=False)
    ] = None,
    every: Annotated[int, typer.Option("--every", min=1, help="Updates that a point of the curve averages.")] = 25,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Also the curves: .png or .svg.", show_default=False)
    ] = None,
    style: options.Style = options.TableFormat.TABLE,
    json: options.Json = False,
) -> None:
    """Measure how fast models learn to copy.

    The copy task of Katharopoulos 2020, section 4.1: a string of random symbols (10 of them), a separator, and the
    string again; 4 layers, 8 heads, batches of 64 new sequences, RAdam with a learning rate of 1e-3, and of 1e-4 after
    3,000 updates. Loss and accuracy are those of the copied symbols. A string has a random length, from a quarter of
    the sequence to nearly half of it.

    All models see the same sequences and take turns of one update, so that their curves are comparable wherever they
    end: after --updates, after --budget, or at Ctrl-C, which prints what was measured. A task smaller than the paper's
    is labelled as reduced everywhere. Nothing is trained whose parallel and step form disagree.

    Examples:

    - `lintx bench copy --plot copy.png`
    - `lintx bench copy --attention softmax,linear,lstm --budget 30m --json`
    - `lintx bench copy --budget 24h --device cuda`
    """
    seconds = options.parse_duration(budget)
    options.require_plots(plot)

    from linformer_cli.bench.ceilings import Ceilings
    from linformer_cli.bench.copy_task import CopySettings, choose_size, run_copy_task
    from linformer_cli.bench.variants import parse_variants
    from linformer_cli.errors import Interrupted, LintxError
    from linformer_cli.system.device import choose_device
    from linformer_cli.system.signals import catch_signals

    variants = parse_variants(names.split(","), baselines=True)
    place = choose_device(device)
    settings = CopySettings(*choose_size(seconds, length, width), updates, every, seed, place.value)
    talk(f"{settings.title}; device {place.value} ({place.reason})")
    with catch_signals() as stop:
        report = run_copy_task(variants, settings, seconds, stop, _Reporter(), Ceilings(place.value))
    has_points = any(row["points"] for row in report.rows)
    if json:
        print_json({**vars(report), "plot": plot if has_points else None})
    else:
        _print(report, style)
    if has_points:
        rows = [{**row, "points": [vars(point) for point in row["points"]]} for row in report.rows]
        write_plot(plot, lambda kind: render_copy(rows, report.settings["task"], kind))
    done = f"{report.settings['updates']:,} of {updates:,} updates"
    if report.ended != "finished":
        talk(f"{done}: {_ENDINGS[report.ended]}")
    options.talk_about(report.environment, report.ceilings)
    if report.ended == "failed":
        raise LintxError("every model failed; the table says why")
    if report.ended == "interrupted" and stop.signal_number is not None:
        raise Interrupted(f"Stopped after {done}, which are kept", stop.signal_number)


class _Reporter:
    """A long job says what it has, the first time at once."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, update: int, points: "dict[str, CopyPoint]") -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _TALK_SECONDS
            losses = ", ".join(f"{name} {point.loss:.3f} ({point.accuracy:.0%})" for name, point in points.items())
            talk(f"update {update:,}: {losses}")


def _print(report: "CopyReport", style: options.TableFormat) -> None:
    if style is options.TableFormat.CSV:
        rows = [{**row, **vars(point)} for row in report.rows for point in row["points"]]
        print_records(rows, _CSV_COLUMNS, "csv")
        return
    print(f"{report.settings['task']}\n")
    columns = (*COPY_COLUMNS, _FAILED) if any(row["failed"] for row in report.rows) else COPY_COLUMNS
    shape: TableStyle = "md" if style is options.TableFormat.MD else "table"
    print_records(report.rows, columns, shape)
    curve = _tabulate(report)
    if len(curve) > 1:
        print()
        names = (Column(row["name"], row["name"], format=".4f") for row in report.rows)
        print_records(curve, (Column("update", "loss at update", format=","), *names), shape)


def _tabulate(report: "CopyReport") -> list[dict[str, Any]]:
    """The losses beside each other, at the last of the updates and at some that lie evenly before it."""
    losses = {
        row["name"]: {point.update: point.loss for point in row["points"]} for row in report.rows if row["points"]
    }
    updates = sorted({update for points in losses.values() for update in points}, reverse=True)
    shown = sorted(updates[:: max(1, -(-len(updates) // _SHOWN_POINTS))])
    return [{"update": update, **{name: points.get(update) for name, points in losses.items()}} for update in shown]
