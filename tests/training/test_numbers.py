"""Tests of NaN, infinity and jumping losses: what is reported and which saves are kept."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from training_runs import STEPS, Watcher, begin, train

from linformer_cli.checkpoint import load_training_state, read_checkpoint
from linformer_cli.errors import Interrupted, TrainingError
from linformer_cli.training.learner import Step
from linformer_cli.training.loop import Trainer
from linformer_cli.training.pixel_task import PixelTask
from linformer_cli.training.progress import LossTrend


def poison(trainer: Trainer[PixelTask]) -> Callable[[], None]:
    def action() -> None:
        with torch.no_grad():
            trainer.task.model.head.projection.bias[0] = math.nan

    return action


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_error_for_a_nan_loss_names_the_step_and_keeps_the_last_checkpoint(
    configure, tmp_path, raises_one_line, precision
) -> None:
    trainer = begin(configure(), tmp_path / "run", precision)
    watcher = Watcher()
    watcher.at("log", 4, poison(trainer))
    with raises_one_line(TrainingError, "NaN or infinite at step 4", str(trainer.folder.last), "--learning-rate"):
        train(trainer, watcher)
    again = begin(configure(), tmp_path / "run", precision)
    again.resume()
    assert again.progress.step == 3
    assert all(bool(torch.isfinite(parameter).all()) for parameter in again.task.model.parameters())
    train(again)
    assert again.progress.step == STEPS


def test_a_save_whose_loss_is_nan_is_replaced_by_the_save_before_it(configure, tmp_path, raises_one_line) -> None:
    trainer = begin(configure(sample_every=6, keep_last=2), tmp_path / "run")
    good = f"the last good checkpoint is '{trainer.folder.last}'"
    with raises_one_line(TrainingError, "NaN or infinite at step 6", good):
        train(trainer, Watcher().at("sample", 6, poison(trainer)))  # before the save of step 6
    assert read_checkpoint(trainer.folder.last).info.training.step == 3
    assert [path.name for path in trainer.folder.kept.iterdir()] == ["step-0000003"]
    again = begin(configure(), tmp_path / "run")
    again.resume()
    train(again)
    assert again.progress.step == STEPS


def test_the_error_does_not_name_a_good_checkpoint_if_there_is_none(configure, tmp_path, raises_one_line) -> None:
    trainer = begin(configure(), tmp_path / "run")
    poison(trainer)()
    with raises_one_line(TrainingError, "NaN or infinite at step 0", "there is no good checkpoint"):
        train(trainer)


def test_a_nan_gradient_is_noticed_before_the_weights_change(configure, tmp_path, monkeypatch) -> None:
    trainer = begin(configure(), tmp_path / "run")
    measure_loss = trainer.measure_loss

    def broken(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, nats = measure_loss(batch)
        if trainer.progress.step == 2:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss, nats

    monkeypatch.setattr(trainer, "measure_loss", broken)
    with pytest.raises(TrainingError, match="step 2"):
        train(trainer)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in trainer.task.model.parameters())


@pytest.mark.parametrize("finished", [False, True])
def test_a_nan_evaluation_gives_a_one_line_error_and_saves_no_best_checkpoint(
    configure, tmp_path, raises_one_line, finished
) -> None:
    # The weights become NaN after the last step, so the evaluation is the first to notice.
    trainer = begin(configure(steps=4 if finished else STEPS, evaluate_every=4), tmp_path / "run")
    watcher = Watcher()
    watcher.at("log", 4, poison(trainer))
    with raises_one_line(TrainingError, "NaN or infinite", "step 4"):
        train(trainer, watcher)
    assert not trainer.folder.best.exists()
    assert read_checkpoint(trainer.folder.last).info.training.step == 3


def test_the_error_of_a_failing_step_names_its_images(configure, tmp_path) -> None:
    trainer = begin(configure(), tmp_path / "run")
    watcher = Watcher()
    watcher.at("log", 8, poison(trainer))
    with pytest.raises(TrainingError) as error:
        train(trainer, watcher)
    # There are 30 images. After 8 steps of 4 images, the ninth batch starts at the third image of epoch 2.
    images = ", ".join(map(str, trainer.task.batches.batch(32, 3)))
    assert f"at step 8 (loss nan, gradient norm nan), batch 1 of epoch 2 (training images {images}, ...)" in str(
        error.value
    )


def let_loss_jump(trainer: Trainer[PixelTask], monkeypatch: pytest.MonkeyPatch, step: int) -> list[float]:
    """Multiply the loss by 100 for four steps from `step` on, and return a list that training fills with all losses."""
    train_step, losses = trainer.train_step, []

    def jumping(share: float) -> Step:
        taken = train_step(share)
        losses.append(100 * taken.nats if step < trainer.progress.step <= step + 4 else taken.nats)
        return replace(taken, nats=losses[-1])

    monkeypatch.setattr(trainer, "train_step", jumping)
    return losses


# The loss of step 60 belongs to the weights saved at step 60.
@pytest.mark.parametrize(("jump", "saved"), [(60, 55), (61, 60)])
def test_the_save_kept_at_a_spike_is_from_before_the_spike(configure, tmp_path, monkeypatch, jump, saved) -> None:
    trainer = begin(configure(steps=64, evaluate_every=100, sample_every=0, save_every=5), tmp_path / "run")
    let_loss_jump(trainer, monkeypatch, jump)
    assert len(train(trainer).spikes) == 1
    kept = read_checkpoint(trainer.folder.kept / f"before-spike-00000{jump}")
    assert kept.info.training.step == saved and load_training_state(kept).values["step"] == saved
    assert not trainer.folder.previous.exists()


def test_a_spike_in_the_first_step_of_a_resumed_run_keeps_the_earlier_save(configure, tmp_path, monkeypatch) -> None:
    config = configure(steps=64, evaluate_every=100, sample_every=0, save_every=5, log_every=5)
    with pytest.raises(Interrupted):
        train(begin(config, tmp_path / "run"), Watcher().at("log", 60))
    resumed = begin(config, tmp_path / "run")
    resumed.resume()
    let_loss_jump(resumed, monkeypatch, 60)
    assert len(train(resumed).spikes) == 1
    assert read_checkpoint(resumed.folder.kept / "before-spike-0000060").info.training.step == 55


def test_training_continues_if_the_save_before_a_spike_cannot_be_kept(configure, tmp_path, monkeypatch) -> None:
    trainer = begin(configure(steps=70, evaluate_every=100, sample_every=0, save_every=5), tmp_path / "run")
    let_loss_jump(trainer, monkeypatch, 63)
    (trainer.folder.path / "kept").write_text("in the way")
    (message,) = train(trainer).spikes
    assert "the save before it could not be kept: cannot read or write" in message
    assert read_checkpoint(trainer.folder.last).info.training.step == 70


def test_a_spike_is_reported_once_and_the_save_before_it_kept(configure, tmp_path, monkeypatch) -> None:
    trainer = begin(configure(steps=70, evaluate_every=100, sample_every=0, save_every=5), tmp_path / "run")
    losses = let_loss_jump(trainer, monkeypatch, 63)
    watcher = train(trainer)
    (message,) = watcher.spikes
    kept = trainer.folder.kept / "before-spike-0000063"
    images = ", ".join(map(str, trainer.task.batches.batch(63 * 4, 3)))
    assert f"at step 63, batch 4 of epoch 9 (training images {images}, ...)" in message
    trend = functools.reduce(LossTrend.follow, losses[:63], LossTrend())
    before, after = (nats / math.log(2) for nats in (trend.mean, losses[63]))
    assert f"the loss jumped from {before:.3f} to {after:.3f} bits/dim" in message
    assert str(kept) in message
    assert read_checkpoint(kept).info.training.step == 60
    assert load_training_state(read_checkpoint(kept)).values["step"] == 60


def test_a_trend_distinguishes_noise_from_a_jump() -> None:
    trend = LossTrend()
    noise = torch.Generator().manual_seed(0)
    for step in range(400):  # a falling loss with 10 % noise
        trend = trend.follow((0.5 + 3 * 0.97**step) * (1 + 0.1 * float(torch.randn((), generator=noise))))
        assert not trend.high, step
    assert trend.mean == pytest.approx(0.5, abs=0.05)
    assert trend.follow(1.2).high
    lasting = trend
    for _ in range(200):
        lasting = lasting.follow(1.2)
    assert not lasting.high, "a lasting new level must become normal"
    assert not LossTrend().follow(9.0).high, "there is no trend before the first loss"
    assert trend.follow(1e6).mean == pytest.approx(0.5, abs=0.05), "an outlier must move the trend little"


def test_a_jump_is_far_above_both_the_mean_and_the_noise() -> None:
    noisy = functools.reduce(LossTrend.follow, [1.0, 3.0] * 100, LossTrend())
    assert not noisy.follow(5.0).high
    assert noisy.follow(20.0).high
    steady = functools.reduce(LossTrend.follow, [1.0] * 200, LossTrend())
    assert not steady.follow(1.4).high
    assert steady.follow(1.6).high
