"""Tests of two processes that share one task, started as a user would start them, with gloo on the CPU."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import Command, run_command
from loops import loop_over
from machine import TIMING_METRICS
from PIL import Image

from linformer_cli.attention.catalogue import CATALOGUE
from linformer_cli.checkpoint import load_weights, read_checkpoint
from linformer_cli.errors import UsageError
from linformer_cli.metrics import METRICS_FILE, read_metrics
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.system.distributed import Team
from linformer_cli.training.learner import has_idle_parameters, seed_own_dropout, share_batch

WORK = Path(__file__).parents[1] / "processes.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SECONDS = 600  # enough for a busy machine
TRAIN = ["train", "--data", "glyphs", "--image-size", "8", "--preset", "tiny", "--batch", "4", "--precision", "fp32"]
SAMPLE = ["--count", "11", "--batch", "2", "--seed", "3", "--no-preview"]


def start(*arguments: object) -> "subprocess.Popen[str]":
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(WORK.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    environment["OMP_NUM_THREADS"] = "1"
    command = [*TORCHRUN, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Wait for `process`, and return its exit code, stdout and stderr."""
    with process:
        try:
            stdout, stderr = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, stdout, stderr


@pytest.fixture
def start_team(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Command]]]:
    with contextlib.ExitStack() as stack:
        yield lambda *given, **named: [stack.enter_context(one) for one in start_both(monkeypatch, *given, **named)]


