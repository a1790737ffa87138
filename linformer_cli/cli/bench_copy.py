"""`lintx bench copy` and `lintx bench recall`: how well models with different attentions repeat what they read."""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from linformer_cli.config import LARGEST_SIZE
from linformer_cli.system.signals import StopRequest
from . import options
from .config_options import count, duration, option, several, with_fields
from .output import info
from .reports import choose_place, run_and_show

if TYPE_CHECKING:
    from linformer_cli.bench.copy import CopyPoint, CopyReport
    from linformer_cli.bench.sequence_tasks import CopySettings

# This is 16 times the paper's width.
_LARGEST_WIDTH = 4_096
_TALK_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class LearningOptions:
    seed: options.Seed = 0
    device: options.Device = "auto"
    plot: Path | None = option(None, "Plot the curves (.png or .svg).")
    style: options.Style = "table"
    json: options.Json = False


@with_fields
def copy(
    names: str = several(
        "softmax,linear,lsh:rounds=4",
        "Mechanisms, such as linear,lsh:rounds=4 or NAME=lsh:rounds=4 (tables show NAME), or lstm.",
        "--attention",
    ),
    budget: float = duration("10m", "Total time. If it is below 1h, the default length and width are smaller."),
    updates: int = count(10_000, "Number of updates of each model."),
    length: int | None = option(
        None, "Length of the sequences; default 128, or 32 if --budget is below 1h.", min=1, max=LARGEST_SIZE
    ),
    width: int | None = option(
        None, "Width of the models; default 256, or 128 if --budget is below 1h.", min=1, max=_LARGEST_WIDTH
    ),
    every: int = count(25, "Updates averaged per point of the curve."),
    *,
    shown: LearningOptions,
) -> None:
    """Measure how fast models learn to copy.

    Examples:

    - `lintx bench copy --plot copy.png`
    - `lintx bench copy --attention softmax,linear,lstm --budget 30m --json`

    Runs the copy task of Katharopoulos 2020, section 4.1: random symbols, a separator, and the same symbols again. All
    models see the same sequences and make one update each in turn. A task smaller than the paper's is marked as
    reduced. Ctrl-C prints the results so far.
    """
    options.require_plots(shown.plot)

    from linformer_cli.bench.sequence_tasks import CopySettings, choose_size

    sizes = choose_size(budget, length, width)
    _learn(names, CopySettings(*sizes, updates, every, shown.seed, choose_place(shown.device)), budget, shown)


@with_fields
def recall(
    names: str = several(
        "softmax,linear,deltanet,gdn2,mamba,lstm", "Mechanisms, as for lintx bench copy.", "--attention"
    ),
    pairs: int = count(8, "Keys and values to remember, at most a quarter of --length."),
    length: int = option(64, "Length of the sequences.", min=1, max=LARGEST_SIZE),
    width: int = option(32, "Width of the models, which sets the size of their states.", min=1, max=_LARGEST_WIDTH),
    updates: int = count(2_000, "Number of updates of each model."),
    learning_rate: float = option(1e-2, "Peak learning rate.", min=1e-9, max=1.0),
    every: int = count(50, "Updates averaged per point of the curve, and for the accuracy in the table."),
    *,
    shown: LearningOptions,
) -> None:
    """Measure how much models recall.

    Examples:

    - `lintx bench recall`
    - `lintx bench recall --pairs 16 --width 64 --plot recall.png`

    Runs multi-query associative recall (Arora 2023, Zoology): a sequence names values by keys, and later asks for the
    value of every key. The table shows the share of values that a model recalls beside the bytes of its state. Ctrl-C
    prints the results so far.
    """
    options.require_plots(shown.plot)

    from linformer_cli.bench.sequence_tasks import RecallSettings

    sizes = length, width, updates, every, shown.seed, choose_place(shown.device), pairs, learning_rate
    _learn(names, RecallSettings(*sizes), None, shown)


def _learn(names: str, settings: "CopySettings", budget: float | None, shown: LearningOptions) -> None:
    from linformer_cli.bench.copy import run_copy_task

    variants = options.choose_variants(names, baselines=True)
    info(settings.title)
    last = -math.inf

    def report(update: int, points: "dict[str, CopyPoint]") -> None:
        """Print the newest losses: the first ones immediately, later ones every few seconds."""
        nonlocal last
        if time.monotonic() >= last + _TALK_SECONDS:
            last = time.monotonic()
            losses = ", ".join(f"{name} {point.loss:.3f} ({point.accuracy:.0%})" for name, point in points.items())
            info(f"update {update:,}: {losses}")

    def run(stop: StopRequest) -> "CopyReport":
        return run_copy_task(variants, settings, budget, stop, report)

    run_and_show(shown.style, shown.json, run, {"plot": shown.plot})
