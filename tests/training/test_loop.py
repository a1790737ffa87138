"""Tests of the training loop: the order of events, saves, and the measurement of time."""

import csv
import dataclasses
import itertools
import math
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from training_runs import REDRAWN, STEPS, VALIDATION, VALIDATION_IMAGES, Watcher, all_equal, begin, read_metrics, train

from linformer_cli.checkpoint import load_model, read_checkpoint
from linformer_cli.checkpoint_files import WEIGHTS
from linformer_cli.errors import Interrupted
from linformer_cli.evaluation.bits import Bits, measure_nats
from linformer_cli.report.grids import read_png_metadata, render_grid
from linformer_cli.sampling.decode import sample_images
from linformer_cli.system.signals import StopRequest
from linformer_cli.training import loop as loop_module
from linformer_cli.training import pixel_task as pixel_module
from linformer_cli.training.learner import Step
from linformer_cli.training.pixel_task import build_model
from linformer_cli.training.progress import Progress
from linformer_cli.training.task import learning_rate_at

# The order of events


def test_events_happen_at_their_steps(configure, tmp_path) -> None:
    watcher = train(begin(configure(), tmp_path / "run"))
    assert watcher.steps("log") == [4, 8, 12]
    assert sorted(watcher.steps("best") + watcher.steps("evaluate")) == [5, 10, 14]
    assert watcher.steps("sample") == [5, 10, 14]
    assert watcher.steps("save") == [3, 6, 9, 12, 14]
    at_the_end = [name for name, step in watcher.events if step == STEPS]
    assert at_the_end[1:] == ["sample", "save"]
    assert ("best", 0) not in watcher.events  # an untrained model is not validated


def test_a_finished_run_evaluates_samples_and_saves_once(configure, tmp_path) -> None:
    config = configure(steps=4, log_every=4, evaluate_every=4, sample_every=4, save_every=4)
    trainer = begin(config, tmp_path / "run")
    watcher = train(trainer)
    assert [name.replace("evaluate", "best") for name, step in watcher.events if step] == [
        "log",
        "best",
        "sample",
        "save",
    ]
    assert trainer.progress.step == read_checkpoint(trainer.folder.last).info.training.step == 4
    again = begin(config, tmp_path / "run")
    again.resume()
    assert train(again).events == []
    assert read_metrics(again.folder) == read_metrics(trainer.folder)


def test_a_run_that_ends_before_its_first_step_is_validated(configure, tmp_path) -> None:
    trainer = begin(configure(max_time=1e-9), tmp_path / "run")
    watcher = train(trainer)
    assert watcher.events == [("best", 0), ("save", 0)]
    assert trainer.progress.validation_bits_per_dim == pytest.approx(4, abs=0.5)
    assert read_checkpoint(trainer.folder.last).info.training.validation_bits_per_dim is not None


def test_sampling_can_be_turned_off(configure, tmp_path) -> None:
    trainer = begin(configure(steps=2, sample_every=0), tmp_path / "run")
    assert train(trainer).steps("sample") == []
    assert not trainer.folder.samples.exists()


def test_a_run_of_half_an_epoch_reads_half_of_the_images(configure, tmp_path) -> None:
    trainer = begin(configure(epochs=0.5, sample_every=0), tmp_path / "run")
    train(trainer)
    assert trainer.progress.step == 4  # half of 30 images, in batches of 4
    assert trainer.progress.images_seen == 16


@pytest.mark.smoke
def test_training_lowers_the_loss(configure, tmp_path) -> None:
    trainer = begin(
        configure(steps=60, dropout=0.0, sample_every=0, evaluate_every=60, save_every=60), tmp_path / "run"
    )
    before = measure_nats(trainer.task.model, VALIDATION.images).describe().bits_per_dim
    watcher = train(trainer)
    assert before > 3
    assert trainer.progress.validation_bits_per_dim < before - 0.5
    assert watcher.rows[-1].train_bits_per_dim < watcher.rows[0].train_bits_per_dim


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_a_grid_shows_the_samples_of_the_seed(configure, tmp_path, ema) -> None:
    trainer = begin(configure(steps=3, seed=3, ema=ema), tmp_path / "run")
    train(trainer)
    path = trainer.folder.samples / "step-0000003.png"
    assert read_png_metadata(path) == {"step": 3, "images_seen": 12}
    expected = render_grid(sample_images(load_model(trainer.folder.last), 2, seed=3))
    with Image.open(path) as grid:
        assert grid.tobytes() == expected.tobytes()


