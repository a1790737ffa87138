"""Plots of training runs, and strips of the sample grids that were drawn during training."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image

from linformer_cli.errors import DataError, UsageError
from linformer_cli.metrics import RunSeries, TrainingPoint, ValidationPoint, label_runs
from linformer_cli.units import IMAGES, Words
from .grids import read_png, render_captioned_row, render_title, stack_rows
from .plots import PALETTE, Curve, Panel, PlotFormat, render_plot, with_error

_Place = Callable[[TrainingPoint | ValidationPoint], float]

_VALIDATION_DASH, _TRAINING_DASH = 0, 2
# For each unit of time: the longest time shown in it, in seconds; its name; and its length in seconds.
_TIME_UNITS = ((180.0, "s", 1.0), (3 * 3600.0, "min", 60.0), (float("inf"), "h", 3600.0))
_SAMPLES = "samples"
_STEP = re.compile(r"step-(\d+)\.png")
_WIDEST_STRIP = 2400  # pixels
_STRIP_GAP = 6


def render_runs(series: Sequence[RunSeries], kind: PlotFormat, words: Words = IMAGES) -> bytes:
    """Plot bits/dim, with standard errors, and the learning rate against images seen and against time."""
    if len(series) > len(PALETTE):
        raise UsageError(f"a plot can show at most {len(PALETTE)} runs, found {len(series)}; name fewer")
    longest = max(point.elapsed_seconds for run in series for part in (run.training, run.validation) for point in part)
    unit, seconds = next((unit, seconds) for limit, unit, seconds in _TIME_UNITS if longest <= limit)
    places: tuple[tuple[str, _Place], ...] = (
        (f"training {words.items} seen", lambda point: point.images),
        (f"time of training ({unit})", lambda point: point.elapsed_seconds / seconds),
    )
    panels = []
    for label, place in places:
        curves = []
        for colour, run in enumerate(series):
            validated = [with_error(place(one), one.bits_per_dim, one.standard_error) for one in run.validation]
            trained = [(place(point), point.bits_per_dim) for point in run.training]
            curves.append(Curve(f"{run.label}, validation", validated, (colour, _VALIDATION_DASH)))
            curves.append(Curve(f"{run.label}, training", trained, (colour, _TRAINING_DASH)))
        panels.append(Panel("", curves, label, words.bits, x_scale="linear"))
    for label, place in places:
        curves = [
            Curve(
                f"{run.label}, training",
                [(place(point), point.learning_rate) for point in run.training],
                (colour, _TRAINING_DASH),
            )
            for colour, run in enumerate(series)
        ]
        panels.append(Panel("", curves, label, "learning rate", x_scale="linear", y_scale="linear"))
    return render_plot(panels, "", "", kind, columns=len(places))


def find_grids(run: Path, most: int) -> dict[int, Path]:
    """At most `most` sample grids of a run by step, evenly spaced with both ends. Raises `DataError` without any."""
    pictures = (path for path in (run / _SAMPLES).glob("*.png") if path.is_file())  # opening a pipe would block
    found = {int(match[1]): path for path in pictures if (match := _STEP.fullmatch(path.name))}
    if not found:
        raise DataError(f"'{run}' has no grids in {_SAMPLES}/; lintx train writes one every --sample-every steps")
    steps = sorted(found)
    if len(steps) > most:
        last = len(steps) - 1
        steps = [steps[last - round(index * last / max(1, most - 1))] for index in reversed(range(most))]
    return {step: found[step] for step in steps}


def render_strips(runs: Sequence[Path], most: int) -> Image.Image:
    """Draw a strip for each run, with its name above its sample grids in order of their steps.

    Raises `DataError` if a run has no grids or one cannot be read, and `UsageError` if a run is named twice.
    """
    rows = []
    for run, label in zip(runs, label_runs(runs), strict=True):
        grids = find_grids(run, most)
        pictures = [grid.convert("L" if grid.mode == "L" else "RGB") for grid in map(read_png, grids.values())]
        smaller = -(-sum(picture.width for picture in pictures) // _WIDEST_STRIP)
        captions = [f"step {step:,}" for step in grids]
        small = [picture.reduce(smaller) for picture in pictures]
        rows += [render_title(label), render_captioned_row(small, captions, _STRIP_GAP)]
    return stack_rows(rows, gap=_STRIP_GAP)
