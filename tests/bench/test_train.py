"""Training steps: the ones that a run takes, and what is fewer or left out where time is short."""

import gc
import weakref

import pytest
import torch
from machine import HAS_COMPILER

from linformer_cli.bench import train as training_module
from linformer_cli.bench.measure.costs import count_product_flops
from linformer_cli.bench.measure.timing import Timing
from linformer_cli.bench.models import BenchModel, build_models
from linformer_cli.bench.train import Trainers, build_trainer, run_training_bench
from linformer_cli.bench.trained_runs import TrainedRun
from linformer_cli.bench.variants import parse_variants
from linformer_cli.errors import DisagreementError, Interrupted
from linformer_cli.training.loop import Trainer


@pytest.fixture
def subjects(tiny_model_config) -> list[BenchModel]:
    variants = parse_variants(["softmax", "linear:chunk=16"])
    return build_models(variants, [("tiny", tiny_model_config)], "cpu", "fp32")


def test_a_step_is_that_of_a_run(subjects, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = build_trainer(subjects[1].model.config, "mnist-paper", 4, "cpu", "bf16")
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.take_step()
    assert any(not torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))
    assert isinstance(trainer.optimizer, torch.optim.RAdam) and trainer.autocast
    assert trainer.config.train.batch == 4 and trainer.config.train.learning_rate == 1e-4
    assert trainer.train_set.images.max() < 16  # levels
    assert not list(tmp_path.iterdir())


def test_a_model_with_classes_is_told_some(tiny_model_config) -> None:
    trainer = build_trainer(tiny_model_config.model_copy(update={"classes": 3}), None, 4, "cpu", "fp32")
    assert trainer.labels is not None and set(trainer.labels) == {0, 1, 2}
    trainer.take_step()


def test_images_per_second_of_steps(subjects, monkeypatch) -> None:
    monkeypatch.setattr(
        training_module,
        "measure_interleaved",
        lambda works, warm, repeats, device: [Timing((1.0, 2.0, 3.0))] * len(works),
    )
    report = run_training_bench(subjects, [2, 6], 3, "fp32")
    assert [(row["name"], row["batch"]) for row in report.rows] == [
        (name, batch) for batch in (2, 6) for name in ("softmax", "linear-16")
    ]
    row = report.rows[3]
    assert (row["images_per_second"], row["seconds_per_step"], row["repeats"]) == (3.0, 2.0, 3)
    assert row["images_per_second_quartiles"] == [6 / 2.5, 6 / 1.5]
    assert row["samples_seconds"] == [1.0, 2.0, 3.0] and row["reduced"] is None and row["left_out"] is None
    assert row["product_share"] is None and row["bits_per_dim"] is None


def test_a_row_whose_memory_runs_out_takes_no_other_along(subjects, monkeypatch) -> None:
    honest = training_module.build_trainer

    def build(model, preset, batch, device, precision) -> Trainer:
        if model.attention == "softmax" and batch == 4:
            raise MemoryError
        return honest(model, preset, batch, device, precision)

    monkeypatch.setattr(training_module, "build_trainer", build)
    report = run_training_bench(subjects, [2, 4], 1, "fp32")
    left_out = [(row["name"], row["batch"], row["left_out"]) for row in report.rows]
    assert left_out == [
        ("softmax", 2, None),
        ("linear-16", 2, None),
        ("softmax", 4, "needs more memory than there is"),
        ("linear-16", 4, None),
    ]
    assert report.rows[3]["images_per_second"] > 0 and report.rows[2]["images_per_second"] is None


def test_rows_are_held_against_softmax_in_their_own_precision(subjects, monkeypatch) -> None:
    samples = [(4.0, 8.0), (2.0, 2.0), (2.0, 4.0), (0.5, 0.5)]  # softmax, then linear; float32, then bfloat16
    monkeypatch.setattr(training_module, "measure_interleaved", lambda *_: [Timing(turns) for turns in samples])
    report = run_training_bench(subjects, [2], 2, "bf16", engines=["textbook", "auto"])
    assert [row["times_softmax"] for row in report.rows] == [1, 1, 2, 4]


def test_in_one_precision_plain_torch_is_held_against_plain_torch(subjects, monkeypatch) -> None:
    samples = [(4.0,), (2.0,), (8.0,), (0.5,)]  # softmax, then linear; plain torch, then as a run computes
    monkeypatch.setattr(training_module, "measure_interleaved", lambda *_: [Timing(turns) for turns in samples])
    report = run_training_bench(subjects, [2], 1, "fp32", engines=["textbook", "auto"])
    assert [row["times_softmax"] for row in report.rows] == [1, 1, 0.5, 4]


def test_the_textbook_is_plain_torch_in_float32(subjects, monkeypatch) -> None:
    """Both engines of a mechanism take turns; what a row was timed with is what it says."""
    seen: list[tuple[str, bool, bool]] = []

    def take_step(trainer: Trainer) -> None:
        inner = trainer.model.blocks[0].inner
        compiled = inner.is_compiled(torch.device("cpu"), torch.float32)
        seen.append((trainer.config.model.attention, trainer.autocast, compiled))

    monkeypatch.setattr(Trainer, "take_step", take_step)
    report = run_training_bench(subjects, [2], 2, "bf16", engines=["textbook", "auto"])
    kernels = "native" if HAS_COMPILER else "parallel"
    assert [(row["name"], row["engine"], row["precision"]) for row in report.rows] == [
        ("softmax", "textbook", "fp32"),
        ("softmax", "parallel", "bf16"),
        ("linear-16", "textbook", "fp32"),
        ("linear-16", kernels, "bf16"),
    ]
    one_turn = [
        ("softmax", False, False),
        ("softmax", True, False),
        ("linear", False, False),
        ("linear", True, HAS_COMPILER),
    ]
    assert seen == one_turn * 3  # a warm-up and two repeats