def start_both(monkeypatch: pytest.MonkeyPatch, *arguments: object, dying: int = 0) -> list[Command]:
    """Start both processes of a job without torchrun. The second one is killed before image `dying`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1], "WORLD_SIZE": 2}
    team = []
    for rank in range(2):
        script = f"from processes import die_at, main\ndie_at({dying})\nmain()" if rank and dying else ""
        with monkeypatch.context() as patch:
            for name, value in (place | {"RANK": rank, "LOCAL_RANK": rank}).items():
                patch.setenv(name, str(value))
            team.append(Command(*arguments, script=script))
    return team


def run_alone(*arguments: object) -> None:
    code, _, errors = run_command(*arguments)
    assert code == 0, errors


@pytest.mark.slow
def test_a_process_that_waits_for_another_says_so() -> None:
    job = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    command = [sys.executable, "-m", "linformer_cli", *TRAIN, "--dry-run"]
    with subprocess.Popen(command, env={**os.environ, **job}, text=True, stderr=subprocess.PIPE) as process:
        limit = threading.Timer(SECONDS, process.kill)
        limit.start()
        lines = iter(process.stderr.readline, "")
        assert any("waiting at 127.0.0.1:29999 until all 2 processes" in line for line in lines)
        limit.cancel()
        process.kill()


# With a single process


@loop_over("attention", [*CATALOGUE, "lstm"])
def test_parameters_without_a_gradient_are_found(attention: str, build_tiny_model: Callable[..., PixelModel]) -> None:
    """In a team, torch waits for the gradient of every parameter unless it is told that some have none."""
    for changes in ({}, {"context": "previous", "embedding": "paper", "head": "mixture"}):
        model = build_tiny_model(attention=attention, dropout=0.5, **changes).train()
        state = torch.get_rng_state()
        task = SimpleNamespace(
            model=model,
            load_batch=lambda number, rows, count=64: torch.zeros(len(rows), count, dtype=torch.int64),
            measure_loss=lambda values, model=model: (model.nats(values).mean(), None),
        )
        idle = has_idle_parameters(task)
        assert model.training and all(parameter.grad is None for parameter in model.parameters())
        assert torch.equal(torch.get_rng_state(), state)
        model.nats(torch.randint(16, (2, 64))).mean().backward()
        assert any(parameter.grad is None for parameter in model.parameters()) == idle
        # A single chunk of flash covers the image, so the parameters for earlier chunks have no gradient.
        assert idle or attention != "flash"


def test_a_batch_smaller_than_the_team_is_refused(raises_one_line) -> None:
    with raises_one_line(UsageError, "a batch of 3 images", "4 processes", "--batch"):
        share_batch(Team(0, 4), 3)


def test_the_dropout_of_a_process_depends_only_on_seed_step_and_rank() -> None:
    def draw(rank: int, seed: int, step: int) -> float:
        seed_own_dropout(Team(rank, 3), seed, step)
        return float(torch.rand(()))

    with torch.random.fork_rng(devices=[]):
        places = [(0, 0, 0), (1, 0, 0), (2, 0, 0), (0, 1, 0), (0, 0, 1), (0, 2**63 - 1, 10**9)]
        drawn = [draw(*place) for place in places]
        assert len(set(drawn)) == len(drawn)
        assert drawn == [draw(*place) for place in places]
        state = torch.get_rng_state()
        seed_own_dropout(Team(), 0, 0)
        assert torch.equal(torch.get_rng_state(), state)


# Training


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path: Path) -> None:
    """`processes.py` also compares losses, gradients and weights in float64 after a few steps."""
    code, _, errors = finish(start(WORK, "train", tmp_path))
    assert code == 0, errors
    found = json.loads((tmp_path / "differences.json").read_text())
    # The runs take nine steps on the same images with a learning rate of 1e-2, and differ only in the order of float32
    # sums. The effect is largest where gradients nearly cancel, because Adam divides by their size.
    assert 0 < found["whole"] < 1e-4
    assert found["moved"] < 1e-4
    # Resuming with the same number of processes is bit-exact, including dropout.
    assert found["dropout-stopped"] == 0
    for left, right in (("dropout", "dropout-stopped"), ("whole", "moved")):
        ours, theirs = (read_metrics(tmp_path / run / METRICS_FILE) for run in (left, right))
        assert [row["step"] for row in ours] == [row["step"] for row in theirs] and len(ours) > 4
        if right == "dropout-stopped":
            for row in (*ours, *theirs):
                for name in TIMING_METRICS:
                    del row[name]
            assert ours == theirs


@pytest.mark.slow
def test_a_killed_process_ends_the_other_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ["--steps", "6", "--save-every", "2", "--evaluate-every", "100", "--sample-every", "0"]
    code, _, errors = finish(start(WORK, "dying", 5, *TRAIN, *settings, "--out", run))
    assert code != 0
    line = next(line for line in errors.splitlines() if line.startswith("Error: "))
    assert "another of the 2 processes has ended" in line and f"lintx train --resume '{run}'" in line
    assert "rank      : 1" in errors  # torchrun's own report
    assert read_checkpoint(run / "last").info.training.step == 4
    run_alone("train", "--resume", run)
    assert read_checkpoint(run / "last").info.training.step == 6
    load_weights(read_checkpoint(run))


@pytest.mark.slow
def test_a_stop_of_one_process_reaches_both_and_the_run_is_saved_once(tmp_path: Path, start_team) -> None:
    run = tmp_path / "run"
    first, second = start_team(*TRAIN, "--steps", "100000", "--save-every", "5", "--out", run)
    deadline = time.monotonic() + SECONDS
    while not (run / "last" / "config.json").exists():
        assert time.monotonic() < deadline and first.process.is_alive()
        time.sleep(0.05)
    second.send_signal(signal.SIGTERM)
    assert first.wait() == second.wait() == 143  # reading the messages first would wait without a limit
    errors, silence = first.finish()[2], second.finish()[2]
    assert errors.count("Stopped at step ") == 1 and "Stopped" not in silence
    stopped = int(errors.split("Stopped at step ")[1].split(",")[0])
    assert read_checkpoint(run / "last").info.training.step == stopped
    rows = read_metrics(run / METRICS_FILE)
    assert [row["step"] for row in rows] == sorted((row["step"] for row in rows), key=int)


# Sampling


@pytest.mark.slow
def test_images_missing_after_a_kill_are_drawn_later_and_equal_those_of_one_process(
    tmp_path, tiny_checkpoint, start_team
) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    run_alone("sample", tiny_checkpoint, *SAMPLE, "--out", tmp_path / "alone.png", "--files", alone)
    arguments = ["sample", tiny_checkpoint, *SAMPLE, "--out", tmp_path / "shared.png", "--files", shared]
    first, second = start_team(*arguments, dying=4)
    assert first.wait() == 1 and second.wait() == -signal.SIGKILL
    errors = first.finish()[2]
    assert "the same command draws what is missing" in errors
    written = {path.name: path.stat().st_mtime_ns for path in shared.iterdir()}
    assert "00001.png" in written and "00007.png" not in written
    first, second = start_team(*arguments, "--json")
    codes = first.wait(), second.wait()
    _, stdout, errors = first.finish()
    assert codes == (0, 0), errors
    found = json.loads(stdout)
    assert (found["images"], found["drawn"], found["processes"]) == (11, 11 - len(written), 2)
    for index in range(11):
        ours, theirs = (np.asarray(Image.open(folder / f"{index:05d}.png")) for folder in (shared, alone))
        assert np.array_equal(ours, theirs)
    assert all((shared / name).stat().st_mtime_ns == when for name, when in written.items())
    grids = [Image.open(tmp_path / name).tobytes() for name in ("alone.png", "shared.png")]
    assert grids[0] == grids[1]
