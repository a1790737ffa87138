"""Tests of `bench train`: its steps, and rows that are shortened or left out when time is short."""

from typing import Any

import pytest
import torch
from fixed_ceilings import FixedCeilings
from machine import HAS_LIBRARY

from linformer_cli.bench.measure.ceilings import count_product_flops
from linformer_cli.bench.models import BenchModel, build_models
from linformer_cli.bench.rounds import Bench, BenchReport
from linformer_cli.bench.rows import TrainingRow
from linformer_cli.bench.train import TrainingSettings, build_trainer, prepare, run_training_bench
from linformer_cli.errors import DisagreementError
from linformer_cli.evaluation.agreement import require_agreement
from linformer_cli.model.mixers import parse_variants
from linformer_cli.training.loop import Trainer
from linformer_cli.training.pixel_task import PixelTask


@pytest.fixture
def models(tiny_model_config, monkeypatch) -> list[BenchModel]:
    """Models whose attend and step are not compared, which would take longer than the measurements."""
    monkeypatch.setattr("linformer_cli.bench.models.require_agreement", lambda model: None)
    variants = parse_variants(["softmax", "linear:chunk=16"])
    return build_models(variants, [("tiny", tiny_model_config)], "cpu", "fp32")


def bench(
    models: list[BenchModel], batches: list[int], repeats: int, precision: str = "fp32", **changes: Any
) -> BenchReport[TrainingRow]:
    ceilings = changes.pop("ceilings", FixedCeilings())
    calls = {name: changes.pop(name) for name in ("report", "check") if name in changes}
    engines = changes.pop("engines", [("auto", precision)])
    return run_training_bench(models, TrainingSettings(batches, engines, repeats, **changes), Bench(ceilings, **calls))


def test_a_timed_step_trains_the_model_as_in_a_run(models, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = build_trainer(models[1].model.config, "mnist-paper", 4, "cpu", "bf16")
    before = [parameter.clone() for parameter in trainer.task.model.parameters()]
    trainer.train_step()
    assert any(not torch.equal(old, new) for old, new in zip(before, trainer.task.model.parameters(), strict=True))
    assert isinstance(trainer.task.optimizer, torch.optim.RAdam) and trainer.task.autocast
    assert trainer.task.config.train.batch == 4 and trainer.task.config.train.learning_rate == 1e-4
    assert trainer.task.training.images.max() < 16  # 16 levels
    assert not list(tmp_path.iterdir())


def test_a_model_with_classes_gets_labels(tiny_model_config) -> None:
    trainer = build_trainer(tiny_model_config.model_copy(update={"classes": 3}), None, 4, "cpu", "fp32")
    assert trainer.task.labels is not None and set(trainer.task.labels) == {0, 1, 2}
    trainer.train_step()


def test_images_per_second_are_computed_from_the_median_step(models, clock) -> None:
    clock.take(*[9.0, 9.0, 4.0, 1.0, 8.0, 2.0, 12.0, 3.0] * 2)  # two warm-ups and three rounds
    report = bench(models, [2, 6], 3)
    assert [(row.name, row.batch) for row in report.rows] == [
        (name, batch) for batch in (2, 6) for name in ("softmax", "linear-16")
    ]
    row = report.rows[3]
    assert (row.images_per_second, row.seconds_per_step, row.repeats) == (3.0, 2.0, 3)
    assert row.images_per_second_quartiles == (6 / 2.5, 6 / 1.5)
    assert row.samples_seconds == [1.0, 2.0, 3.0] and row.reduced is None and row.left_out is None
    assert row.bits_per_dim is None and row.times_softmax == 4
    assert report.rows[2].samples_seconds == [4.0, 8.0, 12.0]


def test_the_reference_engine_is_plain_torch_in_both_precisions(models, monkeypatch) -> None:
    """The engines of a mechanism take turns, and a row names its engine and precision."""
    seen: list[tuple[str, bool, bool]] = []

    def take_step(trainer: Trainer[PixelTask]) -> None:
        inner = trainer.task.model.blocks[0].inner
        compiled = inner.is_compiled(torch.device("cpu"), torch.float32)
        seen.append((trainer.task.config.model.attention, trainer.task.autocast, compiled))

    monkeypatch.setattr(Trainer, "train_step", take_step)
    engines = [("reference", "fp32"), ("reference", "bf16"), ("auto", "bf16")]
    rows = bench(models, [2], 2, engines=engines).rows
    kernels = "native" if HAS_LIBRARY else "parallel"
    assert [(row.name, row.engine, row.precision) for row in rows] == [
        (name, engine, precision)
        for name, auto in (("softmax", "parallel"), ("linear-16", kernels))
        for engine, precision in (("reference", "fp32"), ("reference", "bf16"), (auto, "bf16"))
    ]
    one_turn = [
        (name, autocast, autocast and compiled and HAS_LIBRARY)
        for name in ("softmax", "linear")
        for autocast, compiled in ((False, False), (True, False), (True, name == "linear"))
    ]
    assert sorted(seen) == sorted(one_turn * 3)  # a warm-up and two repeats
    assert seen[-len(one_turn) :] == one_turn


def test_shares_count_a_training_step_as_three_passes(models, clock, ceilings) -> None:
    clock.take(0.5)
    (row,) = bench(models[1:], [2], 1, "bf16", ceilings=ceilings).rows
    done = 2 * 64 * 3 * count_product_flops(models[1].model) / 0.5 / 1e9
    assert (row.product_gigaflops, row.product_share) == pytest.approx((done, done / 200))
    assert set(ceilings.asked) == {(2 * 64, "fp32"), (2 * 64, "bf16")}


def test_a_short_limit_gives_fewer_repeats_or_none(models, clock) -> None:
    rows = bench(models, [2], 5, limit_seconds=7.0).rows
    assert [(row.repeats, row.reduced) for row in rows] == [(3, "3 of 5 repeats")] * 2
    rows = bench(models, [2], 5, limit_seconds=1.0).rows
    assert [row.left_out for row in rows] == ["one step took 2 s"] * 2
    for row in rows:
        assert row.images_per_second is None and row.samples_seconds == [] and row.reduced is None


def test_the_limit_does_not_end_repeats_in_separate_rounds(models, clock, ceilings) -> None:
    """`bench paper` takes one repeat in each of many rounds."""
    settings = TrainingSettings([2], [("auto", "fp32")], 1, limit_seconds=3.0)
    ((measurement,),) = prepare(models[1:], settings, Bench(ceilings))
    measurement.make_ready()
    for _ in range(5):
        measurement.measure_round()
    assert measurement.samples == [2.0] * 5 and measurement.row().reduced is None


def test_a_mechanism_whose_attend_and_step_disagree_is_not_timed(models, clock, monkeypatch) -> None:
    monkeypatch.setattr("linformer_cli.bench.models.require_agreement", require_agreement)
    monkeypatch.setattr(type(models[1].model), "state_bytes", lambda *given: 1)
    with pytest.raises(DisagreementError):
        bench(models[1:], [2], 1)
    assert clock.timed == 0