def test_shares_count_three_passes(subjects, monkeypatch) -> None:
    class Fixed:
        def product(self, shapes, rows, precision):
            assert rows == 2 * 64
            return type("Ceiling", (), {"gigaflops": {"fp32": 10.0, "bf16": 20.0}[precision]})()

        def describe(self):
            return {"copy": {}, "products": []}

    monkeypatch.setattr(
        training_module, "measure_interleaved", lambda works, warm, repeats, device: [Timing((0.5,))] * len(works)
    )
    row = run_training_bench(subjects[1:], [2], 1, "bf16", ceilings=Fixed()).rows[0]
    done = 2 * 64 * 3 * count_product_flops(subjects[1].model) / 0.5 / 1e9
    assert (row["product_gigaflops"], row["product_share"]) == pytest.approx((done, done / 20))


def test_little_time_means_fewer_repeats_or_none(subjects, monkeypatch) -> None:
    """A clock on which every step takes two seconds."""
    ticks = iter(range(0, 10_000, 2))
    monkeypatch.setattr(training_module.time, "perf_counter", lambda: next(ticks))
    rows = run_training_bench(subjects, [2], 5, "fp32", limit_seconds=7.0, checked=True).rows
    assert [(row["repeats"], row["reduced"]) for row in rows] == [(3, "3 of 5 repeats")] * 2
    rows = run_training_bench(subjects, [2], 5, "fp32", limit_seconds=1.0, checked=True).rows
    for row in rows:
        assert row["left_out"] == "one step took 2 s"
        assert row["images_per_second"] is None and row["samples_seconds"] == []


def test_steps_are_timed_again(subjects, monkeypatch) -> None:
    """In the first call softmax was too slow; in the second all are, and what was timed before is timed again."""
    first = run_training_bench(subjects, [2], 2, "fp32", checked=True).rows
    first[0] |= {"left_out": "one step took 2 s", "samples_seconds": []}
    ticks = iter(range(0, 10_000, 2))
    monkeypatch.setattr(training_module.time, "perf_counter", lambda: next(ticks))
    softmax, linear = run_training_bench(subjects, [2], 2, "fp32", limit_seconds=1.0, checked=True, earlier=first).rows
    assert softmax["left_out"] == "one step took 2 s" and softmax["samples_seconds"] == []
    assert linear["left_out"] is None and linear["samples_seconds"] == [*first[1]["samples_seconds"], 2]


def test_trainers_that_are_kept_are_warmed_up_once(subjects, monkeypatch) -> None:
    steps: list[int] = []
    right = Trainer.take_step
    monkeypatch.setattr(Trainer, "take_step", lambda self: steps.append(id(self)) or right(self))
    kept: Trainers = {}
    rows: list[dict] = []
    for expected in (4, 2, 2):
        rows = run_training_bench(subjects, [2], 1, "fp32", checked=True, earlier=rows, warmed_up=kept).rows
        assert len(steps) == expected and {id(trainer) for trainer in kept.values()} == set(steps)
        steps.clear()
    assert [row["repeats"] for row in rows] == [3, 3]
    assert sorted(name for _, name, *_ in kept) == ["linear-16", "softmax"]


def test_trainers_go_with_their_group(subjects, monkeypatch) -> None:
    alive = weakref.WeakSet()
    honest = training_module.build_trainer

    def build(model, preset, batch, *rest):
        gc.collect()
        assert {trainer.config.train.batch for trainer in alive} <= {batch}
        trainer = honest(model, preset, batch, *rest)
        alive.add(trainer)
        return trainer

    monkeypatch.setattr(training_module, "build_trainer", build)
    run_training_bench(subjects, [2, 3], 1, "fp32", checked=True)


def test_bits_stand_beside_the_model_that_was_trained(subjects, tmp_path) -> None:
    told = []
    run = TrainedRun(tmp_path, subjects[1].model.config, "glyphs", 480, 1.25, 0.01, 90)
    rows = run_training_bench(subjects, [2], 1, "fp32", runs=[run], report=told.append).rows
    assert told == rows and [row["bits_per_dim"] for row in rows] == [None, 1.25]


@pytest.mark.parametrize(
    ("calls", "repeats"),
    [
        (2, []),  # the first step, uncounted, of each
        (4, [1, 1]),
        (7, [2, 2]),  # the third turn was not finished
        (12, [5, 5]),
    ],
)
def test_an_interruption_keeps_the_turns_that_all_have_had(subjects, calls, repeats) -> None:
    left = iter(range(calls))

    def give_up() -> None:
        if next(left, None) is None:
            raise Interrupted("enough", 2)

    report = run_training_bench(subjects, [2, 4], 5, "fp32", check=give_up, checked=True)
    assert report.ended == "interrupted"
    assert [row["repeats"] for row in report.rows] == repeats
    for row in report.rows:
        assert row["batch"] == 2 and len(row["samples_seconds"]) == row["repeats"]
        assert row["reduced"] == (None if row["repeats"] == 5 else f"{row['repeats']} of 5 repeats")
    assert run_training_bench(subjects[:1], [2], 1, "fp32", checked=True).ended == "finished"


def test_nothing_is_timed_that_disagrees(subjects, monkeypatch) -> None:
    monkeypatch.setattr(type(subjects[1].model.blocks[0].inner), "state_bytes", lambda *given: 1)
    monkeypatch.setattr(Trainer, "take_step", lambda self: pytest.fail("timed in spite of a disagreement"))
    with pytest.raises(DisagreementError):
        run_training_bench(subjects[1:], [2], 1, "fp32")
