"""Tests of conventions for command-line tools: --quiet, pipes, signals, narrow terminals, resuming elsewhere."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Command
from loops import first_fast
from PIL import Image

from linformer_cli.checkpoint import TrainingState, load_training_state, read_checkpoint, save_checkpoint
from linformer_cli.checkpoint import load_model as load
from linformer_cli.sampling.decode import SampledBatch, Sampler


@pytest.mark.parametrize("flag", ["--quiet", "-q"])
def test_quiet_prints_only_errors(lintx, run_folder, tmp_path, flag) -> None:
    outcome = lintx("sample", run_folder, "-n", 1, "-o", tmp_path / "x.png", flag)
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, "", "")
    assert (tmp_path / "x.png").exists()
    options = ["--data", "glyphs", "--image-size", "10", "--preset", "tiny", "--batch", "4", "--steps", "2"]
    outcome = lintx("train", *options, "--out", tmp_path / "run", flag)
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, "", "")
    outcome = lintx("complete", tmp_path / "missing.png", tmp_path / "x.png", "--checkpoint", run_folder, "-n", 1, flag,
                    "-o", tmp_path / "c.png")  # fmt: skip
    assert outcome.code == 1
    assert [line[:7] for line in outcome.stderr.splitlines()] == ["Error: ", "Error: "]
    # The next command in the same process prints messages again.
    assert "wrote" in lintx("sample", run_folder, "-n", 1, "-o", tmp_path / "x.png").stderr


def test_the_last_frame_of_a_gif_is_the_grid(lintx, run_folder, tmp_path) -> None:
    lintx("sample", run_folder, "-n", 3, "-o", tmp_path / "x.png", "--gif", tmp_path / "x.gif", "--seed", 8,
          "--columns", 1, "--scale", 3)  # fmt: skip
    with Image.open(tmp_path / "x.gif") as gif, Image.open(tmp_path / "x.png") as grid:
        assert gif.n_frames == 11
        assert json.loads(gif.info["comment"]) == json.loads(grid.text["lintx"])  # type: ignore[attr-defined]
        gif.seek(10)
        assert gif.convert("L").tobytes() == grid.tobytes()
    shutil.copy(tmp_path / "x.png", tmp_path / "mine.png")
    lintx("complete", tmp_path / "mine.png", "--checkpoint", run_folder, "--keep", "top:4rows", "-n", 2,
          "-o", tmp_path / "c.png", "--gif", tmp_path / "c.gif")  # fmt: skip
    with Image.open(tmp_path / "c.gif") as gif, Image.open(tmp_path / "c.png") as grid:
        assert gif.n_frames == 7
        assert json.loads(gif.info["comment"]) == json.loads(grid.text["lintx"])  # type: ignore[attr-defined]
        gif.seek(6)
        assert gif.convert("L").tobytes() == grid.tobytes()


@pytest.mark.parametrize(("number", "code"), first_fast([(signal.SIGINT, 130), (signal.SIGTERM, 143)]))
def test_interrupted_sampling_keeps_finished_images(run_folder, tmp_path, number, code) -> None:
    options = ("-n", 100_000, "--batch", 2, "-o", tmp_path / "grid.png", "--files", tmp_path / "files")
    with Command("sample", run_folder, *options, "--quiet") as command:  # errors are still printed
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("files/*.png"))) < 4:
            assert time.monotonic() < deadline and command.process.is_alive()
            time.sleep(0.02)
        command.send_signal(number)
        found, _, errors = command.finish()
    assert found == code
    assert "Traceback" not in errors
    said = re.search(r"stopped after (\d+) of 100000 images, which are kept", errors)
    assert said, errors
    kept = int(said[1])
    # The signal may arrive after the fourth image is written and before it is counted.
    assert 3 <= kept <= len(list(tmp_path.glob("files/*.png")))
    assert errors.splitlines()[-1] == "Stopped"
    with Image.open(tmp_path / "grid.png") as grid:
        assert json.loads(grid.text["lintx"])["count"] == kept  # type: ignore[attr-defined]
    assert not list(tmp_path.rglob("*.tmp"))


def test_sampling_interrupted_before_the_first_image_writes_no_file(lintx, run_folder, tmp_path, monkeypatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("linformer_cli.sampling.decode.Sampler.iter_batches", stop)
    outcome = lintx("sample", run_folder, "-n", 1, "-o", tmp_path / "x.png")
    assert outcome.code == 130 and outcome.stderr.splitlines()[-1] == "Stopped"
    assert list(tmp_path.iterdir()) == []


def test_interrupted_sampling_prints_json_about_the_finished_images(lintx, run_folder, tmp_path, monkeypatch) -> None:
    whole = Sampler.iter_batches

    def stop_after_one(*arguments: Any, **options: Any) -> Iterator[SampledBatch]:
        yield next(whole(*arguments, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(Sampler, "iter_batches", stop_after_one)
    out = tmp_path / "x.png"
    outcome = lintx("sample", run_folder, "-n", 6, "--batch", 2, "-o", out, "--json")
    assert outcome.code == 130 and "stopped after 2 of 6 images, which are kept" in outcome.stderr
    assert (outcome.document["images"], outcome.document["drawn"], outcome.document["out"]) == (2, 2, str(out))


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_tables_fit_the_terminal_and_colours_can_be_turned_off(lintx, monkeypatch, columns) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    plain = lintx("attentions")
    assert plain.code == 0
    assert max(map(len, plain.stdout.splitlines())) <= columns
    assert "\x1b[" not in plain.stdout
    assert "linear" in plain.stdout
    page = lintx("sample", "--help")
    assert max(map(len, page.stdout.splitlines())) <= columns
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", page.stdout), "there are colours despite NO_COLOR"


@pytest.mark.parametrize("unbuffered", ["", "1"])  # `print` fails at once with "1", and at exit otherwise
@pytest.mark.parametrize("command", first_fast([["--version"], ["plot", "--help"], ["attentions", "--json"]], count=2))
def test_a_closed_pipe_ends_a_command_with_141_and_no_message(command, unbuffered) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "linformer_cli", *command],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        timeout=120,
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_run_can_continue_on_another_device(lintx, run_folder, tmp_path) -> None:
    """A run that claims to be from a GPU is resumed on a CPU. The random state of the GPU is ignored."""
    folder = Path(shutil.copytree(run_folder, tmp_path / "run"))
    config = folder / "config.toml"
    config.write_text(config.read_text().replace('device = "auto"', 'device = "cuda"'))
    checkpoint = read_checkpoint(folder / "last")
    state = load_training_state(checkpoint)
    tensors = {**state.tensors, "random.cuda": torch.zeros(16, dtype=torch.uint8)}
    save_checkpoint(folder / "last", load(folder / "last"), checkpoint.info, TrainingState(tensors, state.values))
    if not torch.cuda.is_available():
        outcome = lintx("train", "--resume", folder, "--steps", 8)
        assert outcome.code == 2 and "use --device cpu" in outcome.stderr
    outcome = lintx("train", "--resume", folder, "--steps", 8, "--device", "cpu")
    assert outcome.code == 0
    assert read_checkpoint(folder / "last").info.training.step == 8
    assert 'device = "cpu"' in config.read_text()
