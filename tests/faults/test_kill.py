"""Tests that a run killed repeatedly, even during saves, ends with the weights of an uninterrupted run."""

import multiprocessing
import os
import random
import signal
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from linformer_cli.checkpoint import load_training_state, load_weights, read_checkpoint
from linformer_cli.checkpoint_files import TRAINING, WEIGHTS
from linformer_cli.cli.app import main
from linformer_cli.training.run_folder import RunFolder

EVERYTHING_TO_LOSE = ["--save-every", "1", "--ema", "0.9", "--keep-last", "2"]


def run_main(arguments: list[str]) -> None:
    """Run the command in a separate process, and discard its output."""
    sys.argv = ["lintx", *arguments]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        main()


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    """Starts processes with torch imported, so that they spend most of their time training."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["linformer_cli.training.loop", "linformer_cli.cli.app"])
    return found


def start(context: ForkServerContext, options: list[str], run: Path, steps: int = 80) -> BaseProcess:
    if (run / "config.toml").exists():
        arguments = ["train", "--resume", str(run)]
    else:
        arguments = ["train", *options, *EVERYTHING_TO_LOSE, "--steps", str(steps), "--out", str(run)]
    process = context.Process(target=run_main, args=(arguments,))
    process.start()
    return process


def saved_at(run: Path) -> float | None:
    """Return the time at which `last/` was written, or None if there is no save."""
    try:
        return (run / "last" / "config.json").stat().st_mtime
    except FileNotFoundError:
        return None


def wait_for_a_save(run: Path, before: float | None, process: BaseProcess) -> None:
    """Wait for a save newer than `before`."""
    deadline = time.monotonic() + 120
    while (now := saved_at(run)) is None or now == before:
        assert time.monotonic() < deadline
        if not process.is_alive():
            return
        time.sleep(0.002)


def finish(context: ForkServerContext, options: list[str], run: Path) -> None:
    process = start(context, options, run)
    process.join()
    assert process.exitcode == 0


@pytest.mark.slow
def test_a_run_killed_at_random_moments_reaches_the_same_weights(
    context: ForkServerContext, small_run_options: list[str], tmp_path: Path, share: float
) -> None:
    kills = max(round(1_000 * share), 8)
    steps = 10 * kills
    whole = tmp_path / "whole"
    process, began = start(context, small_run_options, whole, steps), time.monotonic()
    wait_for_a_save(whole, None, process)
    startup = time.monotonic() - began
    process.join()
    training = time.monotonic() - began - startup
    run, moments = tmp_path / "killed", random.Random(3)
    killed, while_saving, before_the_first_save, reached = 0, 0, 0, []
    while killed < kills:
        before = saved_at(run)
        process = start(context, small_run_options, run, steps)
        if moments.random() < 0.2:
            time.sleep(moments.uniform(0, startup))
        else:
            wait_for_a_save(run, before, process)
            # The last kill also comes before the run is finished.
            time.sleep(moments.uniform(0, training / kills))
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        killed += 1
        while_saving += any(run.glob(".*.writing")) or any(run.glob(".*.replaced")) or any(run.glob(".lintx-*.tmp"))
        if (run / "config.toml").exists() and not RunFolder(run).is_untouched:
            checkpoint = read_checkpoint(run / "last")  # also checks digests and shapes
            load_weights(checkpoint)
            reached.append(load_training_state(checkpoint).values["step"])
        else:
            before_the_first_save += 1
    finish(context, small_run_options, run)
    print(f"{killed} kills, {while_saving} of them while saving, {before_the_first_save} before the first save")
    print(f"steps reached: {reached}")
    assert reached == sorted(reached)
    assert reached and reached[-1] > 0, "no step was trained before a kill"
    for name in (f"last/{WEIGHTS}", f"last/{TRAINING}", f"best/{WEIGHTS}"):
        ours, theirs = load_file(run / name), load_file(whole / name)
        assert ours.keys() == theirs.keys()
        assert all(ours[key].equal(theirs[key]) for key in ours), name


def test_a_process_that_was_killed_leaves_its_run_unlocked(
    context: ForkServerContext, small_run_options: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "locked"
    process = start(context, small_run_options, run)
    wait_for_a_save(run, None, process)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)  # so it cannot finish before the second process tries the lock
    second = start(context, small_run_options, run)
    second.join()
    assert second.exitcode == 1, "a second process must be refused"
    process.kill()
    process.join()
    finish(context, small_run_options, run)
    assert read_checkpoint(run / "last").info.training.step == 80