def test_every_step_has_the_learning_rate_of_the_schedule(configure, tmp_path, monkeypatch) -> None:
    """With Muon, a mixture head has a tenth of it."""
    config = configure(model={"head": "mixture"}, optimizer="muon", steps=8, log_every=1, sample_every=0)
    trainer, used = begin(config, tmp_path / "run"), []
    step = trainer.task.optimizer.step

    def record() -> None:
        used.append([(group["lr"], group.get("lr_share", 1.0)) for group in trainer.task.optimizer.param_groups])
        step()

    monkeypatch.setattr(trainer.task.optimizer, "step", record)
    rows = train(trainer).rows
    expected = [learning_rate_at(trainer.task.settings, number, number / 8) for number in range(8)]
    assert [row.learning_rate for row in rows] == pytest.approx(expected) and len(set(expected)) > 4
    for groups, rate in zip(used, expected, strict=True):
        assert {share for _, share in groups} == {0.1, 1.0}
        assert all(found == pytest.approx(rate * share) for found, share in groups)


@pytest.mark.parametrize("clip", [0.01, 0.0])
def test_gradients_are_clipped_and_0_turns_it_off(configure, tmp_path, clip) -> None:
    trainer = begin(configure(clip=clip), tmp_path / "run")
    norm = trainer.train_step().gradient_norm
    gradients = [weight.grad.norm() for weight in trainer.task.model.parameters() if weight.grad is not None]
    assert norm > 0.02 and float(torch.stack(gradients).norm()) == pytest.approx(clip or norm, rel=1e-3)


