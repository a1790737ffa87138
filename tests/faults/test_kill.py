"""Tests that a run killed repeatedly, even during saves, ends with the weights of an uninterrupted run."""

import fnmatch
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.conftest import run_main
from commands import Command, run_command
from machine import needs_library
from safetensors.torch import load_file

from linformer_cli.checkpoint import load_training_state, load_weights, read_checkpoint
from linformer_cli.checkpoint_files import TRAINING, WEIGHTS
from linformer_cli.files import TEMPORARY_FILES
from linformer_cli.training.run_folder import RunFolder

EVERYTHING_TO_LOSE = ["--save-every", "1", "--ema", "0.9", "--keep-last", "2"]


def start(options: list[str], run: Path, steps: int) -> Command:
    if (run / "config.toml").exists():
        return Command("train", "--resume", run, "--quiet")
    return Command("train", *options, *EVERYTHING_TO_LOSE, "--steps", steps, "--out", run, "--quiet")


def saved_at(run: Path) -> float | None:
    """Return the time at which `last/` was written, or None if there is no save."""
    try:
        return (run / "last" / "config.json").stat().st_mtime
    except FileNotFoundError:
        return None


def wait_for_a_save(run: Path, before: float | None, command: Command) -> None:
    """Wait for a save newer than `before`."""
    deadline = time.monotonic() + 120
    while (now := saved_at(run)) is None or now == before:
        assert time.monotonic() < deadline
        if not command.process.is_alive():
            return
        time.sleep(0.002)


@pytest.mark.slow
def test_a_run_killed_at_random_moments_reaches_the_same_weights(small_run_options, tmp_path, share: float) -> None:
    kills = max(round(1_000 * share), 3)
    steps = 10 * kills
    whole = tmp_path / "whole"
    began = time.monotonic()
    with start(small_run_options, whole, steps) as command:
        wait_for_a_save(whole, None, command)
        startup = time.monotonic() - began
        command.wait(None)
    training = time.monotonic() - began - startup
    run, moments = tmp_path / "killed", random.Random(3)
    killed, while_saving, before_the_first_save, reached = 0, 0, 0, []
    while killed < kills:
        before = saved_at(run)
        with start(small_run_options, run, steps) as command:
            if moments.random() < 0.2:
                time.sleep(moments.uniform(0, startup))
            else:
                wait_for_a_save(run, before, command)
                # The last kill also comes before the run is finished.
                time.sleep(moments.uniform(0, training / kills))
            command.process.kill()
            if command.wait() == 0:
                break
        killed += 1
        while_saving += any(run.glob(".*.replaced")) or any(run.glob(TEMPORARY_FILES))
        if (run / "config.toml").exists() and not RunFolder(run).is_untouched:
            checkpoint = read_checkpoint(run / "last")  # also checks digests and shapes
            load_weights(checkpoint)
            reached.append(load_training_state(checkpoint).values["step"])
        else:
            before_the_first_save += 1
    with start(small_run_options, run, steps) as command:
        assert command.wait(None) == 0
    print(f"{killed} kills, {while_saving} of them while saving, {before_the_first_save} before the first save")
    print(f"steps reached: {reached}")
    assert reached == sorted(reached)
    assert reached and reached[-1] > 0, "no step was trained before a kill"
    for name in (f"last/{WEIGHTS}", f"last/{TRAINING}", f"best/{WEIGHTS}"):
        ours, theirs = load_file(run / name), load_file(whole / name)
        assert ours.keys() == theirs.keys()
        assert all(ours[key].equal(theirs[key]) for key in ours), name


@pytest.mark.slow
def test_a_process_that_was_killed_leaves_its_run_unlocked(small_run_options, tmp_path, capsys) -> None:
    run = tmp_path / "locked"
    with start(small_run_options, run, 1_000) as command:
        wait_for_a_save(run, None, command)
        command.send_signal(signal.SIGSTOP)  # so it cannot finish before the second process tries the lock
        with start(small_run_options, run, 1_000) as second:
            assert second.wait() == 1, "a second process must be refused"
    step = read_checkpoint(run / "last").info.training.step + 1
    assert run_main(("train", "--resume", run, "--steps", step), capsys).code == 0
    assert read_checkpoint(run / "last").info.training.step == step


@pytest.mark.slow
@needs_library
def test_commands_killed_at_random_moments_leave_old_or_new_files_and_nothing_else(
    small_run_options: list[str], tmp_path: Path, share: float, capsys
) -> None:
    pytest.importorskip("constriction")
    run, cases = tmp_path / "run", max(round(480 * share), 4)
    assert run_main(("train", *small_run_options, "--steps", "1", "--out", run), capsys).code == 0
    pictures = ("sample", run, "-n", "40", "--batch", "2", "--precision", "fp32", "--files")
    assert run_main((*pictures, tmp_path / "pictures", "-o", tmp_path / "grid.png"), capsys).code == 0
    packed, data = tmp_path / "packed.lintz", ("--checkpoint", run)
    assert run_main(("compress", tmp_path / "pictures", *data, "-o", packed), capsys).code == 0
    commands: dict[str, Callable[[Path], tuple[object, ...]]] = {
        "sample": lambda out: (*pictures, out / "drawn", "-o", out / "grid.png"),
        "compress": lambda out: ("compress", tmp_path / "pictures", *data, "-o", out / "x.lintz", "--force"),
        "decompress": lambda out: ("decompress", packed, *data, "-o", out / "drawn", "--force"),
        "export": lambda out: ("export", run, out / "model"),
    }
    moments, left_behind = random.Random(11), 0
    for name, build in commands.items():
        (tmp_path / f"{name}-whole").mkdir()
        began = time.monotonic()
        assert run_command(*build(tmp_path / f"{name}-whole"))[0] == 0
        longest = time.monotonic() - began
        whole = read_files(tmp_path / f"{name}-whole")
        for number in range(cases // len(commands)):
            out = tmp_path / f"{name}-{number}"
            out.mkdir()
            for _ in range(2):
                with Command(*build(out)) as command:
                    time.sleep(moments.uniform(0, longest))
                    command.process.kill()
                    command.wait()
                left_behind += any(out.rglob(TEMPORARY_FILES))
                found = read_files(out)
                assert all(whole[path] == content for path, content in found.items()), (name, [*found])
            if not (out / "model").exists():  # which export would not replace
                assert run_command(*build(out))[0] == 0
            assert read_files(out) == whole and not list(out.rglob(TEMPORARY_FILES))
            shutil.rmtree(out)
    print(f"{2 * cases} kills, {left_behind} of them left a temporary file, which the next command removed")


def read_files(folder: Path) -> dict[str, bytes]:
    """The contents of all files but temporary ones."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    relative = {path.relative_to(folder): path for path in paths}
    return {
        str(short): path.read_bytes()
        for short, path in relative.items()
        if not any(fnmatch.fnmatch(part, TEMPORARY_FILES) for part in short.parts)
    }
