"""The training loop: resumed it is what it would have been, stopped it is saved, broken it says where."""

import csv
import dataclasses
import functools
import itertools
import json
import math
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from machine import TIMING_METRICS
from PIL import Image
from safetensors.torch import load_file

from linformer_cli.checkpoint import (
    WEIGHTS,
    TrainingState,
    load_model,
    load_training_state,
    read_checkpoint,
    save_checkpoint,
)
from linformer_cli.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from linformer_cli.data.batches import shift_images
from linformer_cli.data.glyphs import draw_glyphs
from linformer_cli.data.images import ImageSet
from linformer_cli.errors import CheckpointError, DataError, Interrupted, TrainingError, UsageError
from linformer_cli.evaluation.bits import Bits, measure_bits
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.report.grids import read_png_metadata, render_grid
from linformer_cli.runtime import StopRequest
from linformer_cli.sampling.decode import sample_images
from linformer_cli.training import loop as loop_module
from linformer_cli.training.loop import Trainer, build_model
from linformer_cli.training.progress import LossTrend, Progress
from linformer_cli.training.run_folder import METRICS, RunFolder

TRAINING_IMAGES, VALIDATION_IMAGES = 30, 6
# Nothing falls together by chance, and 14 steps of 4 or 8 images go through the 30 more than once.
STEPS, LOG_EVERY, EVALUATE_EVERY, SAVE_EVERY = 14, 4, 5, 3


def glyphs(split: str) -> ImageSet:
    start, stop = (0, TRAINING_IMAGES) if split == "train" else (100, 100 + VALIDATION_IMAGES)
    return ImageSet("glyphs", split, *draw_glyphs("train", 8, start, stop))  # type: ignore[arg-type]


TRAIN, VALIDATION = glyphs("train"), glyphs("validation")


class Watcher:
    """Keeps what it is told as (event, step), and does at one of these what a test wants: stop, break, look."""

    def __init__(self, stop: StopRequest | None = None, signal_number: int = signal.SIGINT) -> None:
        self.events: list[tuple[str, int]] = []
        self.rows: list[dict[str, Any]] = []
        self.spikes: list[str] = []
        self.actions: dict[tuple[str, int], Callable[[], object]] = {}
        self.stop = stop or StopRequest()
        self.signal_number = int(signal_number)

    def at(self, event: str, step: int, action: Callable[[], object] | None = None) -> "Watcher":
        self.actions[event, step] = action or (lambda: setattr(self.stop, "signal_number", self.signal_number))
        return self

    def told(self, event: str, step: int) -> None:
        self.events.append((event, step))
        self.actions.get((event, step), lambda: None)()

    def on_step(self, row: dict[str, Any], finished_share: float) -> None:
        assert 0 <= finished_share <= 1
        self.rows.append(row)
        self.told("log", row["step"])

    def on_evaluate(self, progress: Progress, bits: Bits, is_best: bool) -> None:
        assert progress.validation_bits_per_dim == bits.bits_per_dim
        self.told("best" if is_best else "evaluate", progress.step)

    def on_sample(self, path: Path) -> None:
        assert path.is_file()
        self.told("sample", int(path.stem.removeprefix("step-")))

    def on_spike(self, message: str) -> None:
        self.spikes.append(message)

    def on_save(self, path: Path, progress: Progress) -> None:
        assert read_checkpoint(path).info.training.step == progress.step
        self.told("save", progress.step)

    def steps(self, event: str) -> list[int]:
        # A run may save what it begins with, too.
        return [step for name, step in self.events if name == event and step > 0]


@pytest.fixture(scope="module")
def configure(tiny_model_config: ModelConfig) -> Callable[..., RunConfig]:
    def build(**train: Any) -> RunConfig:
        changes = {"dropout": train.pop("dropout", 0.1), "layers": 1, **train.pop("model", {})}
        model = tiny_model_config.model_copy(update=changes)
        settings = {
            "steps": STEPS,
            "batch": 4,
            "learning_rate": 1e-2,
            "warmup_steps": 2,
            "log_every": LOG_EVERY,
            "evaluate_every": EVALUATE_EVERY,
            "save_every": SAVE_EVERY,
            "sample_every": EVALUATE_EVERY,
            "sample_images": 2,
            **train,
        }
        if "max_time" in train or "epochs" in train:
            del settings["steps"]
        return RunConfig(model=model, data=DataConfig(name="glyphs"), train=TrainConfig(**settings))

    return build


def begin(config: RunConfig, path: Path, precision: str = "fp32") -> Trainer:
    folder = RunFolder(path)
    if not folder.config_file.exists():
        folder.create(config)
    return Trainer(config, folder, TRAIN, VALIDATION, "cpu", precision)


def train(trainer: Trainer, watcher: Watcher | None = None) -> Watcher:
    watcher = watcher or Watcher()
    trainer.run(watcher, watcher.stop)
    return watcher


def read_metrics(folder: RunFolder) -> list[dict[str, str]]:
    """All rows, without what depends on the machine's speed."""
    with open(folder.metrics_file, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{key: row[key] for key in METRICS if key not in TIMING_METRICS} for row in rows]


