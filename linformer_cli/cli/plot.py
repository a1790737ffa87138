"""`lintx plot`: curves and sample grids of training runs."""

import contextlib
import time
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.live import Live
from rich.text import Text

from linformer_cli.config import choose_words
from linformer_cli.documents import read_toml
from linformer_cli.errors import DataError, UsageError
from linformer_cli.metrics import load_runs
from linformer_cli.units import Words
from . import options
from .config_options import argument, count, option, with_fields
from .output import print_json, write_plot, write_png

DEFAULT_PLOT = Path("plot.png")
_WATCH_SECONDS, _WATCH_ROWS = 2.0, 24


@with_fields
def plot(
    runs: list[Path] = argument("RUN", "Run folders."),
    out: Path | None = option(
        None,
        "Plot the curves (.png or .svg). Default: plot.png, unless --samples or --json is given.",
        "--out",
        "-o",
        metavar="FILE",
    ),
    samples: Path | None = option(
        None, "Write the sample grids of training to a .png file, one strip for each run.", metavar="FILE"
    ),
    grids: int | None = count(None, "Most grids in a strip; default 8."),
    watch: bool = option(False, "Draw the curves in the terminal until Ctrl-C.", "--watch"),
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Plot the curves of runs.

    Examples:

    - `lintx plot runs/first -o first.png`
    - `lintx plot runs/linear runs/softmax -o both.svg --samples samples.png`
    - `lintx plot runs/first --json`
    - `lintx plot runs/first --watch`

    Plots the bits/dim of training and validation and the learning rate, against images and against time. Runs that are
    still training can be plotted, too. --json prints the data of the curves.
    """
    from linformer_cli.report.runs import render_runs, render_strips

    if grids is not None and samples is None:
        raise UsageError("--grids needs --samples FILE")
    if watch:
        if out is not None or samples is not None or json:
            raise UsageError("--watch draws in the terminal; drop --out, --samples and --json")
        _watch(runs)
    if out is None and samples is None and not json:
        out = DEFAULT_PLOT
    options.require_plots(out)
    options.require_output("--samples", samples, ".png")
    options.require_distinct(out, samples)
    series = load_runs(runs) if out is not None or json else []
    write_plot(out, lambda kind: render_runs(series, kind, _find_words(runs)))
    if samples is not None:
        write_png(samples, render_strips(runs, grids or 8), {"runs": [str(run) for run in runs]})
    if json:
        print_json({"rows": series, "plot": out, "samples": samples})


def _watch(runs: list[Path]) -> NoReturn:
    from linformer_cli.report.terminal import render_curves

    console = Console()
    if not console.is_terminal:
        raise UsageError("--watch needs a terminal, and stdout is not one; write a file with -o")
    with Live(console=console, auto_refresh=False) as live:
        while True:
            try:
                height = min(_WATCH_ROWS, max(2, console.height - len(runs) - 2))
                shown = render_curves(load_runs(runs), console.width, height, _find_words(runs))
            except DataError as error:  # the run has not logged anything yet, or writes a row just now
                shown = Text(str(error))
            live.update(shown, refresh=True)
            time.sleep(_WATCH_SECONDS)


def _find_words(runs: list[Path]) -> Words:
    """Return the words for the data of `runs`. Raises `UsageError` if some runs are on images and others on bytes."""
    first, *others = [_read_words(run) for run in runs]
    for run, words in zip(runs[1:], others, strict=True):
        if words != first:
            raise UsageError(f"'{runs[0]}' is in {first.bits} and '{run}' in {words.bits}; plot them separately")
    return first


def _read_words(run: Path) -> Words:
    """Read the words for a run's data. A curve needs no settings, so a run whose settings are lost has images."""
    data: object = None
    with contextlib.suppress(OSError, ValueError):
        data = read_toml(run / "config.toml").get("data")
    return choose_words(str(data.get("name")) if isinstance(data, dict) else "")
