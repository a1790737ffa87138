"""Tests that TensorBoard and Weights & Biases get the figures of metrics.csv, also after a resume."""

import sys
from types import SimpleNamespace

import pytest
from training_runs import Watcher, begin, train

from linformer_cli.errors import LintxError
from linformer_cli.metrics import COLUMNS, read_metrics
from linformer_cli.training.logs import TensorBoardLog, WandbLog, find_logs


def crash_and_resume(config, path, log):
    """Train with a crash after the row of step 12 and a resume from step 9, and return the folder."""
    for action in (lambda: 1 / 0, lambda: None):
        trainer = begin(config, path)
        if trainer.folder.last.exists():
            trainer.resume()
        trainer.logs = [log(path, config, trainer.progress.step)]
        try:
            train(trainer, Watcher().at("log", 12, action))
        except ZeroDivisionError:
            assert read_metrics(trainer.folder.metrics_file)[-1]["step"] == "12"
        trainer.logs[0].close()
    return trainer.folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:::tensorboard")
def test_event_files_have_the_figures_of_the_run(configure, tmp_path) -> None:
    pytest.importorskip("tensorboard", reason="pip install '.[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = crash_and_resume(configure(), tmp_path / "run", find_logs(["tensorboard"])[0])
    found = EventAccumulator(str(folder.path / "tensorboard")).Reload()
    rows = read_metrics(folder.metrics_file)
    assert [row["step"] for row in rows if row["train_bits_per_dim"]] == ["4", "8", "12"]
    for name in COLUMNS[1:]:
        expected = {int(row["step"]): float(row[name]) for row in rows if row[name]}
        assert {point.step: point.value for point in found.Scalars(name)} == pytest.approx(expected, rel=1e-6), name
        assert len(found.Scalars(name)) == len(expected)  # the row of step 12 was logged twice
    pictures = found.Images("samples")
    assert [f"step-{one.step:07d}.png" for one in pictures] == sorted(one.name for one in folder.samples.iterdir())
    assert all(one.width > 8 for one in pictures)
    (tmp_path / "step-0000003.txt").write_text("windows of bytes", encoding="utf-8")
    log = TensorBoardLog(tmp_path, configure(), 0)
    log.append_samples(tmp_path / "step-0000003.txt", 3)
    log.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"windows of bytes" in events.read_bytes()


def test_wandb_gets_the_figures_and_continues_its_run(configure, tmp_path, monkeypatch, raises_one_line) -> None:
    started, logged = [], []

    def init(**settings):
        started.append(settings)
        (settings["dir"] / "wandb" / f"offline-run-20260101_00000{len(started)}-name{len(started)}").mkdir(parents=True)
        return SimpleNamespace(log=logged.append, define_metric=lambda name, step_metric: None, finish=lambda: None)

    stub = SimpleNamespace(init=init, Image=lambda file: file, Error=ValueError)
    monkeypatch.setitem(sys.modules, "wandb", stub)
    folder = crash_and_resume(configure(), tmp_path / "run", WandbLog)
    assert [settings["id"] for settings in started] == [None, "name1"]
    assert started[0]["config"]["train"]["steps"] == 14
    bits = {one["step"]: one["train_bits_per_dim"] for one in logged if "train_bits_per_dim" in one}
    rows = read_metrics(folder.metrics_file)
    assert bits == {int(row["step"]): float(row["train_bits_per_dim"]) for row in rows if row["train_bits_per_dim"]}
    assert logged[-1]["samples"] == str(folder.samples / "step-0000014.png")
    monkeypatch.setattr(stub, "init", lambda **settings: 1 / 0)
    monkeypatch.setattr(stub, "Error", ZeroDivisionError)
    with raises_one_line(LintxError, "--log wandb: division by zero"):
        WandbLog(folder.path, configure(), 0)
