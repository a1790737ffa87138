"""Tests of the progress of a run, and of the learning rate at a given progress."""

import math

import pytest

from linformer_cli.config import TrainConfig
from linformer_cli.training.task import learning_rate_at, measure_progress


def test_progress_is_the_fraction_of_steps_or_seconds() -> None:
    assert [measure_progress(TrainConfig(steps=8), step, 1e9, 10) for step in (0, 2, 8)] == [0, 0.25, 1]
    assert [measure_progress(TrainConfig(max_time=60), 10**9, seconds, 1) for seconds in (0, 15, 60)] == [0, 0.25, 1]
    for config in (TrainConfig(steps=1), TrainConfig(epochs=0.001), TrainConfig(max_time=0.5)):
        assert measure_progress(config, 10**6, 10.0**6, 10) == 1


def test_progress_in_epochs_counts_the_images_of_all_accumulated_batches() -> None:
    config = TrainConfig(epochs=2.5, batch=4, accumulation=2)
    # 2.5 epochs of 80 images are 200 images. A step has 8 images.
    assert [measure_progress(config, step, 1e9, 80) for step in (0, 5, 25)] == [0, 0.2, 1]
    assert measure_progress(config, 24, 0, 80) < 1


def test_a_time_limits_a_number_of_steps_or_epochs() -> None:
    for length in ({"steps": 10}, {"epochs": 2, "batch": 4}):  # two epochs of 20 images are ten batches of 4
        config = TrainConfig(max_time=60, **length)
        assert [measure_progress(config, step, seconds, 20) for step, seconds in ((5, 15), (1, 45), (10, 0))] == [
            0.5,
            0.75,
            1,
        ]


def test_a_cosine_schedule_falls_from_the_learning_rate_to_its_minimum() -> None:
    config = TrainConfig(steps=1, learning_rate=0.5, final_learning_rate_fraction=0.1, warmup_steps=0)
    rates = [learning_rate_at(config, 0, progress) for progress in (0, 0.25, 0.5, 1)]
    expected = [0.5, 0.05 + 0.45 * (1 + math.cos(math.pi / 4)) / 2, 0.05 + 0.45 / 2, 0.05]
    assert rates == pytest.approx(expected, rel=1e-12)


def test_a_trapezoid_schedule_is_constant_and_falls_linearly_in_the_last_quarter() -> None:
    config = TrainConfig(
        steps=1, learning_rate=0.5, final_learning_rate_fraction=0.1, schedule="trapezoid", warmup_steps=0
    )
    rates = [learning_rate_at(config, 0, progress) for progress in (0, 0.5, 0.75, 0.875, 1)]
    assert rates == pytest.approx([0.5, 0.5, 0.5, 0.05 + 0.45 / 2, 0.05], rel=1e-12)


@pytest.mark.parametrize("schedule", ["constant", "trapezoid", "cosine"])
def test_the_warm_up_is_linear_and_starts_above_zero(schedule) -> None:
    config = TrainConfig(steps=1, learning_rate=0.5, schedule=schedule, warmup_steps=4)
    whole = config.model_copy(update={"warmup_steps": 0})
    shares = [learning_rate_at(config, step, 0.3) / learning_rate_at(whole, step, 0.3) for step in range(7)]
    assert shares == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1], rel=1e-12)


def test_the_warm_up_ends_after_a_share_of_a_short_run() -> None:
    config = TrainConfig(steps=40, learning_rate=0.5, schedule="constant", warmup_share=0.05)
    rates = [learning_rate_at(config, step, step / 40) for step in range(4)]
    assert rates == pytest.approx([0.5 / 101, 0.25, 0.5, 0.5])
    assert learning_rate_at(config, 100, 0.01) == 0.5  # a long run has warmed up before


def test_the_time_of_a_run_includes_its_last_validation() -> None:
    config = TrainConfig(max_time=60)
    assert measure_progress(config, 0, 50, 1, ending_seconds=10) == 1
    assert measure_progress(config, 0, 15, 1, ending_seconds=1000) == 0.5  # at least half of the time is for training
