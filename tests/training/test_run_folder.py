"""Tests of the folder of a run: it is never overwritten, and its configuration can be read back."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from linformer_cli import files as files_module
from linformer_cli.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from linformer_cli.documents import Config, parse_config
from linformer_cli.errors import CheckpointError, LintxError, UsageError
from linformer_cli.metrics import MetricsRow, append_row
from linformer_cli.training import run_folder as run_folder_module
from linformer_cli.training.run_folder import RunFolder, claim_run, find_newest_run

PLAIN: dict[str, Any] = {"model": {"image": {"height": 8, "width": 8}}, "train": {"steps": 5}}


def configure(**tables: Any) -> RunConfig:
    return parse_config(RunConfig, {**PLAIN, **tables}, "run")


def save(folder: RunFolder, step: int) -> None:
    """Write a file with the step of the save into `last/`."""
    shutil.rmtree(folder.last, ignore_errors=True)
    folder.last.mkdir(parents=True)
    (folder.last / "config.json").write_text(str(step))


def full_disk(*_arguments: object, **_options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# Folders of runs without --out


def test_runs_started_in_the_same_second_have_different_folders(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [claim_run("tiny") for _ in range(3)]
    assert len(set(runs)) == 3
    for run in runs:
        assert run.parent == Path("runs") and "-tiny" in run.name
        RunFolder(run).create(configure())


def test_the_newest_run_is_found(tmp_path: Path, monkeypatch, raises_one_line) -> None:
    monkeypatch.chdir(tmp_path)
    with raises_one_line(UsageError, "no run in 'runs'", "lintx train --resume FOLDER"):
        find_newest_run()
    for name, changed in (("a", 20), ("b", 30), ("c", 10)):
        RunFolder(Path("runs") / name).create(configure())
        os.utime(Path("runs") / name / "config.toml", (changed, changed))
    (tmp_path / "runs" / "d").mkdir()
    assert find_newest_run() == Path("runs/b")


# Creating a run


def test_a_run_is_never_overwritten(tmp_path: Path, raises_one_line) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create(configure())
    append_row(folder.metrics_file, MetricsRow(step=3, images=24, elapsed_seconds=1.5))
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    with raises_one_line(UsageError, str(folder.path), "exists already", f"--resume '{folder.path}'", "--out"):
        folder.create(configure(train={"steps": 9}))
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before


def test_other_files_are_never_overwritten(tmp_path: Path, raises_one_line) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".hidden").write_text("mine")
    for name in ("file", "folder"):
        with raises_one_line(UsageError, "exists already"):
            RunFolder(tmp_path / name).create(configure())
    assert (tmp_path / "file").read_text() == "mine"
    assert [path.name for path in (tmp_path / "folder").iterdir()] == [".hidden"]


def test_a_run_created_by_another_process_is_left_alone(tmp_path: Path, monkeypatch, raises_one_line) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    with folder.lock():
        with raises_one_line(LintxError, "another process is training in", str(folder.path)):
            RunFolder(folder.path).create(configure())
        assert [path.name for path in folder.path.iterdir()] == [".lock"]
    lock = RunFolder.lock

    @contextlib.contextmanager
    def late(self: RunFolder) -> Iterator[None]:
        """Create a run as if another process had just held the lock."""
        with lock(self):
            self.write_config(configure(train={"steps": 9}))
            yield

    monkeypatch.setattr(RunFolder, "lock", late)
    with raises_one_line(UsageError, "exists already"):
        RunFolder(folder.path).create(configure())
    assert folder.read_config() == configure(train={"steps": 9})


# config.toml


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"preset": "tiny", "data": {"name": "array:/tmp/a \"b\" \\ 'c'\n", "data_dir": "ü", "image_size": 9}},
        {"train": {"epochs": 0.1, "learning_rate": 1e-300, "seed": 2**63 - 1}},
        {"train": {"max_time": 1 / 3, "device": "cuda:1"}},
        {"model": {**PLAIN["model"], "attention_options": {"a": True, "b": 3, "c": 3.0, "d": "3"}}},
    ],
)
def test_a_configuration_is_read_back_unchanged(tmp_path: Path, tables: dict[str, Any]) -> None:
    folder, config = RunFolder(tmp_path / "run"), configure(**tables)
    folder.create(config)
    assert folder.read_config().model_dump_json() == config.model_dump_json()


@pytest.mark.parametrize("kind", [RunConfig, ModelConfig, DataConfig, TrainConfig])
def test_optional_settings_are_none_by_default(kind: type[Config]) -> None:
    # TOML has no null, so None is left out of config.toml and read back as the default.
    optional = {name for name, field in kind.model_fields.items() if type(None) in get_args(field.annotation)}
    assert {name for name in optional if kind.model_fields[name].default is not None} == set()


def test_a_folder_without_a_run_is_refused(tmp_path: Path, raises_one_line) -> None:
    with raises_one_line(CheckpointError, str(tmp_path), "not a run folder", "config.toml"):
        RunFolder(tmp_path).read_config()


@pytest.mark.parametrize("text", ["[model", "\x00", "train = 3\ntrain = 4"])
def test_a_configuration_that_is_not_toml_is_refused(tmp_path: Path, raises_one_line, text: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with raises_one_line(CheckpointError, "config.toml", "cannot be read"):
        RunFolder(tmp_path).read_config()


def test_a_configuration_with_an_unknown_key_is_refused(tmp_path: Path, raises_one_line) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create(configure())
    text = folder.config_file.read_text().replace("warmup_steps", "warmup_step")
    folder.config_file.write_text(text)
    with raises_one_line(UsageError, str(folder.config_file), "train", "did you mean 'warmup_steps'?"):
        folder.read_config()


def test_a_full_disk_gives_a_one_line_error(tmp_path: Path, monkeypatch, raises_one_line) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create(configure())
    monkeypatch.setattr(run_folder_module, "open", full_disk, raising=False)
    monkeypatch.setattr(files_module, "open", full_disk, raising=False)
    for fails in (
        lambda: RunFolder(tmp_path / "other").create(configure()),
        lambda: folder.write_config(configure()),
    ):
        with raises_one_line(LintxError, str(tmp_path), "o space left on device"):
            fails()


def test_a_folder_with_only_the_files_of_a_killed_write_can_be_used(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    (folder.path / ".lintx-0123456789ab.tmp").write_text("half a conf")
    folder.create(configure())
    assert folder.read_config() == configure()


def test_three_saves_from_before_spikes_are_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    for step in (5, 10, 15, 20):
        save(folder, step)
        folder.keep(step, keep_last=2)
        assert (folder.keep_before_spike(step) / "config.json").read_text() == str(step)
    kept = sorted(path.name for path in folder.kept.iterdir())
    assert kept == [*(f"before-spike-{step:07d}" for step in (10, 15, 20)), "step-0000015", "step-0000020"]


def test_a_copy_that_fills_the_disk_is_removed(tmp_path: Path, monkeypatch, raises_one_line) -> None:
    """Saves are copied here, as on a file system without links."""
    folder = RunFolder(tmp_path / "run")
    save(folder, 5)

    def fill(source: str, target: str) -> None:
        Path(target).write_bytes(b"half")
        full_disk()

    monkeypatch.setattr(os, "link", full_disk)
    monkeypatch.setattr(shutil, "copyfile", fill)
    with raises_one_line(LintxError, "cannot read or write"):
        folder.hold_previous()
    assert [path.name for path in folder.path.iterdir()] == ["last"]


def test_a_second_process_is_refused(tmp_path: Path, raises_one_line) -> None:
    RunFolder(tmp_path / "run").create(configure())
    holder = (
        "import sys, pathlib; from linformer_cli.training.run_folder import RunFolder\n"
        "with RunFolder(pathlib.Path(sys.argv[1])).lock(): print('held', flush=True); sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", holder, str(tmp_path / "run")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with raises_one_line(LintxError, "another process", str(tmp_path / "run")), RunFolder(tmp_path / "run").lock():
            pass
        process.kill()
    # The lock is released however its process ended.
    with RunFolder(tmp_path / "run").lock():
        pass


def test_a_run_whose_lock_was_removed_is_not_written_to(tmp_path: Path, raises_one_line) -> None:
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    first.create(configure())
    with first.lock():
        first.require_lock()
        (tmp_path / "run" / ".lock").unlink()
        with raises_one_line(LintxError, ".lock' was removed", "--resume"):
            first.require_lock()
        with second.lock():
            second.require_lock()
            with raises_one_line(LintxError, ".lock' was removed"):
                first.require_lock()


def test_a_link_to_a_missing_folder_becomes_a_run(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    RunFolder(tmp_path / "link").create(configure())
    assert RunFolder(tmp_path / "disk").read_config() == configure()


def test_the_newest_saves_are_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    for step in (5, 10, 15, 20):
        save(folder, step)
        folder.keep(step, 3)
    kept = sorted(folder.kept.iterdir())
    assert [path.name for path in kept] == ["step-0000010", "step-0000015", "step-0000020"]
    assert [(path / "config.json").read_text() for path in kept] == ["10", "15", "20"]
    folder.keep(25, 1)
    assert len(list(folder.kept.iterdir())) == 3


def test_a_step_with_more_digits_is_newer(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    for step in (9_999_800, 9_999_900, 10_000_000):
        save(folder, step)
        folder.keep(step, 2)
    assert sorted(path.name for path in folder.kept.iterdir()) == ["step-10000000", "step-9999900"]


def test_settings_with_a_name_that_is_not_utf8_are_refused_in_one_line(tmp_path, raises_one_line) -> None:
    config = configure(data={"name": "folder:/pictures/f\udcfcr"})
    with raises_one_line(UsageError, "not UTF-8", r'name = "folder:/pictures/f\udcfc', "rename it"):
        RunFolder(tmp_path / "run").create(config)
