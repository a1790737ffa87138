"""Tests of plots of runs, and of rows of their sample grids."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageColor

from linformer_cli.errors import DataError, UsageError
from linformer_cli.metrics import RunSeries, TrainingPoint, ValidationPoint
from linformer_cli.report.grids import CAPTION_HEIGHT
from linformer_cli.report.plots import PALETTE
from linformer_cli.report.runs import find_grids, render_runs, render_strips


def series(label: str, seconds: float = 60.0, count: int = 30) -> RunSeries:
    training = [TrainingPoint(n, 16 * n, seconds * n / count, 8 / n + 1, 1e-3 / n) for n in range(1, count + 1)]
    validation = [ValidationPoint(n, 16 * n, seconds * n / count, 7 / n + 1, 0.2) for n in range(1, count + 1, 10)]
    return RunSeries(label, Path(label), training, validation)


@pytest.mark.slow
def test_all_panels_have_labels_and_every_run_has_its_own_colour() -> None:
    text = render_runs([series("first"), series("second")], "svg").decode()
    labels = [f"{run}, {kind}" for run in ("first", "second") for kind in ("validation", "training")]
    for words in labels:
        assert text.count(f"<!-- {words} -->") == 1
    for words in ("bits/dim", "learning rate", "training images seen", "time of training (s)"):
        assert text.count(f"<!-- {words} -->") == 2
    picture = Image.open(io.BytesIO(render_runs([series("first"), series("second")], "png"))).convert("RGB")
    found = {colour for _, colour in picture.getcolors(maxcolors=2**24)}  # type: ignore[union-attr]
    assert {ImageColor.getrgb(colour) in found for colour in PALETTE[:2]} == {True}
    assert ImageColor.getrgb(PALETTE[2]) not in found


@pytest.mark.parametrize(("seconds", "unit"), [(100, "s"), (3_000, "min"), (20_000, "h")])
def test_the_unit_of_time_depends_on_the_longest_run(seconds, unit) -> None:
    text = render_runs([series("short", 1.0), series("long", seconds)], "svg").decode()
    assert f"<!-- time of training ({unit}) -->" in text


def test_at_most_as_many_runs_as_colours_are_plotted(raises_one_line) -> None:
    begun = RunSeries("begun", Path("begun"), [], [ValidationPoint(0, 0, 0.0, 8.0, 0.1)])
    assert b"begun, validation" in render_runs([begun], "svg")  # a single point
    with raises_one_line(UsageError, "7 runs, found 8"):
        render_runs([series(str(number)) for number in range(8)], "png")


def write_grids(run: Path, steps: range, size: tuple[int, int] = (30, 20), mode: str = "L") -> Path:
    (run / "samples").mkdir(parents=True)
    for step in steps:
        tone = step % 200 + 1
        Image.new(mode, size, tone if mode == "L" else (tone, 0, 0)).save(run / "samples" / f"step-{step:07d}.png")
    return run


def test_the_chosen_grids_are_evenly_spaced_and_include_the_last(tmp_path) -> None:
    run = write_grids(tmp_path / "run", range(100, 1100, 100))
    (run / "samples" / "mine.png").write_bytes(b"")
    assert list(find_grids(run, 20)) == list(range(100, 1100, 100))
    assert list(find_grids(run, 4)) == [100, 400, 700, 1000]
    assert list(find_grids(run, 2)) == [100, 1000]
    assert list(find_grids(run, 1)) == [1000]


def test_a_row_shows_the_grids_of_a_run_in_order(tmp_path) -> None:
    runs = [write_grids(tmp_path / "first", range(10, 40, 10), (90, 50)), write_grids(tmp_path / "second", range(7, 8))]
    strip = np.asarray(render_strips(runs, 8))
    middle = strip[2 * CAPTION_HEIGHT + 25]
    assert [tone for tone in dict.fromkeys(middle.tolist()) if tone in (11, 21, 31)] == [11, 21, 31]
    assert 8 in strip and strip.ndim == 2
    coloured = write_grids(tmp_path / "coloured", range(5, 6), mode="RGB")
    assert render_strips([*runs, coloured], 8).mode == "RGB"
    wide = render_strips([write_grids(tmp_path / "wide", range(8), (600, 600))], 8)
    assert 2000 < wide.width < 2600 and 250 < wide.height < 400


@pytest.mark.parametrize("data", [b"", b"no picture", "cut"])
def test_a_damaged_grid_gives_a_one_line_error(tmp_path, data, raises_one_line) -> None:
    run = write_grids(tmp_path / "run", range(3))
    file = run / "samples" / "step-0000001.png"
    file.write_bytes(file.read_bytes()[:-30] if data == "cut" else data)
    with raises_one_line(DataError, "step-0000001.png"):
        render_strips([run], 8)
    with raises_one_line(DataError, "has no grids in samples/", "--sample-every"):
        render_strips([tmp_path], 8)
