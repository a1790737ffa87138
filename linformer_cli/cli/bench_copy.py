"""`lintx bench copy`: how fast models with different attentions learn to copy a string."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from linformer_cli.config import LARGEST_SIZE

from . import options
from .config_options import count, option, several, with_fields
from .output import info, print_json, print_records, print_tables, write_plot

if TYPE_CHECKING:
    from linformer_cli.bench.copy import CopyPoint

# This is 16 times the paper's width.
_LARGEST_WIDTH = 4_096
_TALK_SECONDS = 10.0
_ENDINGS = {"budget": "the budget was spent", "interrupted": "interrupted", "failed": "every model failed"}


@dataclass(frozen=True, kw_only=True)
class CopyOptions:
    """The options of the command."""

    names: str = several(
        "softmax,linear,lsh:rounds=4",
        "Mechanisms, separated by commas, such as lsh, lsh:rounds=4, NAME=lsh:rounds=4 (tables show NAME) or lstm.",
        "--attention",
    )
    budget: str = option("10m", "Total time. If it is below 1h, the default length and width are smaller.")
    updates: int = count(10_000, "Number of updates of each model.")
    length: int | None = option(
        None, "Length of the sequences; default 128, or 32 if --budget is below 1h.", min=1, max=LARGEST_SIZE
    )
    width: int | None = option(
        None, "Width of the models; default 256, or 128 if --budget is below 1h.", min=1, max=_LARGEST_WIDTH
    )
    every: int = count(25, "Updates averaged per point of the curve.")
    seed: options.Seed = 0
    device: options.Device = "auto"
    plot: Path | None = option(None, "Write the curves to a .png or .svg file.")
    style: options.Style = "table"
    json: options.Json = False


@with_fields
def copy(asked: CopyOptions) -> None:
    """Measure how fast models learn to copy.

    Runs the copy task of Katharopoulos 2020, section 4.1: a string of random symbols from an alphabet of 10, a
    separator, and the string again. Loss and accuracy cover only the copied symbols. All models see the same sequences
    and make one update each in turn, so their curves are comparable wherever they end: after --updates, after --budget,
    or at Ctrl-C, which prints the results so far. A task smaller than the paper's is marked as reduced. A mechanism
    whose parallel and step forms disagree is not trained.

    Examples:

    - `lintx bench copy --plot copy.png`
    - `lintx bench copy --attention softmax,linear,lstm --budget 30m --json`
    """
    seconds = options.parse_duration(asked.budget)
    options.require_plots(asked.plot)

    from linformer_cli.bench import copy as bench
    from linformer_cli.bench.copy_task import CopySettings, choose_size
    from linformer_cli.bench.measure.ceilings import Ceilings
    from linformer_cli.errors import Interrupted, LintxError
    from linformer_cli.model.variants import parse_variants
    from linformer_cli.system.signals import catch_signals

    from .bench_output import choose_place, show_machine

    variants = parse_variants(asked.names.split(","), baselines=True)
    place = choose_place(asked.device)
    settings = CopySettings(
        *choose_size(seconds, asked.length, asked.width), asked.updates, asked.every, asked.seed, place
    )
    info(settings.title)
    with catch_signals() as stop:
        report = bench.run_copy_task(variants, settings, Ceilings(place), seconds, stop, _Reporter())
    has_points = any(row.points for row in report.rows)
    if asked.json:
        print_json({**vars(report), "plot": asked.plot if has_points else None})
    elif asked.style == "csv":
        print_records(bench.list_points(report.rows), bench.CSV_COLUMNS, "csv")
    else:
        print(f"{report.settings.task}\n")
        print_tables(asked.style, *bench.list_tables(report.rows))
    if has_points:
        write_plot(asked.plot, lambda kind: bench.render_copy(report.rows, report.settings.task, kind))
    done = f"{report.settings.updates:,} of {asked.updates:,} updates"
    if report.ended != "finished":
        info(f"{done}: {_ENDINGS[report.ended]}")
    show_machine(report.environment, report.ceilings)
    if report.ended == "failed":
        raise LintxError("every model failed; the table says why")
    if report.ended == "interrupted" and stop.signal_number is not None:
        raise Interrupted(f"Stopped after {done}; their results are shown", stop.signal_number)


class _Reporter:
    """Prints the newest losses: the first ones immediately, later ones every few seconds."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, update: int, points: "dict[str, CopyPoint]") -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _TALK_SECONDS
            losses = ", ".join(f"{name} {point.loss:.3f} ({point.accuracy:.0%})" for name, point in points.items())
            info(f"update {update:,}: {losses}")
