"""Tests that a resumed run equals an uninterrupted run, and that a stopped run is saved."""

import dataclasses
import itertools
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loops import first_fast, loop_over
from safetensors.torch import load_file
from training_runs import (
    EVALUATE_EVERY,
    REDRAWN,
    STEPS,
    TRAIN,
    VALIDATION,
    Watcher,
    all_equal,
    begin,
    read_metrics,
    record_order,
    train,
)

from linformer_cli.checkpoint import load_model, load_training_state, read_checkpoint
from linformer_cli.checkpoint_files import WEIGHTS
from linformer_cli.config import ImageShape
from linformer_cli.data.batches import flip_images, shift_images
from linformer_cli.data.images import ImageSet
from linformer_cli.errors import CheckpointError, DataError, Interrupted, UsageError
from linformer_cli.evaluation.bits import measure_nats
from linformer_cli.metrics import MetricsRow, append_row
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.system.signals import StopRequest
from linformer_cli.training import pixel_task as pixel_module
from linformer_cli.training.learner import Step, random_state, restore_random_state
from linformer_cli.training.loop import Trainer
from linformer_cli.training.pixel_task import PixelTask, build_model
from linformer_cli.training.progress import Progress
from linformer_cli.training.run_folder import RunFolder


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not list what is mapped into memory")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_does_not_map_the_files_that_it_will_replace(configure, tmp_path, optimizer) -> None:
    config = configure(optimizer=optimizer)
    train(begin(config, tmp_path / "run"))
    trainer = begin(config, tmp_path / "run")
    trainer.resume()
    assert len(trainer.task.optimizer.state) > 0
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_metrics_saved_by_a_spreadsheet_are_read_and_other_tables_are_refused(configure, tmp_path, raises_one_line):
    trainer = begin(configure(), tmp_path / "run")
    train(trainer)
    file = trainer.folder.metrics_file
    known = file.read_text()
    file.write_text("\ufeff" + known + "1,2" + "," * 20 + "\r\n", newline="")
    begin(trainer.task.config, tmp_path / "run").resume()
    assert file.read_text() == known
    file.write_text(known.replace(",", ";"), newline="")
    with raises_one_line(DataError, str(file), "has no column 'step'"):
        begin(trainer.task.config, tmp_path / "run").resume()


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
SETTINGS.append(pytest.param({"flip": True, "accumulation": 2}, "fp32", id="flipped"))
SHORT = {"warmup_share": 0.5, "warmup_steps": 99, "patience": 3, "steps": STEPS, "max_time": 1e6}
SETTINGS.append(pytest.param(SHORT, "fp32", id="warmed up by share"))
SETTINGS.append(pytest.param({"model": {"classes": 62}}, "fp32", id="classes"))
OPTIONAL = {"classes": 62, "optional_class": True}
SETTINGS.append(pytest.param({"model": OPTIONAL, "hide_class": 0.5, "accumulation": 2}, "fp32", id="hidden classes"))
SETTINGS.append(pytest.param({"ema": 0.9, "model": REDRAWN}, "fp32", id="redrawn"))


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


STOPS = [
    # The stop is noticed after the next step, at which nothing else is logged, evaluated or saved.
    ("save", 6, 7),
    # At step 10 an evaluation and a grid are due, so the resumed run begins with them.
    ("save", 9, 10),
    # The stop is noticed immediately after a row of metrics was written.
    ("log", 8, 8),
]


@pytest.mark.parametrize(
    ("settings", "precision", "event", "step", "stopped_at"),
    [
        pytest.param(*given.values, *stop, id=f"{given.id}-{stop[2]}", marks=() if n % 3 == m else pytest.mark.slow)
        for (n, given), (m, stop) in itertools.product(enumerate(SETTINGS), enumerate(STOPS))
        if n < 4 or n % 3 == m  # every setting has one stop, and the optimizers have all stops
    ],
)
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_run_bit_for_bit(
    configure, uninterrupted, tmp_path, monkeypatch, settings, precision, event, step, stopped_at
) -> None:
    whole, order = uninterrupted(settings, precision)
    config = configure(**settings)
    first = begin(config, tmp_path / "run", precision)
    seen = record_order(first, monkeypatch)
    with pytest.raises(Interrupted, match=f"topped at step {stopped_at}"):
        train(first, Watcher().at(event, step))
    assert read_checkpoint(first.folder.last).info.training.step == stopped_at
    torch.manual_seed(12345)  # a new process has a different random state
    second = begin(config, tmp_path / "run", precision)
    seen_later = record_order(second, monkeypatch)
    second.resume()
    assert second.progress.step == stopped_at
    train(second)
    assert seen + seen_later == order
    check_same(second.folder, whole)


