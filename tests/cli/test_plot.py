"""Tests of `lintx plot` from run folders to plots, images of sample grids, and JSON."""

import csv
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from commands import run_command
from loops import first_fast
from PIL import Image

from linformer_cli.metrics import COLUMNS
from linformer_cli.report.grids import read_png_metadata


@pytest.fixture
def logged_run(run_folder, tmp_path):
    """A copy of the finished run with an added training row; the run itself is too short to have one."""
    folder = tmp_path / "logged"
    shutil.copytree(run_folder, folder)
    with open(folder / "metrics.csv", "a", encoding="utf-8") as file:
        file.write("20,80,0.001,5.5,1.0,,,2.25,80.0,1000\n")
    return folder


@pytest.mark.smoke
def test_several_runs_share_one_plot(lintx, run_folder, logged_run, tmp_path):
    out, samples = tmp_path / "deep" / "curves.svg", tmp_path / "samples.png"
    outcome = lintx("plot", run_folder, logged_run, "-o", out, "--samples", samples, "--json")
    assert outcome.code == 0, outcome.stderr
    assert f"wrote {out}" in outcome.stderr and f"wrote {samples}" in outcome.stderr
    text = out.read_text()
    for label in ("tiny, validation", "logged, validation", "logged, training"):
        assert f"<!-- {label} -->" in text
    assert read_png_metadata(samples)["runs"] == [str(run_folder), str(logged_run)]
    document = outcome.document
    assert (document["plot"], document["samples"]) == (str(out), str(samples))
    tiny, logged = document["rows"]
    assert (tiny["label"], tiny["run"], tiny["training"]) == ("tiny", str(run_folder), [])
    with open(run_folder / "metrics.csv", encoding="utf-8") as file:
        last = list(csv.DictReader(file))[-1]
    assert tiny["validation"][-1]["bits_per_dim"] == float(last["validation_bits_per_dim"])
    assert tiny["validation"][-1]["standard_error"] == float(last["validation_standard_error"])
    (point,) = logged["training"]
    assert point == {"step": 20, "images": 80, "elapsed_seconds": 2.25, "bits_per_dim": 5.5, "learning_rate": 0.001}


def test_runs_on_bytes_are_plotted_in_bits_per_byte(lintx, logged_run, tmp_path):
    text, out = tmp_path / "text", tmp_path / "curves.svg"
    shutil.copytree(logged_run, text)
    (text / "config.toml").write_text('[data]\nname = "bytes:book.txt"\n')
    assert lintx("plot", text, "-o", out).code == 0
    assert out.read_text().count("<!-- bits/byte -->") == out.read_text().count("<!-- training windows seen -->") == 2
    outcome = lintx("plot", logged_run, text, "-o", out)
    assert outcome.code == 2 and "bits/dim" in outcome.stderr and "plot them separately" in outcome.stderr
    (text / "config.toml").write_text("data = 3\n")
    assert lintx("plot", logged_run, text, "-o", out).code == 0


def test_only_requested_files_are_written(lintx, run_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert lintx("plot", run_folder, "--json").code == 0
    assert lintx("plot", run_folder, "--samples", "samples.png").code == 0
    assert not (tmp_path / "plot.png").exists() and (tmp_path / "samples.png").exists()
    assert lintx("plot", run_folder).code == 0
    with Image.open(tmp_path / "plot.png") as picture:
        assert picture.format == "PNG" and picture.height > 900


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["nowhere"], 2, "'nowhere' is not a run: it has no metrics.csv"),
        (["empty"], 1, "has not logged anything yet"),
        (["nowhere", "--samples", "s.png"], 1, "'nowhere' has no grids"),
        (["empty", "-o", "x.pdf"], 2, ".png or .svg"),
        (["empty", "--samples", "x.svg"], 2, "ends in .png"),
        (["empty", "empty"], 2, "named twice"),
        ([], 2, "Missing argument"),
        (["empty", "--watch"], 2, "stdout is not one"),
        (["empty", "--watch", "--json"], 2, "drop --out, --samples and --json"),
    ],
)
def test_mistakes_give_a_one_line_error(lintx, tmp_path, monkeypatch, arguments, code, part):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.csv").write_text("step,images\n")
    outcome = lintx("plot", *arguments)
    assert (outcome.code, outcome.stdout) == (code, "")
    assert part in outcome.stderr and len(outcome.stderr.splitlines()) == 1
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
@pytest.mark.parametrize("option", first_fast(["-o", "--samples"]))
def test_a_pipe_without_a_reader_does_not_hang(run_folder, tmp_path, option):
    """The command runs in a separate process, because a hanging open() cannot be interrupted in this process."""
    pipe = tmp_path / "plot.png"
    os.mkfifo(pipe)
    code, _, errors = run_command("plot", run_folder, option, pipe)
    assert code == 1 and "nothing reads from this pipe" in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_a_named_pipe_among_the_grids_is_skipped(lintx, run_folder, tmp_path):
    run = shutil.copytree(run_folder, tmp_path / "run")
    os.mkfifo(run / "samples" / "step-0000099.png")
    assert lintx("plot", run, "--samples", tmp_path / "samples.png").code == 0


def test_a_watched_run_is_drawn_again_until_ctrl_c(lintx, tmp_path, monkeypatch):
    log = tmp_path / "metrics.csv"
    log.write_text(",".join(COLUMNS) + "\n")
    rows = ["8,32,0.001,4.0,1.0,,,2.25,80.0,1000\n", None]

    def sleep(seconds):
        if (row := rows.pop(0)) is None:
            raise KeyboardInterrupt
        log.write_text(log.read_text() + row)

    monkeypatch.setattr("linformer_cli.cli.plot.time", SimpleNamespace(sleep=sleep))
    monkeypatch.setenv("FORCE_COLOR", "1")
    outcome = lintx("plot", tmp_path, "--watch")
    assert outcome.code == 130 and outcome.stderr.splitlines() == ["Stopped"]
    first, second = outcome.stdout.index("has not logged anything yet"), outcome.stdout.index("step 8, 2.2 s")
    assert first < second and "4.000" in outcome.stdout


def test_plotting_needs_no_torch(run_folder, tmp_path):
    script = (
        "import sys; from linformer_cli.cli.app import app; "
        f"app(['plot', {str(run_folder)!r}, '-o', {str(tmp_path / 'p.png')!r}], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
