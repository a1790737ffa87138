"""Tests of distillation: what teachers predict, what a run learns from them, and which teachers it refuses."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from training_runs import Watcher, begin, train

from linformer_cli.checkpoint import Checkpoint, read_checkpoint, save_checkpoint
from linformer_cli.config import ImageShape, ModelConfig, RunConfig
from linformer_cli.errors import CheckpointError, Interrupted, UsageError
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.training.loop import Trainer
from linformer_cli.training.pixel_task import PixelTask, Teachers
from linformer_cli.training.run_folder import RunFolder
from linformer_cli.training.settings import Given, extend_settings, find_teachers, merge_settings

IMAGE = ImageShape(height=8, width=8, levels=16)


@pytest.fixture
def save(tmp_path: Path, tiny_info) -> Callable[[PixelModel, str], Checkpoint]:
    def write(model: PixelModel, name: str = "teacher") -> Checkpoint:
        save_checkpoint(tmp_path / name, model, tiny_info.model_copy(update={"model": model.config}))
        return read_checkpoint(tmp_path / name)

    return write


@pytest.fixture
def distil(configure, save) -> Callable[..., RunConfig]:
    """Provides `distil(*teachers, **training settings)`, the configuration of a run that learns from them."""

    def build(*teachers: PixelModel, **train) -> RunConfig:
        origins = tuple(save(model, f"teacher-{index}").origin for index, model in enumerate(teachers))
        config = configure(dropout=0.0, sample_every=0, **train)
        return config.model_copy(update={"distill_from": origins})

    return build


def log_probabilities(model: PixelModel, values: Tensor, labels: Tensor | None = None) -> Tensor:
    parameters, _ = model.attend(model.shift_values(values, labels))
    return model.head.log_probabilities(parameters).detach()


# Predictions


@pytest.mark.parametrize("head", ["categorical", "mixture"])
def test_several_teachers_predict_their_geometric_mean(build_tiny_model, head: str) -> None:
    first, second = build_tiny_model(1, head=head), build_tiny_model(2, attention="softmax")
    values = torch.randint(16, (3, 64))
    product = (log_probabilities(first, values).exp() * log_probabilities(second, values).exp()).sqrt()
    expected = product / product.sum(dim=-1, keepdim=True)
    assert torch.allclose(Teachers([first, second]).predict(values, None), expected, atol=1e-6)


@pytest.mark.parametrize("optional", [True, False])
def test_teachers_with_classes_predict_given_the_class(build_tiny_model, optional: bool) -> None:
    teachers = [build_tiny_model(seed, classes=3, optional_class=optional) for seed in (1, 2)]
    values, labels = torch.randint(16, (3, 64)), torch.tensor([2, 0, 3 if optional else 1])
    mean = torch.stack([log_probabilities(model, values, labels) for model in teachers]).mean(dim=0)
    assert torch.allclose(Teachers(teachers).predict(values, labels), mean.softmax(dim=-1), atol=1e-6)


def test_a_class_changes_the_prediction_of_a_teacher_without_classes_as_it_changes_the_others(build_tiny_model) -> None:
    # The parallel form of lsh needs at least one image, so no prediction may be asked for none.
    aware, unaware = build_tiny_model(1, attention="lsh", classes=3, optional_class=True), build_tiny_model(2)
    values, labels = torch.randint(16, (3, 64)), torch.tensor([2, 3, 0])
    given, without = log_probabilities(aware, values, labels), log_probabilities(aware, values)
    other = log_probabilities(unaware, values)
    # The second image has no class.
    assert torch.equal(given[1], without[1]) and not torch.allclose(given, without)
    expected = ((given + other + given - without) / 2).softmax(dim=-1)
    assert torch.allclose(Teachers([aware, unaware]).predict(values, labels), expected, atol=1e-6)
    expected = ((without + other) / 2).softmax(dim=-1)
    for hidden in (None, torch.full((3,), 3)):
        assert torch.allclose(Teachers([aware, unaware]).predict(values, hidden), expected, atol=1e-6)


# Training


def measure_first(trainer: Trainer[PixelTask]) -> tuple[float, float]:
    """The loss and the nats of the first batch."""
    loss, nats = trainer.measure_loss(trainer.task.load_batch(0, trainer.rows))
    return float(loss.detach()), float(nats.detach())


@pytest.mark.parametrize("head", ["categorical", "mixture"])
def test_the_loss_is_a_weighted_mean_of_the_teacher_and_the_images(build_tiny_model, distil, tmp_path, head) -> None:
    teacher, student = build_tiny_model(1, layers=1), {"head": head}
    losses = {}
    for share in (0.0, 0.25, 1.0):
        trainer = begin(distil(teacher, distill_share=share, model=student), tmp_path / str(share))
        losses[share], nats = measure_first(trainer)
    alone, alone_nats = measure_first(begin(distil(model=student), tmp_path / "alone"))
    assert losses[0.0] == pytest.approx(alone, rel=1e-6) == alone_nats
    assert nats == pytest.approx(alone, rel=1e-6)  # with any share, the bits that a run reports are those of the images
    assert losses[1.0] != pytest.approx(alone, rel=1e-3)
    assert losses[0.25] == pytest.approx(0.75 * losses[0.0] + 0.25 * losses[1.0], rel=1e-6)


def test_a_copy_of_the_teacher_has_nothing_to_learn_from_it(build_tiny_model, distil, tmp_path) -> None:
    teacher = build_tiny_model(1, layers=1)
    for share, least, most in ((1.0, 0.0, 1e-5), (0.0, 0.1, math.inf)):
        trainer = begin(distil(teacher, distill_share=share), tmp_path / str(share))
        trainer.task.transfer(teacher)
        assert least <= trainer.train_step().gradient_norm <= most


def test_a_resumed_run_learns_from_the_same_teacher(build_tiny_model, distil, save, tmp_path, raises_one_line) -> None:
    config = distil(build_tiny_model(1, layers=1))
    whole = begin(config, tmp_path / "whole")
    train(whole)
    part = begin(config, tmp_path / "part")
    stopped = Watcher()
    stopped.at("log", 8)
    with pytest.raises(Interrupted):
        train(part, stopped)
    resumed = begin(part.folder.read_config(), tmp_path / "part")
    resumed.resume()
    train(resumed)
    for ours, theirs in zip(resumed.task.model.parameters(), whole.task.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert resumed.folder.last.joinpath("README.md").read_text().count("Distilled from") == 1
    save(build_tiny_model(2, layers=1), "teacher-0")
    with raises_one_line(CheckpointError, "teacher-0", "no longer has the weights"):
        begin(config, tmp_path / "part")


# Settings


def build(teachers: list[Checkpoint], file: Path | None = None, classes: int = 0, **train) -> RunConfig:
    data = {"labels": classes > 0}
    return merge_settings(Given("tiny", data=data, train=train), file).build(IMAGE, classes, teachers)


def test_the_config_of_a_run_names_its_teachers(build_tiny_model, save, tmp_path, raises_one_line) -> None:
    teachers = [save(build_tiny_model(seed), str(seed)) for seed in (1, 2)]
    config = build(find_teachers([str(teacher.path) for teacher in teachers], None))
    assert [origin.checkpoint for origin in config.distill_from] == [str(tmp_path / "1"), str(tmp_path / "2")]
    folder = RunFolder(tmp_path / "run")
    folder.create(config)
    assert folder.read_config() == config
    assert find_teachers([], folder.config_file) == teachers
    assert find_teachers([str(tmp_path / "2")], folder.config_file) == teachers[1:]
    assert find_teachers([], None) == [] == list(build([]).distill_from)
    with raises_one_line(UsageError, "drop --distill-from or start a new run"):
        extend_settings(config, Given(train={"steps": 9}), ("distill_from",))
    text = folder.config_file.read_text()
    folder.config_file.write_text(text.replace(teachers[1].digest, "0" * 64))
    with raises_one_line(CheckpointError, "no longer has the weights"):
        find_teachers([], folder.config_file)
    folder.config_file.write_text("distill_from = 3")
    with raises_one_line(UsageError, "[[distill_from]] must be tables"):
        find_teachers([], folder.config_file)


@pytest.mark.parametrize(
    ("changes", "classes", "train", "fragments"),
    [
        ({"image": {"height": 8, "width": 9, "levels": 16}}, 0, {}, ("8 x 9 x 1", "8 x 8 x 1")),
        ({"classes": 3}, 4, {}, ("3 classes", "has 4")),
        ({"classes": 3}, 0, {}, ("needs the class of every image",)),
        ({"classes": 3}, 3, {"hide_class": 0.5}, ("needs the class of every image",)),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(
    build_tiny_model, save, raises_one_line, changes, classes, train, fragments
) -> None:
    teacher = save(build_tiny_model(1, **changes))
    with raises_one_line(UsageError, "--distill-from", str(teacher.path), *fragments):
        build([teacher], classes=classes, **train)


@pytest.mark.parametrize(
    ("teacher", "classes", "train"),
    [
        ({}, 3, {}),
        ({"classes": 3}, 3, {}),
        ({"classes": 3, "optional_class": True}, 0, {}),
        ({"classes": 3, "optional_class": True}, 3, {}),
        ({"classes": 3, "optional_class": True}, 3, {"hide_class": 0.5}),
    ],
)
def test_a_teacher_may_have_no_classes_or_those_of_the_run(build_tiny_model, save, teacher, classes, train) -> None:
    model = build_tiny_model(1, **teacher)
    config: ModelConfig = build([save(model)], classes=classes, **train).model
    labels = torch.tensor([2, config.default_label]) if config.classes else None
    values = torch.randint(16, (2, 64))
    assert torch.isfinite(Teachers([model]).predict(values, labels)).all()