@pytest.mark.parametrize(("settings", "precision"), SETTINGS[:2])
@pytest.mark.parametrize(
    ("event", "step", "saved_at"), first_fast([("log", 8, 6), ("sample", 10, 9), ("log", 12, 9)], count=2)
)
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
        take_step = trainer.train_step

        def train_step(share: float, stop=stop, take_step=take_step) -> Step:
            stop.signal_number = int(signal.SIGTERM)
            return take_step(share)

        trainer.train_step = train_step  # type: ignore[method-assign]
        with pytest.raises(Interrupted, match=rf"topped at step {step}\b"):
            train(trainer, Watcher(stop))
    last = begin(config, tmp_path / "run", precision)
    last.resume()
    train(last)
    check_same(last.folder, whole)


@pytest.mark.smoke
def test_an_evaluation_repeated_by_a_resumed_run_is_logged_once(configure, uninterrupted, tmp_path) -> None:
    # The run is stopped when an evaluation is due. The resumed run evaluates and is killed before the next save.
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


def test_dropout_seed_and_learning_rate_change_the_weights(configure, uninterrupted, tmp_path) -> None:
    # Otherwise, the comparisons above could not notice a lost random state.
    settings, precision = SETTINGS[0].values
    whole, _ = uninterrupted(settings, precision)
    weights = load_file(whole.last / WEIGHTS)
    for number, changes in enumerate(({"dropout": 0.0}, {"seed": 1}, {"learning_rate": 9e-3})):
        trainer = begin(configure(**settings, **changes), tmp_path / str(number), precision)
        train(trainer)
        assert not all_equal(load_file(trainer.folder.last / WEIGHTS), weights)


def test_only_training_images_are_flipped_and_shifted(configure, tmp_path, monkeypatch) -> None:
    read: list[Any] = []
    convert = pixel_module.images_to_values

    def recorded(images: Any, shape: ImageShape) -> torch.Tensor:
        read.append(images)
        return convert(images, shape)

    monkeypatch.setattr(pixel_module, "images_to_values", recorded)
    trainer = begin(configure(flip=True, shift=1, steps=2, accumulation=2, sample_every=0), tmp_path / "run")
    order = record_order(trainer, monkeypatch)
    train(trainer)
    stored = [TRAIN.images[indices] for indices in order]
    assert len(read) == 4  # two steps of two batches; validation does not count
    for number, (images, before) in enumerate(zip(read, stored, strict=True)):
        flips, shifts = trainer.task.batches.flips(4 * number, 4), trainer.task.batches.shifts(4 * number, 4, 1)
        assert not (images == shift_images(before, shifts)).all()
        assert not (images == flip_images(before, flips)).all()
        assert (images == shift_images(flip_images(before, flips), shifts)).all()
    # Validation reads the images as they are.
    measured = measure_nats(trainer.task.model, VALIDATION.images).describe()
    assert trainer.progress.validation_bits_per_dim == measured.bits_per_dim