def test_logged_rows_are_means_over_the_interval(configure, tmp_path, monkeypatch) -> None:
    trainer = begin(configure(sample_every=0, accumulation=2), tmp_path / "run")
    losses: list[float] = []
    measure_loss = trainer.measure_loss

    def recorded(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, nats = measure_loss(batch)
        losses.append(float(nats.detach()))
        return loss, nats

    monkeypatch.setattr(trainer, "measure_loss", recorded)
    watcher = train(trainer)
    assert len(losses) == 2 * STEPS
    for number, row in enumerate(watcher.rows):
        interval = losses[8 * number : 8 * number + 8]
        assert row.train_bits_per_dim == pytest.approx(sum(interval) / 8 / math.log(2), rel=1e-6)
        assert row.images == row.step * 8
        assert row.gradient_norm > 0


def test_accumulated_batches_train_like_one_large_batch(configure, tmp_path) -> None:
    weights = []
    for batch, accumulation in ((8, 1), (4, 2), (2, 4)):
        config = configure(
            batch=batch, accumulation=accumulation, dropout=0.0, steps=3, sample_every=0, learning_rate=1e-3
        )
        trainer = begin(config, tmp_path / str(batch))
        train(trainer)
        weights.append(load_file(trainer.folder.last / WEIGHTS))
    start = build_model(config).state_dict()
    assert not all_equal(weights[0], start)
    for other in weights[1:]:
        for key, tensor in weights[0].items():
            torch.testing.assert_close(other[key], tensor, rtol=0, atol=2e-4)


# The best checkpoint


def test_the_best_checkpoint_has_the_best_evaluation(configure, tmp_path, monkeypatch) -> None:
    found = iter([5.0, 4.0, 4.0, 4.5])
    seen: list[int] = []

    def measured(_model: object, images: Any, before_batch: object, labels: object) -> SimpleNamespace:
        seen.append(len(images))
        bits = next(found)
        return SimpleNamespace(describe=lambda: Bits(bits, 0.25, bits, 0.25, len(images), 64))

    monkeypatch.setattr(pixel_module, "measure_nats", measured)
    trainer = begin(configure(steps=8, evaluate_every=2, evaluate_images=5), tmp_path / "run")
    watcher = train(trainer)
    assert [event for event in watcher.events if event[0] in ("best", "evaluate")] == [
        ("best", 2),
        ("best", 4),
        ("evaluate", 6),
        ("evaluate", 8),
    ]
    best, last = (read_checkpoint(folder).info.training for folder in (trainer.folder.best, trainer.folder.last))
    assert (best.step, best.validation_bits_per_dim, best.validation_standard_error) == (4, 4.0, 0.25)
    assert (last.step, last.validation_bits_per_dim) == (8, 4.5)
    assert trainer.progress.best_bits_per_dim == 4.0
    assert seen == [5] * 4
    rows = [row for row in read_metrics(trainer.folder) if row["validation_bits_per_dim"]]
    assert [row["validation_bits_per_dim"] for row in rows] == ["5.0", "4.0", "4.0", "4.5"]


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_the_saved_weights_are_the_evaluated_weights(configure, tmp_path, ema) -> None:
    trainer = begin(configure(ema=ema), tmp_path / "run")
    train(trainer)
    for folder in (trainer.folder.best, trainer.folder.last):
        bits = measure_nats(load_model(folder), VALIDATION.images).describe()
        assert bits.bits_per_dim == read_checkpoint(folder).info.training.validation_bits_per_dim


def test_a_save_has_no_validation_of_earlier_weights(configure, tmp_path) -> None:
    trainer = begin(configure(keep_last=2, evaluate_images=512), tmp_path / "run")
    with pytest.raises(Interrupted):
        train(trainer, Watcher().at("save", 6))
    assert (trainer.progress.step, trainer.progress.evaluated_at) == (7, 5)
    for folder in (trainer.folder.last, *trainer.folder.kept.iterdir()):
        training = read_checkpoint(folder).info.training
        assert training.step in (6, 7)
        found = training.validation_bits_per_dim, training.validation_standard_error, training.validation_images
        assert found == (None, None, None)
        assert "Validation" not in (folder / "README.md").read_text()
    assert read_checkpoint(trainer.folder.best).info.training.validation_images == VALIDATION_IMAGES


# Time


class Clock:
    """A clock that advances by one second at every reading."""

    def __init__(self, now: float) -> None:
        self.now = now

    def monotonic(self) -> float:
        self.now += 1
        return self.now

    perf_counter = monotonic


def test_elapsed_time_excludes_the_time_between_stop_and_resume(configure, tmp_path, monkeypatch) -> None:
    config = configure(max_time=40, schedule="constant", sample_every=0)
    monkeypatch.setattr(loop_module, "time", clock := Clock(1000.0))
    first = begin(config, tmp_path / "run")
    with pytest.raises(Interrupted):
        train(first, Watcher().at("save", 9))
    spent = first.progress.elapsed_seconds
    assert 10 <= spent <= clock.now - 1000
    clock.now += 5000  # time passes before the run is resumed
    second = begin(config, tmp_path / "run")
    second.resume()
    assert second.progress.elapsed_seconds == spent
    resumed_at = clock.now
    train(second)
    assert 36 <= second.progress.elapsed_seconds < 44
    assert 40 - spent <= clock.now - resumed_at <= 46 - spent
    with open(second.folder.metrics_file, newline="", encoding="utf-8") as file:
        elapsed = [float(row["elapsed_seconds"]) for row in csv.DictReader(file)]
    assert sorted(elapsed) == elapsed


def test_the_speed_of_a_resumed_run_counts_only_the_steps_since_it_was_resumed(configure, tmp_path, monkeypatch):
    config = configure(sample_every=0, evaluate_every=100, accumulation=2)
    monkeypatch.setattr(loop_module, "time", Clock(0.0))
    whole = train(begin(config, tmp_path / "whole"))
    assert {row.images_per_second for row in whole.rows} == {8.0}  # a step of two batches of four takes a second
    fastest = max(row.images_per_second for row in whole.rows)
    first = begin(config, tmp_path / "run")
    with pytest.raises(Interrupted):
        train(first, Watcher().at("save", 6))
    second = begin(config, tmp_path / "run")
    second.resume()
    # The first interval after resuming has four steps. Three of them were trained before the stop.
    row = train(second).rows[0]
    assert row.step == 8
    assert row.images_per_second <= fastest


def test_progress_without_a_loss_trend_can_be_read() -> None:
    values = dataclasses.asdict(Progress(step=3))
    del values["loss"]
    assert Progress.from_values(values) == Progress(step=3)


# Averaged weights


def test_the_average_is_saved_and_evaluated(configure, tmp_path) -> None:
    """The test computes the average itself. It starts after step 1, and the first decays are below `ema`."""
    trainer = begin(configure(ema=0.2, steps=4, sample_every=0), tmp_path / "run")
    decays = iter([0, 2 / 11, 0.2, 0.2])
    take_step = trainer.train_step
    expected: dict[str, torch.Tensor] = {}

    def train_step(share: float) -> Step:
        taken, decay = take_step(share), next(decays)
        for key, weight in trainer.task.model.state_dict().items():
            expected[key] = expected[key] * decay + weight * (1 - decay) if decay else weight.clone()
        return taken

    trainer.train_step = train_step  # type: ignore[method-assign]
    train(trainer)
    for folder in (trainer.folder.last, trainer.folder.best):
        saved = load_model(folder).state_dict()
        for key, weight in expected.items():
            torch.testing.assert_close(saved[key], weight, rtol=0, atol=1e-6)
    weights = trainer.task.model.state_dict()
    assert any(not torch.equal(weights[key], expected[key]) for key in weights)


# Starting from the weights of another model


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_weights_from_another_model_are_validated_before_the_first_step(configure, tmp_path, build_tiny_model, ema):
    source = build_tiny_model(3, attention="softmax", layers=1)
    trainer = begin(configure(ema=ema), tmp_path, source=source)
    watcher = train(trainer)
    events = [event for event in watcher.events if event[1] == 0]
    assert events == [("best", 0), ("save", 0)]
    first = read_metrics(trainer.folder)[0]
    expected = measure_nats(build_tiny_model(3, layers=1), VALIDATION.images).describe().bits_per_dim
    assert float(first["validation_bits_per_dim"]) == pytest.approx(expected, rel=1e-6)
    assert first["images"] == "0"


def test_a_run_stopped_before_its_first_validation_is_validated_when_resumed(configure, tmp_path, build_tiny_model):
    config = configure()
    trainer = begin(config, tmp_path, source=build_tiny_model(3, attention="softmax", layers=1))
    stopped = Watcher(StopRequest(int(signal.SIGINT)))
    with pytest.raises(Interrupted):
        train(trainer, stopped)
    assert stopped.events == [("save", 0)]
    resumed = begin(config, tmp_path)
    resumed.resume()
    assert train(resumed).events[0] == ("best", 0)


# Random features


def directions(model: torch.nn.Module) -> list[torch.Tensor]:
    found = [buffer.clone() for name, buffer in model.named_buffers() if name.endswith("directions")]
    assert len(found) == 2
    return found


def test_features_are_redrawn_at_the_interval_and_shared_with_the_averaged_model(configure, tmp_path) -> None:
    trainer = begin(configure(model=REDRAWN, ema=0.75, sample_every=5), tmp_path / "run")
    take_step = trainer.train_step
    changed: list[int] = []

    def train_step(share: float) -> Step:
        before, step = directions(trainer.task.model), trainer.progress.step
        taken = take_step(share)
        after = directions(trainer.task.model)
        assert not torch.equal(*after), "the two layers have the same random features"
        if not torch.equal(before[0], after[0]):
            changed.append(step)
        for ours, theirs in zip(after, directions(trainer.evaluated_model), strict=True):
            assert torch.equal(ours, theirs)
        return taken

    trainer.train_step = train_step  # type: ignore[method-assign]
    assert trainer.evaluated_model is not trainer.task.model
    train(trainer)
    assert changed == [0, 4, 8, 12]
    # Validation, samples and saves do not redraw the directions.
    for ours, theirs in zip(directions(trainer.task.model), directions(load_model(trainer.folder.last)), strict=True):
        assert torch.equal(ours, theirs)


def test_a_run_may_be_checked_at_intervals_of_time(configure, tmp_path, monkeypatch) -> None:
    ticks = itertools.count(0.0, 1.0)
    monkeypatch.setattr(loop_module, "time", SimpleNamespace(monotonic=lambda: next(ticks), perf_counter=lambda: 0.0))
    trainer = begin(configure(steps=14, check_every=4.0, log_every=100), tmp_path / "run")
    watcher = train(trainer)
    checked = watcher.steps("sample")
    assert 3 <= len(checked) < 8 and checked[0] < checked[1] - checked[0]  # the first check comes sooner
    assert sorted(watcher.steps("best") + watcher.steps("evaluate")) == checked == watcher.steps("save")


def test_a_run_ends_when_validation_no_longer_improves(configure, tmp_path, monkeypatch) -> None:
    found = iter([5.0, 4.0, 4.5, 4.2, 4.1])
    monkeypatch.setattr(pixel_module.PixelTask, "validate", lambda *_: Bits(next(found), 0.25, 4.0, 0.25, 6, 64))
    trainer = begin(configure(steps=14, evaluate_every=1, patience=2), tmp_path / "run")
    train(trainer)
    assert trainer.progress.step == 4 and trainer.has_lost_patience
    assert read_checkpoint(trainer.folder.best).info.training.step == 2