def all_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def record_order(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The images of every batch, by step, to be filled as it trains."""
    order: list[list[int]] = []
    draw = trainer.batches.batch

    def batch(start: int, size: int) -> Any:
        indices = draw(start, size)
        order.append(indices.tolist())
        return indices

    monkeypatch.setattr(trainer.batches, "batch", batch)
    return order


# Exact resumption


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not list what is mapped into memory")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_holds_none_of_the_files_that_it_goes_on_to_replace(configure, tmp_path, optimizer) -> None:
    config = configure(optimizer=optimizer)
    train(begin(config, tmp_path / "run"))
    trainer = begin(config, tmp_path / "run")
    trainer.resume()
    assert len(trainer.optimizer.state) > 0
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_metrics_that_a_spreadsheet_saved_are_read_and_others_refused_in_one_line(
    configure, tmp_path, raises_one_line
) -> None:
    trainer = begin(configure(), tmp_path / "run")
    train(trainer)
    file = trainer.folder.metrics_file
    known = file.read_text()
    file.write_text("\ufeff" + known + "1,2" + "," * 20 + "\r\n", newline="")
    begin(trainer.config, tmp_path / "run").resume()
    assert file.read_text() == known
    file.write_text(known.replace(",", ";"), newline="")
    with raises_one_line(DataError, str(file), "has no column 'step'"):
        begin(trainer.config, tmp_path / "run").resume()


SETTINGS = [
    pytest.param({"optimizer": optimizer, "accumulation": accumulation}, precision, id=f"{optimizer}-{precision}")
    for optimizer, accumulation, precision in (
        ("adamw", 1, "fp32"),
        ("radam", 2, "fp32"),
        ("adamw", 2, "bf16"),
        ("radam", 1, "bf16"),
    )
]
SETTINGS.append(pytest.param({"ema": 0.9, "keep_last": 2}, "fp32", id="averaged"))
SETTINGS.append(pytest.param({"optimizer": "muon", "accumulation": 2, "ema": 0.9}, "fp32", id="muon"))
SETTINGS.append(pytest.param({"shift": 2, "accumulation": 2}, "fp32", id="shifted"))
SETTINGS.append(pytest.param({"model": {"classes": 62}}, "fp32", id="classes"))
# Two layers, so that each has draws of its own, and none falls on a save, a stop or the end.
REDRAWN = {"attention": "performer", "attention_options": {"redraw_every": 4, "features": 8}, "layers": 2}
SETTINGS.append(pytest.param({"ema": 0.9, "model": REDRAWN}, "fp32", id="redrawn"))


@pytest.fixture(scope="module")
def uninterrupted(configure, tmp_path_factory) -> Callable[..., tuple[RunFolder, list[list[int]]]]:
    """The run that never stopped, once for all tests of the same settings, and the order of its images."""
    kept: dict[str, tuple[RunFolder, list[list[int]]]] = {}

    def run(settings: dict[str, Any], precision: str) -> tuple[RunFolder, list[list[int]]]:
        key = f"{settings} {precision}"
        if key not in kept:
            trainer = begin(configure(**settings), tmp_path_factory.mktemp("runs") / "whole", precision)
            with pytest.MonkeyPatch.context() as monkeypatch:
                order = record_order(trainer, monkeypatch)
                train(trainer)
            kept[key] = trainer.folder, order
        return kept[key]

    return run


def check_same(resumed: RunFolder, whole: RunFolder) -> None:
    for name in ("last", "best"):
        ours, theirs = (load_file(folder.path / name / WEIGHTS) for folder in (resumed, whole))
        assert all_equal(ours, theirs), name
    ours, theirs = (load_training_state(read_checkpoint(folder.last)) for folder in (resumed, whole))
    assert all_equal(ours.tensors, theirs.tensors)
    assert any(key.startswith("optimizer.") for key in ours.tensors)
    for state in (ours, theirs):
        state.values.pop("elapsed_seconds")
    assert ours.values == theirs.values
    assert read_metrics(resumed) == read_metrics(whole)
    summaries = [read_checkpoint(folder.best).info.training for folder in (resumed, whole)]
    assert len({summary.model_copy(update={"elapsed_seconds": 0.0}).model_dump_json() for summary in summaries}) == 1
    grids = [sorted(path.name for path in folder.samples.iterdir()) for folder in (resumed, whole)]
    assert grids[0] == grids[1]
    for name in grids[0]:
        assert (resumed.samples / name).read_bytes() == (whole.samples / name).read_bytes()


@pytest.mark.parametrize(("settings", "precision"), SETTINGS)
@pytest.mark.parametrize(
    ("event", "step", "stopped_at"),
    [
        # Seen after the next step: neither logged nor evaluated nor saved there otherwise, half an interval is open.
        ("save", 6, 7),
        # Due for evaluation and a grid, which the resumed run makes up for before it goes on.
        ("save", 9, 10),
        # Seen at once, where a row of metrics was just written.
        ("log", 8, 8),
    ],
)
def test_a_stopped_and_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    configure, uninterrupted, tmp_path, monkeypatch, settings, precision, event, step, stopped_at
) -> None:
    whole, order = uninterrupted(settings, precision)
    config = configure(**settings)
    first = begin(config, tmp_path / "run", precision)
    seen = record_order(first, monkeypatch)
    with pytest.raises(Interrupted, match=f"topped at step {stopped_at}"):
        train(first, Watcher().at(event, step))
    assert read_checkpoint(first.folder.last).info.training.step == stopped_at
    torch.manual_seed(12345)  # another process has another random state
    second = begin(config, tmp_path / "run", precision)
    seen_later = record_order(second, monkeypatch)
    second.resume()
    assert second.progress.step == stopped_at
    train(second)
    assert seen + seen_later == order
    check_same(second.folder, whole)


@pytest.mark.parametrize(("settings", "precision"), SETTINGS[:2])
@pytest.mark.parametrize(("event", "step", "saved_at"), [("log", 8, 6), ("sample", 10, 9), ("log", 12, 9)])
def test_a_killed_run_is_resumed_from_its_last_save_bit_for_bit(
    configure, uninterrupted, tmp_path, settings, precision, event, step, saved_at
) -> None:
    def kill() -> None:
        raise KeyboardInterrupt

    whole, _ = uninterrupted(settings, precision)
    config = configure(**settings)
    first = begin(config, tmp_path / "run", precision)
    with pytest.raises(KeyboardInterrupt):
        train(first, Watcher().at(event, step, kill))
    assert int(read_metrics(first.folder)[-1]["step"]) > saved_at
    second = begin(config, tmp_path / "run", precision)
    second.resume()
    assert second.progress.step == saved_at
    train(second)
    check_same(second.folder, whole)


def test_a_run_can_be_stopped_at_every_step(configure, uninterrupted, tmp_path) -> None:
    settings, precision = SETTINGS[0].values
    whole, _ = uninterrupted(settings, precision)
    config = configure(**settings)
    for step in range(1, STEPS + 1):
        trainer = begin(config, tmp_path / "run", precision)
        if step > 1:
            trainer.resume()
        stop = StopRequest()
        take_step = trainer._train_step

        def train_step(rate: float, stop=stop, take_step=take_step) -> tuple[float, float]:
            stop.signal_number = int(signal.SIGTERM)
            return take_step(rate)

        trainer._train_step = train_step  # type: ignore[method-assign]
        with pytest.raises(Interrupted, match=rf"topped at step {step}\b"):
            train(trainer, Watcher(stop))
    last = begin(config, tmp_path / "run", precision)
    last.resume()
    train(last)
    check_same(last.folder, whole)


def test_what_a_resumed_run_makes_up_for_is_not_counted_twice(configure, uninterrupted, tmp_path) -> None:
    # Stopped where an evaluation was due, made up for it, and killed before the next save.
    def kill() -> None:
        raise KeyboardInterrupt

    settings, precision = SETTINGS[0].values
    whole, _ = uninterrupted(settings, precision)
    config = configure(**settings)
    for watcher, ends in ((Watcher().at("save", 9), Interrupted), (Watcher().at("log", 12, kill), KeyboardInterrupt)):
        trainer = begin(config, tmp_path / "run", precision)
        if ends is KeyboardInterrupt:
            trainer.resume()
            assert trainer.progress.step == 10
        with pytest.raises(ends):
            train(trainer, watcher)
    last = begin(config, tmp_path / "run", precision)
    last.resume()
    assert last.progress.step == 10
    train(last)
    check_same(last.folder, whole)


def test_dropout_and_the_seed_matter(configure, uninterrupted, tmp_path) -> None:
    # Or the comparisons above could not notice a random state that was not kept.
    settings, precision = SETTINGS[0].values
    whole, _ = uninterrupted(settings, precision)
    weights = load_file(whole.last / WEIGHTS)
    for number, changes in enumerate(({"dropout": 0.0}, {"seed": 1}, {"learning_rate": 9e-3})):
        trainer = begin(configure(**settings, **changes), tmp_path / str(number), precision)
        train(trainer)
        assert not all_equal(load_file(trainer.folder.last / WEIGHTS), weights)


def test_training_images_are_shifted_and_validation_is_not(configure, tmp_path, monkeypatch) -> None:
    read: list[Any] = []
    convert = loop_module.images_to_values

    def recorded(images: Any, levels: int) -> torch.Tensor:
        read.append(images)
        return convert(images, levels)

    monkeypatch.setattr(loop_module, "images_to_values", recorded)
    trainer = begin(configure(shift=1, steps=2, accumulation=2, sample_every=0), tmp_path / "run")
    order = record_order(trainer, monkeypatch)
    train(trainer)
    stored = [TRAIN.images[indices] for indices in order]
    shifts = [trainer.batches.shifts(4 * number, 4, 1) for number in range(4)]
    assert len(read) == 4  # two steps of two batches; validation has its own conversion
    for images, before, moves in zip(read, stored, shifts, strict=True):
        assert not (images == before).all()
        assert (images == shift_images(before, moves)).all()
    # What validation reads is the set as it is.
    assert trainer.progress.validation_bits_per_dim == measure_bits(trainer.model, VALIDATION.images).bits_per_dim


def test_every_image_comes_with_its_label(configure, tmp_path, monkeypatch) -> None:
    told: list[list[int]] = []
    nats = PixelModel.nats

    def recorded(self: PixelModel, values: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if self.training:
            assert labels is not None
            told.append(labels.tolist())
        return nats(self, values, labels)

    monkeypatch.setattr(PixelModel, "nats", recorded)
    config = configure(model={"classes": 62}, steps=9, accumulation=2, sample_every=0, evaluate_images=4)
    trainer = begin(config, tmp_path / "run")
    order = record_order(trainer, monkeypatch)
    train(trainer)
    assert TRAIN.labels is not None and VALIDATION.labels is not None
    assert told == [TRAIN.labels[indices].tolist() for indices in order]
    measured = measure_bits(trainer.model, VALIDATION.images[:4], labels=VALIDATION.labels)
    assert trainer.progress.validation_bits_per_dim == measured.bits_per_dim


def test_a_model_with_classes_needs_labels(configure, tmp_path, raises_one_line) -> None:
    unlabelled = dataclasses.replace(VALIDATION, labels=None)
    config = configure(model={"classes": 62})
    for images in ((TRAIN, unlabelled), (unlabelled, VALIDATION)):
        with raises_one_line(DataError, "'glyphs' has no labels"):
            Trainer(config, RunFolder(tmp_path / "run"), *images, "cpu", "fp32")


def test_bf16_is_really_used(configure, uninterrupted) -> None:
    ours, theirs = (uninterrupted({"optimizer": "adamw", "accumulation": 2}, name)[0] for name in ("bf16", "fp32"))
    weights = [load_file(folder.last / WEIGHTS) for folder in (ours, theirs)]
    assert not all_equal(*weights)
    assert {tensor.dtype for tensor in weights[0].values()} == {torch.float32}


def test_the_untrained_weights_depend_on_the_seed_alone(configure) -> None:
    torch.manual_seed(5)
    ours = build_model(configure(seed=3)).state_dict()
    torch.manual_seed(6)
    assert all_equal(ours, build_model(configure(seed=3, batch=2)).state_dict())
    assert not all_equal(ours, build_model(configure(seed=4)).state_dict())


# What happens when


def test_everything_happens_when_it_is_due(configure, tmp_path) -> None:
    watcher = train(begin(configure(), tmp_path / "run"))
    assert watcher.steps("log") == [4, 8, 12]
    assert sorted(watcher.steps("best") + watcher.steps("evaluate")) == [5, 10, 14]
    assert watcher.steps("sample") == [5, 10, 14]
    assert watcher.steps("save") == [3, 6, 9, 12, 14]
    at_the_end = [name for name, step in watcher.events if step == STEPS]
    assert at_the_end[1:] == ["sample", "save"]


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


def test_sampling_can_be_turned_off(configure, tmp_path) -> None:
    trainer = begin(configure(steps=2, sample_every=0), tmp_path / "run")
    assert train(trainer).steps("sample") == []
    assert not trainer.folder.samples.exists()


def test_a_run_of_epochs_sees_its_images(configure, tmp_path) -> None:
    trainer = begin(configure(epochs=0.5, sample_every=0), tmp_path / "run")
    train(trainer)
    assert trainer.progress.step == 4  # half of 30 images, 4 at once
    assert trainer.progress.images_seen == 16


def test_training_learns(configure, tmp_path) -> None:
    trainer = begin(
        configure(steps=60, dropout=0.0, sample_every=0, evaluate_every=60, save_every=60), tmp_path / "run"
    )
    before = measure_bits(trainer.model, VALIDATION.images).bits_per_dim
    watcher = train(trainer)
    assert before > 3
    assert trainer.progress.validation_bits_per_dim < before - 0.5
    assert watcher.rows[-1]["train_bits_per_dim"] < watcher.rows[0]["train_bits_per_dim"]


def test_a_grid_holds_the_samples_of_the_seed(configure, tmp_path) -> None:
    trainer = begin(configure(steps=1, seed=3), tmp_path / "run")
    train(trainer)
    path = trainer.folder.samples / "step-0000001.png"
    assert read_png_metadata(path) == {"step": 1, "images_seen": 4}
    expected = render_grid(sample_images(load_model(trainer.folder.last), 2, seed=3))
    with Image.open(path) as grid:
        assert grid.tobytes() == expected.tobytes()


def test_logged_rows_are_means_over_the_interval(configure, tmp_path, monkeypatch) -> None:
    trainer = begin(configure(sample_every=0, accumulation=2), tmp_path / "run")
    losses: list[float] = []
    mean_nats = trainer._mean_nats

    def recorded(start: int) -> torch.Tensor:
        nats = mean_nats(start)
        losses.append(float(nats.detach()))
        return nats

    monkeypatch.setattr(trainer, "_mean_nats", recorded)
    watcher = train(trainer)
    assert len(losses) == 2 * STEPS
    for number, row in enumerate(watcher.rows):
        interval = losses[8 * number : 8 * number + 8]
        assert row["train_bits_per_dim"] == pytest.approx(sum(interval) / 8 / math.log(2), rel=1e-6)
        assert row["images"] == row["step"] * 8
        assert row["gradient_norm"] > 0


def test_accumulated_batches_are_one_large_batch(configure, tmp_path) -> None:
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


# Stopping


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_saves_and_tells_how_to_go_on(configure, tmp_path, raises_one_line, number, exit_code) -> None:
    trainer = begin(configure(), tmp_path / "run")
    path = str(tmp_path / "run")
    with raises_one_line(Interrupted, "topped at step 7", "saved", f"lintx train --resume '{path}'") as error:
        train(trainer, Watcher(signal_number=number).at("save", 6))
    assert error.value.exit_code == exit_code
    assert all_equal(load_model(trainer.folder.last).state_dict(), trainer.model.state_dict())


@pytest.mark.parametrize("work", ["evaluation", "grid"])
def test_a_stop_does_not_wait_for_an_evaluation_or_a_grid(
    configure, uninterrupted, tmp_path, monkeypatch, work
) -> None:
    """It is given up, the run saved, and after --resume it is made anew: nothing differs in the end."""
    whole, _ = uninterrupted({}, "fp32")
    trainer, watcher = begin(configure(), tmp_path / "run"), Watcher()
    calls: list[int] = []

    def stop_inside(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            if trainer.progress.step == EVALUATE_EVERY:
                calls.append(1)
                watcher.stop.signal_number = int(signal.SIGTERM)
            return original(*arguments)

        monkeypatch.setattr(owner, name, call)

    stop_inside(trainer.model, "nats" if work == "evaluation" else "init_state")
    if work == "evaluation":  # training uses the same method; only validation is to be stopped inside
        monkeypatch.setattr(loop_module, "measure_bits", lambda *a, **k: measure_bits(*a, batch=2, **k))
    with pytest.raises(Interrupted, match=f"topped at step {EVALUATE_EVERY}, saved"):
        train(trainer, watcher)
    assert len(calls) == 1, "it went on after the stop"
    assert ("best" if work == "evaluation" else "sample", EVALUATE_EVERY) not in watcher.events
    assert trainer.model.training
    again = begin(configure(), tmp_path / "run")
    again.resume()
    train(again)
    check_same(again.folder, whole)


def test_a_run_that_was_killed_before_its_first_save_begins_anew(configure, uninterrupted, tmp_path) -> None:
    whole, _ = uninterrupted({}, "fp32")
    trainer = begin(configure(), tmp_path / "run")
    trainer.folder.append_metrics({"step": 0, "images": 0, "validation_bits_per_dim": 4.0})
    trainer.resume()
    assert trainer.progress == Progress()
    train(trainer)
    check_same(trainer.folder, whole)


def test_a_run_that_has_lost_its_saves_does_not_begin_anew(configure, tmp_path, raises_one_line) -> None:
    trainer = begin(configure(), tmp_path / "run")
    train(trainer)
    shutil.rmtree(trainer.folder.last)
    with raises_one_line(CheckpointError, str(trainer.folder.last)):
        begin(configure(), tmp_path / "run").resume()
    assert len(read_metrics(trainer.folder)) > 3


def test_a_training_state_of_another_model_is_one_line(configure, tmp_path, raises_one_line) -> None:
    trainer = begin(configure(), tmp_path / "run")
    train(trainer)
    checkpoint = read_checkpoint(trainer.folder.last)
    state = load_training_state(checkpoint)
    for change in (
        lambda tensors, values: tensors.pop("random.cpu"),
        lambda tensors, values: tensors.update({"random.cpu": tensors["random.cpu"][:7]}),
        lambda tensors, values: tensors.update({"optimizer.0.exp_avg": torch.zeros(3)}),
        lambda tensors, values: tensors.update({"optimizer.900.exp_avg": torch.zeros(3)}),
        lambda tensors, values: tensors.update({"optimizer.x.exp_avg": torch.zeros(3)}),
        lambda tensors, values: values.update(steps=3),
        lambda tensors, values: values.update(loss={"level": 1}),
    ):
        tensors, values = dict(state.tensors), dict(state.values)
        change(tensors, values)
        save_checkpoint(trainer.folder.last, trainer.model, checkpoint.info, TrainingState(tensors, values))
        again = begin(configure(), tmp_path / "run")
        with raises_one_line(CheckpointError, "training state", str(trainer.folder.last)):
            again.resume()


def test_a_run_does_not_go_on_with_other_images(configure, tmp_path, raises_one_line) -> None:
    trainer = begin(configure(), tmp_path / "run")
    train(trainer)
    before = read_metrics(trainer.folder)
    fewer = dataclasses.replace(TRAIN, images=TRAIN.images[1:])
    with raises_one_line(DataError, "has 30 training images, 'glyphs' holds 29 now", "start a new run"):
        Trainer(configure(), trainer.folder, fewer, VALIDATION, "cpu", "fp32").resume()
    assert read_metrics(trainer.folder) == before


def test_images_of_another_size_are_refused(configure, tmp_path, raises_one_line) -> None:
    for pixels in (TRAIN.images[:, 1:], TRAIN.images[:, :, 1:], TRAIN.images.repeat(3, axis=3)):
        other = dataclasses.replace(TRAIN, images=pixels)
        found = " x ".join(map(str, pixels.shape[1:]))
        with raises_one_line(UsageError, "images of 8 x 8 x 1", f"'glyphs' has {found}"):
            Trainer(configure(), RunFolder(tmp_path / "run"), other, VALIDATION, "cpu", "fp32")


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_memory_that_runs_out_in_a_resume_is_not_blamed_on_the_state(configure, tmp_path, monkeypatch, kind) -> None:
    train(begin(configure(), tmp_path / "run"))

    def run_out(*_: object) -> None:
        raise kind("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("linformer_cli.training.loop.load_optimizer_tensors", run_out)
    with pytest.raises(kind, match="can't allocate memory"):
        begin(configure(), tmp_path / "run").resume()


def test_what_a_stop_before_the_first_step_calls_saved_is_saved(configure, tmp_path) -> None:
    config = configure()
    trainer = begin(config, tmp_path / "run")
    with pytest.raises(Interrupted, match=r"topped at step 0, saved"):
        train(trainer, Watcher(StopRequest(int(signal.SIGINT))))
    again = begin(config, tmp_path / "run")
    again.resume()
    assert again.progress.step == 0


# Numbers that are none


def poison(trainer: Trainer) -> Callable[[], None]:
    def action() -> None:
        with torch.no_grad():
            trainer.model.head.projection.bias[0] = math.nan

    return action


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_that_is_no_number_names_the_step_and_leaves_the_last_checkpoint(
    configure, tmp_path, raises_one_line, precision
) -> None:
    trainer = begin(configure(), tmp_path / "run", precision)
    watcher = Watcher()
    watcher.at("log", 4, poison(trainer))
    with raises_one_line(TrainingError, "not a finite number at step 4", str(trainer.folder.last), "--learning-rate"):
        train(trainer, watcher)
    again = begin(configure(), tmp_path / "run", precision)
    again.resume()
    assert again.progress.step == 3
    assert all(bool(torch.isfinite(parameter).all()) for parameter in again.model.parameters())
    train(again)
    assert again.progress.step == STEPS


def test_a_gradient_that_is_no_number_is_noticed_before_the_weights_are_changed(
    configure, tmp_path, monkeypatch
) -> None:
    trainer = begin(configure(), tmp_path / "run")
    mean_nats = trainer._mean_nats

    def broken(start: int) -> torch.Tensor:
        nats = mean_nats(start)
        if trainer.progress.step == 2:
            nats.register_hook(lambda gradient: gradient * math.inf)
        return nats

    monkeypatch.setattr(trainer, "_mean_nats", broken)
    with pytest.raises(TrainingError, match="step 2"):
        train(trainer)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in trainer.model.parameters())


@pytest.mark.parametrize("finished", [False, True])
def test_an_evaluation_that_is_no_number_is_one_line_and_nothing_best(
    configure, tmp_path, raises_one_line, finished
) -> None:
    # Diverged since the last step, so that the evaluation is the first to meet it.
    trainer = begin(configure(steps=4 if finished else STEPS, evaluate_every=4), tmp_path / "run")
    watcher = Watcher()
    watcher.at("log", 4, poison(trainer))
    with raises_one_line(TrainingError, "not a finite number", "step 4"):
        train(trainer, watcher)
    assert not trainer.folder.best.exists()
    assert read_checkpoint(trainer.folder.last).info.training.step == 3


def test_the_step_that_fails_names_its_images(configure, tmp_path) -> None:
    trainer = begin(configure(), tmp_path / "run")
    watcher = Watcher()
    watcher.at("log", 8, poison(trainer))
    with pytest.raises(TrainingError) as error:
        train(trainer, watcher)
    # 8 steps of 4 images lie behind, of 30: the ninth batch is the first of the second epoch, from its third image on.
    images = ", ".join(map(str, trainer.batches.batch(32, 3)))
    assert f"at step 8 (loss nan, gradient norm nan), batch 1 of epoch 2 (training images {images}, ...)" in str(
        error.value
    )


def let_loss_jump(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, step: int) -> list[float]:
    """Four steps from `step` on have a hundred times the loss; returns all losses, as they come."""
    train_step, losses = trainer._train_step, []

    def jumping(rate: float) -> tuple[float, float]:
        nats, norm = train_step(rate)
        losses.append(100 * nats if step <= trainer.progress.step < step + 4 else nats)
        return losses[-1], norm

    monkeypatch.setattr(trainer, "_train_step", jumping)
    return losses


# The weights that were saved at step 60 are those that give the loss of step 60.
@pytest.mark.parametrize(("jump", "saved"), [(60, 55), (61, 60)])
def test_the_save_that_is_kept_is_one_whose_loss_was_good(configure, tmp_path, monkeypatch, jump, saved) -> None:
    trainer = begin(configure(steps=64, evaluate_every=100, sample_every=0, save_every=5), tmp_path / "run")
    let_loss_jump(trainer, monkeypatch, jump)
    assert len(train(trainer).spikes) == 1
    kept = read_checkpoint(trainer.folder.kept / f"before-spike-00000{jump}")
    assert kept.info.training.step == saved and load_training_state(kept).values["step"] == saved
    assert not trainer.folder.previous.exists()


def test_a_loss_that_jumps_in_the_first_step_after_resume_has_the_save_before_kept(
    configure, tmp_path, monkeypatch
) -> None:
    config = configure(steps=64, evaluate_every=100, sample_every=0, save_every=5, log_every=5)
    with pytest.raises(Interrupted):
        train(begin(config, tmp_path / "run"), Watcher().at("log", 60))
    resumed = begin(config, tmp_path / "run")
    resumed.resume()
    let_loss_jump(resumed, monkeypatch, 60)
    assert len(train(resumed).spikes) == 1
    assert read_checkpoint(resumed.folder.kept / "before-spike-0000060").info.training.step == 55


def test_a_save_that_cannot_be_kept_before_a_spike_ends_nothing(configure, tmp_path, monkeypatch) -> None:
    trainer = begin(configure(steps=70, evaluate_every=100, sample_every=0, save_every=5), tmp_path / "run")
    let_loss_jump(trainer, monkeypatch, 63)
    (trainer.folder.path / "kept").write_text("in the way")
    (message,) = train(trainer).spikes
    assert "what was saved before it could not be kept: cannot read or write" in message
    assert read_checkpoint(trainer.folder.last).info.training.step == 70


def test_a_loss_that_jumps_is_said_once_and_the_save_before_it_kept(configure, tmp_path, monkeypatch) -> None:
    trainer = begin(configure(steps=70, evaluate_every=100, sample_every=0, save_every=5), tmp_path / "run")
    losses = let_loss_jump(trainer, monkeypatch, 63)
    watcher = train(trainer)
    (message,) = watcher.spikes
    kept = trainer.folder.kept / "before-spike-0000063"
    images = ", ".join(map(str, trainer.batches.batch(63 * 4, 3)))
    assert f"at step 63, batch 4 of epoch 9 (training images {images}, ...)" in message
    trend = functools.reduce(LossTrend.follow, losses[:63], LossTrend())
    before, after = (nats / math.log(2) for nats in (trend.mean, losses[63]))
    assert f"the loss jumped from {before:.3f} to {after:.3f} bits/dim" in message
    assert str(kept) in message
    assert read_checkpoint(kept).info.training.step == 60
    assert load_training_state(read_checkpoint(kept)).values["step"] == 60


def test_steps_that_are_timed_are_counted(configure, tmp_path) -> None:
    """What a mechanism does every so many steps must not be part of each."""
    model = {"attention": "performer", "attention_options": {"redraw_every": 3}}
    trainer = begin(configure(model=model), tmp_path / "run")
    attention = trainer.model.blocks[0].inner
    drawn = []
    for _ in range(7):
        trainer.take_step()
        drawn.append(attention.directions.clone())
    changed = [not torch.equal(one, other) for one, other in itertools.pairwise(drawn)]
    assert changed == [False, False, True, False, False, True]


def test_a_trend_knows_noise_from_a_jump() -> None:
    trend = LossTrend()
    noise = torch.Generator().manual_seed(0)
    for step in range(400):  # falls, with a noise of a tenth
        trend = trend.follow((0.5 + 3 * 0.97**step) * (1 + 0.1 * float(torch.randn((), generator=noise))))
        assert not trend.high, step
    assert trend.mean == pytest.approx(0.5, abs=0.05)
    assert trend.follow(1.2).high
    lasting = trend
    for _ in range(200):
        lasting = lasting.follow(1.2)
    assert not lasting.high, "a new level that lasts is normal in the end"
    assert not LossTrend().follow(9.0).high, "the first loss is nothing to compare with"
    assert trend.follow(1e6).mean == pytest.approx(0.5, abs=0.05), "one loss that is far off moves the trend little"


def test_a_jump_is_far_above_both_the_mean_and_the_noise() -> None:
    noisy = functools.reduce(LossTrend.follow, [1.0, 3.0] * 100, LossTrend())
    assert not noisy.follow(5.0).high
    assert noisy.follow(20.0).high
    steady = functools.reduce(LossTrend.follow, [1.0] * 200, LossTrend())
    assert not steady.follow(1.4).high
    assert steady.follow(1.6).high


# The best


def test_the_best_checkpoint_is_that_of_the_best_evaluation(configure, tmp_path, monkeypatch) -> None:
    found = iter([5.0, 4.0, 4.0, 4.5])
    seen: list[int] = []

    def measured(_model: object, images: Any, before_batch: object, labels: object) -> Bits:
        seen.append(len(images))
        bits = next(found)
        return Bits(bits, 0.25, bits, 0.25, len(images), 64)

    monkeypatch.setattr(loop_module, "measure_bits", measured)
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


def test_an_evaluation_counts_the_images_that_there_were(configure, tmp_path) -> None:
    trainer = begin(configure(steps=2, evaluate_images=512, sample_every=0), tmp_path / "run")
    train(trainer)
    assert read_checkpoint(trainer.folder.last).info.training.validation_images == VALIDATION_IMAGES


def test_what_is_evaluated_is_what_is_saved(configure, tmp_path) -> None:
    trainer = begin(configure(), tmp_path / "run")
    train(trainer)
    for folder in (trainer.folder.best, trainer.folder.last):
        bits = measure_bits(load_model(folder), VALIDATION.images)
        assert bits.bits_per_dim == read_checkpoint(folder).info.training.validation_bits_per_dim


def test_a_save_has_no_validation_of_earlier_weights(configure, tmp_path) -> None:
    trainer = begin(configure(keep_last=2), tmp_path / "run")
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
    """A clock that goes on by one second whenever it is read."""

    def __init__(self, now: float) -> None:
        self.now = now

    def monotonic(self) -> float:
        self.now += 1
        return self.now

    perf_counter = monotonic


def test_time_goes_on_counting_after_a_resume_but_not_in_between(configure, tmp_path, monkeypatch) -> None:
    config = configure(max_time=40, schedule="constant", sample_every=0)
    monkeypatch.setattr(loop_module, "time", clock := Clock(1000.0))
    first = begin(config, tmp_path / "run")
    with pytest.raises(Interrupted):
        train(first, Watcher().at("save", 9))
    spent = first.progress.elapsed_seconds
    assert 10 <= spent <= clock.now - 1000
    clock.now += 5000  # a night
    second = begin(config, tmp_path / "run")
    second.resume()
    assert second.progress.elapsed_seconds == spent
    resumed_at = clock.now
    train(second)
    assert 40 <= second.progress.elapsed_seconds < 44
    assert 40 - spent <= clock.now - resumed_at <= 46 - spent
    with open(second.folder.metrics_file, newline="", encoding="utf-8") as file:
        elapsed = [float(row["elapsed_seconds"]) for row in csv.DictReader(file)]
    assert sorted(elapsed) == elapsed


def test_the_speed_counts_only_the_images_of_its_own_time(configure, tmp_path, monkeypatch) -> None:
    config = configure(sample_every=0, evaluate_every=100)
    monkeypatch.setattr(loop_module, "time", Clock(0.0))
    whole = train(begin(config, tmp_path / "whole"))
    fastest = max(row["images_per_second"] for row in whole.rows)
    first = begin(config, tmp_path / "run")
    with pytest.raises(Interrupted):
        train(first, Watcher().at("save", 6))
    second = begin(config, tmp_path / "run")
    second.resume()
    # The first row after the resume closes an interval of which three of four steps were trained before.
    row = train(second).rows[0]
    assert row["step"] == 8
    assert row["images_per_second"] <= fastest


def test_a_dry_run_times_a_step(configure, tmp_path, monkeypatch) -> None:
    trainer = begin(configure(), tmp_path / "run")
    readings = iter([10.0, 12.5])
    monkeypatch.setattr(loop_module, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    assert trainer.time_one_step() == 2.5


def test_progress_is_plain_values() -> None:
    progress = Progress(step=3, best_bits_per_dim=1.5, loss=LossTrend(4, 0.1 + 0.2, 0.5, True))
    values = json.loads(json.dumps(dataclasses.asdict(progress)))
    assert Progress.from_values(values) == progress


def test_progress_that_was_saved_before_the_loss_had_a_trend_is_read() -> None:
    values = dataclasses.asdict(Progress(step=3))
    del values["loss"]
    assert Progress.from_values(values) == Progress(step=3)


# The average


def test_what_is_saved_and_evaluated_is_the_average(configure, tmp_path) -> None:
    """By hand: the average starts at the weights after the first step and moves by 1 - decay at each, more at first."""
    trainer = begin(configure(ema=0.2, steps=4, sample_every=0), tmp_path / "run")
    decays = iter([0, 2 / 11, 0.2, 0.2])
    take_step = trainer._train_step
    expected: dict[str, torch.Tensor] = {}

    def train_step(rate: float) -> tuple[float, float]:
        taken, decay = take_step(rate), next(decays)
        for key, weight in trainer.model.state_dict().items():
            expected[key] = expected[key] * decay + weight * (1 - decay) if decay else weight.clone()
        return taken

    trainer._train_step = train_step  # type: ignore[method-assign]
    train(trainer)
    for folder in (trainer.folder.last, trainer.folder.best):
        saved = load_model(folder).state_dict()
        for key, weight in expected.items():
            torch.testing.assert_close(saved[key], weight, rtol=0, atol=1e-6)
    weights = trainer.model.state_dict()
    assert any(not torch.equal(weights[key], expected[key]) for key in weights)


# Beginning with the weights of another model


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_what_was_taken_over_is_validated_before_the_first_step(configure, tmp_path, build_tiny_model, ema) -> None:
    source = build_tiny_model(3, attention="softmax", layers=1)
    trainer = begin(configure(ema=ema), tmp_path)
    moved = trainer.take_over(source)
    assert len(moved.taken) == len(source.state_dict())
    watcher = train(trainer)
    events = [event for event in watcher.events if event[1] == 0]
    assert events == [("best", 0), ("save", 0)]
    first = read_metrics(trainer.folder)[0]
    expected = measure_bits(build_tiny_model(3, layers=1), VALIDATION.images).bits_per_dim
    assert float(first["validation_bits_per_dim"]) == pytest.approx(expected, rel=1e-6)
    assert first["images"] == "0"


def test_a_run_stopped_before_that_validation_makes_up_for_it(configure, tmp_path, build_tiny_model) -> None:
    config = configure()
    trainer = begin(config, tmp_path)
    trainer.take_over(build_tiny_model(3, attention="softmax", layers=1))
    stopped = Watcher(StopRequest(int(signal.SIGINT)))
    with pytest.raises(Interrupted):
        train(trainer, stopped)
    assert stopped.events == [("save", 0)]
    resumed = begin(config, tmp_path)
    resumed.resume()
    assert train(resumed).events[0] == ("best", 0)


def test_an_untrained_model_is_not_validated(configure, tmp_path) -> None:
    assert ("best", 0) not in train(begin(configure(), tmp_path)).events


# Random draws


def directions(model: torch.nn.Module) -> list[torch.Tensor]:
    found = [buffer.clone() for name, buffer in model.named_buffers() if name.endswith("directions")]
    assert len(found) == 2
    return found


def test_random_draws_change_when_they_should_and_the_average_has_those_of_the_model(configure, tmp_path) -> None:
    trainer = begin(configure(model=REDRAWN, ema=0.75, sample_every=5), tmp_path / "run")
    take_step = trainer._train_step
    changed: list[int] = []

    def train_step(rate: float) -> tuple[float, float]:
        before = directions(trainer.model)
        taken = take_step(rate)
        after = directions(trainer.model)
        assert not torch.equal(*after), "two layers of the same draw"
        if not torch.equal(before[0], after[0]):
            changed.append(trainer.progress.step)
        for ours, theirs in zip(after, directions(trainer.evaluated_model), strict=True):
            assert torch.equal(ours, theirs)
        return taken

    trainer._train_step = train_step  # type: ignore[method-assign]
    assert trainer.evaluated_model is not trainer.model
    train(trainer)
    assert changed == [0, 4, 8, 12]
    # Evaluated, sampled from and saved since, and still the last draw.
    for ours, theirs in zip(directions(trainer.model), directions(load_model(trainer.folder.last)), strict=True):
        assert torch.equal(ours, theirs)


def test_a_draw_depends_on_the_seed_and_the_step_alone(configure, tmp_path) -> None:
    drawn = []
    for name, changes in (("a", {}), ("b", {"learning_rate": 1e-3, "batch": 2}), ("c", {"seed": 1})):
        trainer = begin(configure(model=REDRAWN, **changes), tmp_path / name)
        train(trainer)
        drawn.append(directions(trainer.model))
    for ours, same, other in zip(*drawn, strict=True):
        assert torch.equal(ours, same)
        assert not torch.isclose(ours, other).any()