def record_labels(monkeypatch) -> tuple[list[list[int]], list[torch.Tensor | None]]:
    """The labels with which the model computes likelihoods from now on: in training, and in validation."""
    used: list[list[int]] = []
    validated: list[torch.Tensor | None] = []
    nats = PixelModel.nats

    def recorded(self: PixelModel, values: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if self.training:
            used.append(labels.tolist())
        else:
            validated.append(labels)
        return nats(self, values, labels)

    monkeypatch.setattr(PixelModel, "nats", recorded)
    return used, validated


def test_every_image_is_trained_with_its_own_label(configure, tmp_path, monkeypatch) -> None:
    used, _ = record_labels(monkeypatch)
    config = configure(model={"classes": 62}, steps=9, accumulation=2, sample_every=0, evaluate_images=4)
    trainer = begin(config, tmp_path / "run")
    order = record_order(trainer, monkeypatch)
    train(trainer)
    assert TRAIN.labels is not None and VALIDATION.labels is not None
    assert used == [TRAIN.labels[indices].tolist() for indices in order]
    measured = measure_nats(trainer.task.model, VALIDATION.images[:4], labels=VALIDATION.labels).describe()
    assert trainer.progress.validation_bits_per_dim == measured.bits_per_dim


def test_a_share_of_the_classes_is_hidden_and_validation_has_none(configure, tmp_path, monkeypatch) -> None:
    used, validated = record_labels(monkeypatch)
    config = configure(
        model=OPTIONAL, hide_class=0.3, steps=9, batch=20, accumulation=2, sample_every=0, evaluate_images=4
    )
    trainer = begin(config, tmp_path / "run")
    order = record_order(trainer, monkeypatch)
    train(trainer)
    assert TRAIN.labels is not None
    assert set(validated) == {None}
    labels, own = np.array(used), TRAIN.labels[np.array(order)]
    hidden = labels == 62
    assert (labels == own)[~hidden].all()
    assert abs(hidden.mean() - 0.3) < 5 * (0.3 * 0.7 / hidden.size) ** 0.5
    measured = measure_nats(trainer.task.model, VALIDATION.images[:4]).describe()
    assert trainer.progress.validation_bits_per_dim == measured.bits_per_dim


def test_a_model_with_classes_needs_labels(configure, tmp_path, raises_one_line) -> None:
    unlabelled = dataclasses.replace(VALIDATION, labels=None)
    config = configure(model={"classes": 62})
    for images in ((TRAIN, unlabelled), (unlabelled, VALIDATION)):
        with raises_one_line(DataError, "'glyphs' has no labels"):
            PixelTask(config, images, "cpu", "fp32")


def test_bf16_training_changes_the_weights_and_keeps_them_in_float32(configure, uninterrupted) -> None:
    ours, theirs = (uninterrupted({"optimizer": "adamw", "accumulation": 2}, name)[0] for name in ("bf16", "fp32"))
    weights = [load_file(folder.last / WEIGHTS) for folder in (ours, theirs)]
    assert not all_equal(*weights)
    assert {tensor.dtype for tensor in weights[0].values()} == {torch.float32}


def test_the_initial_weights_depend_only_on_the_seed(configure) -> None:
    torch.manual_seed(5)
    ours = build_model(configure(seed=3)).state_dict()
    torch.manual_seed(6)
    assert all_equal(ours, build_model(configure(seed=3, batch=2)).state_dict())
    assert not all_equal(ours, build_model(configure(seed=4)).state_dict())


# Stopping


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_saves_the_run_and_prints_how_to_resume(configure, tmp_path, raises_one_line, number, exit_code) -> None:
    trainer = begin(configure(), tmp_path / "run")
    path = str(tmp_path / "run")
    with raises_one_line(Interrupted, "topped at step 7", "saved", f"lintx train --resume '{path}'") as error:
        train(trainer, Watcher(signal_number=number).at("save", 6))
    assert error.value.exit_code == exit_code
    assert all_equal(load_model(trainer.folder.last).state_dict(), trainer.task.model.state_dict())


@pytest.mark.parametrize("work", ["evaluation", "grid"])
def test_a_stop_does_not_wait_for_an_evaluation_or_a_grid(configure, uninterrupted, tmp_path, monkeypatch, work):
    """The unfinished work is dropped and the run is saved. --resume repeats the work with the same results."""
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

    stop_inside(trainer.task.model, "nats" if work == "evaluation" else "start_tokens")
    if work == "evaluation":  # training also calls `nats`
        monkeypatch.setattr(pixel_module, "measure_nats", lambda *a, **k: measure_nats(*a, batch=2, **k))
    with pytest.raises(Interrupted, match=f"topped at step {EVALUATE_EVERY}, saved"):
        train(trainer, watcher)
    assert len(calls) == 1, "the work continued after the stop"
    assert ("best" if work == "evaluation" else "sample", EVALUATE_EVERY) not in watcher.events
    assert trainer.task.model.training
    again = begin(configure(), tmp_path / "run")
    again.resume()
    train(again)
    check_same(again.folder, whole)


def test_a_run_killed_before_its_first_save_starts_again(configure, uninterrupted, tmp_path) -> None:
    whole, _ = uninterrupted({}, "fp32")
    trainer = begin(configure(), tmp_path / "run")
    row = MetricsRow(step=0, images=0, elapsed_seconds=0.0, validation_bits_per_dim=4.0)
    append_row(trainer.folder.metrics_file, row)
    trainer.resume()
    assert trainer.progress == Progress()
    train(trainer)
    check_same(trainer.folder, whole)


def test_a_run_that_has_lost_its_saves_does_not_start_again(configure, tmp_path, raises_one_line) -> None:
    trainer = begin(configure(), tmp_path / "run")
    train(trainer)
    shutil.rmtree(trainer.folder.last)
    with raises_one_line(CheckpointError, str(trainer.folder.last)):
        begin(configure(), tmp_path / "run").resume()
    assert len(read_metrics(trainer.folder)) > 3


def test_a_run_does_not_continue_with_other_images(configure, tmp_path, raises_one_line) -> None:
    trainer = begin(configure(), tmp_path / "run")
    train(trainer)
    before = read_metrics(trainer.folder)
    fewer = dataclasses.replace(TRAIN, images=TRAIN.images[1:])
    with raises_one_line(DataError, "was trained on 30 images, but 'glyphs' has 29", "start a new run"):
        Trainer(PixelTask(configure(), (fewer, VALIDATION), "cpu", "fp32"), trainer.folder).resume()
    assert read_metrics(trainer.folder) == before


def change_data(kind: str) -> tuple[ImageSet, ImageSet]:
    train, validation = TRAIN.images.copy(), VALIDATION.images.copy()
    labels = TRAIN.labels.copy()
    if kind == "replaced":
        train[7] = 255 - train[7]
    elif kind == "moved":
        train[7], validation[3] = VALIDATION.images[3], TRAIN.images[7]
    elif kind == "relabelled":
        labels[[3, 4]] = labels[[4, 3]]
    elif kind == "reordered":
        train[[3, 4]], labels[[3, 4]] = train[[4, 3]], labels[[4, 3]]
    return dataclasses.replace(TRAIN, images=train, labels=labels), dataclasses.replace(VALIDATION, images=validation)


@loop_over(
    ("kind", "said"),
    [
        ("replaced", "some of the 30 training and 6 validation images were replaced"),
        ("moved", "moved between training and validation"),
        ("relabelled", "other classes"),
        ("reordered", "another order"),
        ("none", ""),
    ],
)
def test_changed_images_are_named_and_refused_unless_they_are_accepted(
    configure, tmp_path, raises_one_line, kind, said
) -> None:
    trainer = begin(configure(), tmp_path / kind)
    train(trainer)
    changed = Trainer(PixelTask(configure(), change_data(kind), "cpu", "fp32"), trainer.folder)
    if said:
        with raises_one_line(DataError, "'glyphs' has changed", said, "--accept-changed-data"):
            changed.resume()
        assert said in changed.resume(accept_changed_data=True)
        train(changed)
        with raises_one_line(DataError, said):  # the run has the changed images now
            begin(configure(), tmp_path / kind).resume()
    assert changed.resume() == ""


def test_a_run_without_a_record_of_its_images_gets_one(configure, tmp_path) -> None:
    trainer = begin(configure(), tmp_path / "run")
    train(trainer)
    trainer.folder.data_file.unlink()
    again = begin(configure(), tmp_path / "run")
    assert again.resume() == ""
    train(again)
    assert trainer.folder.data_file.is_file()


def test_images_of_another_size_are_refused(configure, tmp_path, raises_one_line) -> None:
    for pixels in (TRAIN.images[:, 1:], TRAIN.images[:, :, 1:], TRAIN.images.repeat(3, axis=3)):
        other = dataclasses.replace(TRAIN, images=pixels)
        found = " x ".join(map(str, pixels.shape[1:]))
        with raises_one_line(UsageError, "images of 8 x 8 x 1", f"'glyphs' has {found}"):
            PixelTask(configure(), (other, VALIDATION), "cpu", "fp32")


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_running_out_of_memory_while_resuming_is_not_blamed_on_the_saved_state(configure, tmp_path, monkeypatch, kind):
    train(begin(configure(), tmp_path / "run"))

    def run_out(*_: object) -> None:
        raise kind("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("linformer_cli.training.learner.load_optimizer_tensors", run_out)
    with pytest.raises(kind, match="can't allocate memory"):
        begin(configure(), tmp_path / "run").resume()


def test_a_stop_before_the_first_step_saves(configure, tmp_path) -> None:
    config = configure()
    trainer = begin(config, tmp_path / "run")
    with pytest.raises(Interrupted, match=r"topped at step 0, saved"):
        train(trainer, Watcher(StopRequest(int(signal.SIGINT))))
    again = begin(config, tmp_path / "run")
    again.resume()
    assert again.progress.step == 0


@pytest.mark.parametrize(("device", "kind"), [("mps", "mps"), ("cuda:1", "cuda")])
def test_the_random_state_of_a_device_is_restored(monkeypatch, device, kind) -> None:
    """The device is simulated. The state of another kind of device is ignored."""
    restored: list[torch.Tensor] = []
    state = torch.arange(5, dtype=torch.uint8)
    monkeypatch.setattr(getattr(torch, kind), "get_rng_state", lambda *_: state)
    monkeypatch.setattr(getattr(torch, kind), "set_rng_state", lambda given, *_: restored.append(given))
    saved = random_state(device)
    expected = torch.rand(3)
    restore_random_state(saved, "cpu")
    assert torch.equal(torch.rand(3), expected) and restored == []
    restore_random_state(saved, device)
    assert len(restored) == 1 and torch.equal(restored[0], state)
