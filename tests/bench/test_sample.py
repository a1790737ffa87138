"""The benchmark: what its rows say, what is marked as extrapolated, and what it refuses to time."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from machine import FASTEST_ENGINE

from linformer_cli.attention.linear import LinearAttention
from linformer_cli.attention.softmax import SoftmaxAttention
from linformer_cli.bench import sample as run_module
from linformer_cli.bench.measure.sampling_work import SHARES, WARM_UP_STEPS, build_rerun_case, build_step_case
from linformer_cli.bench.measure.timing import Timing
from linformer_cli.bench.models import BenchModel, build_softmax_twin, with_softmax
from linformer_cli.bench.sample import BenchReport, SamplingPlan, run_sampling_bench
from linformer_cli.bench.trained_runs import UNTRAINED
from linformer_cli.config import ImageShape
from linformer_cli.errors import DisagreementError
from linformer_cli.model.pixel_model import PixelModel

MEASURED = {"images_per_second", "images_per_second_quartiles", "seconds_per_image"}
COMMON = {
    "positions",
    "name",
    "preset",
    "attention",
    "attention_options",
    "engine",
    "precision",
    "device",
    "batch",
    "state_bytes",
    "state_bytes_per_image",
    "repeats",
    "samples_seconds",
    "times_softmax",
    "left_out",
    "peak_memory_bytes",
    "published",
    "product_gigaflops",
    "product_share",
    "state_gigabytes",
    "copy_share",
    *UNTRAINED,
}
Works = Sequence[Callable[[], object]]
SECONDS = (2.0, 4.0, 8.0, 16.0, 32.0)


@pytest.fixture
def model(build_tiny_model) -> PixelModel:
    return build_tiny_model(image=ImageShape(height=4, width=8, levels=16))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every case takes 2, 4, 8, 16 and 32 seconds; the works are run once, their number kept by batch size."""
    turns: list[int] = []

    def measure(works: Works, warm_ups: Works, repeats: int, device: str) -> list[Timing]:
        assert device == "cpu"
        assert len(warm_ups) == len(works)
        for work in (*warm_ups, *works):
            work()
        turns.append(len(works))
        return [Timing(SECONDS[:repeats]) for _ in works]

    monkeypatch.setattr(run_module, "measure_interleaved", measure)
    return turns


def bench(model: PixelModel, batches: list[int], repeats: int, rerun: bool = True) -> BenchReport:
    """A model beside softmax, as `lintx bench sample` does without options, and without a limit."""
    return run_sampling_bench(with_softmax("shipped", model), SamplingPlan(batches, repeats, rerun), "fp32")


def find(report: BenchReport, **wanted: Any) -> dict[str, Any]:
    (row,) = [row for row in report.rows if all(row[key] == value for key, value in wanted.items())]
    return row


def test_a_model_stands_beside_softmax_with_and_without_a_cache(model, timed) -> None:
    report = bench(model, [1, 3], 5)
    found = [(row["attention"], row["engine"], row["batch"]) for row in report.rows]
    kinds = [("linear", FASTEST_ENGINE), ("softmax", "cached"), ("softmax", "rerun")]
    assert found == [(*kind, batch) for batch in (1, 3) for kind in kinds]
    assert timed == [3, 3]  # all of a batch size in turn
    for row in report.rows:
        assert set(row) >= COMMON
        assert (row["precision"], row["device"], row["repeats"]) == ("fp32", "cpu", 5)
        assert row["samples_seconds"] == list(SECONDS)


def test_the_rerun_can_be_left_out(model, timed) -> None:
    report = bench(model, [2], 1, rerun=False)
    assert [row["engine"] for row in report.rows] == [FASTEST_ENGINE, "cached"]


def test_softmax_itself_needs_no_twin(build_tiny_model, timed) -> None:
    softmax = build_tiny_model(attention="softmax", image=ImageShape(height=4, width=8, levels=16))
    report = bench(softmax, [2], 1)
    assert [(row["attention"], row["engine"]) for row in report.rows] == [("softmax", "cached"), ("softmax", "rerun")]


def test_whole_images_are_measured(model, timed) -> None:
    report = bench(model, [3], 5)
    for row in (find(report, engine=FASTEST_ENGINE), find(report, engine="cached")):
        assert set(row) == COMMON | MEASURED
        # Three images in 8 seconds at the median, in 4 and 16 at the quartiles.
        assert row["images_per_second"] == 3 / 8
        assert row["images_per_second_quartiles"] == [3 / 16, 3 / 4]
        assert row["seconds_per_image"] == pytest.approx(8 / 3, rel=1e-12)


def test_a_rerun_is_extrapolated_and_says_nothing_else(model, timed) -> None:
    row = find(bench(model, [3], 5), engine="rerun")
    assert set(row) == COMMON | {"extrapolated"}
    figures = row["extrapolated"]
    assert set(figures) == MEASURED | {"timed_positions", "of_positions"}
    assert (figures["timed_positions"], figures["of_positions"]) == (4, 32)
    # Four of 32 positions in 8 seconds: a whole batch of three takes 64.
    assert figures["images_per_second"] == pytest.approx(3 / 64, rel=1e-12)
    assert figures["images_per_second_quartiles"] == pytest.approx([3 / 128, 3 / 32], rel=1e-12)
    assert figures["seconds_per_image"] == pytest.approx(64 / 3, rel=1e-12)


def test_rows_say_how_many_times_as_fast_as_softmax_with_a_cache(model, monkeypatch) -> None:
    samples = {"linear": (1.0, 2.0, 9.0), "cached": (4.0, 8.0, 9.0), "rerun": (8.0, 1.0, 9.0)}
    monkeypatch.setattr(run_module, "measure_interleaved", lambda *_: [Timing(turns) for turns in samples.values()])
    report = bench(model, [3], 3)
    # Turn by turn: 4, 4 and 1 times. The re-run has done four of 32 positions in its time: 1/16, 1 and 1/8 times.
    expected = {FASTEST_ENGINE: 4, "cached": 1, "rerun": 1 / 8}
    assert {row["engine"]: row["times_softmax"] for row in report.rows} == pytest.approx(expected, rel=1e-12)


def test_a_rival_has_the_same_network(model, build_tiny_model, monkeypatch) -> None:
    larger = build_tiny_model(image=ImageShape(height=8, width=8, levels=16), attention="softmax", dropout=0.1)
    wide = build_tiny_model(image=ImageShape(height=8, width=8, levels=16))
    subjects = [*with_softmax("small", model), BenchModel("large", larger), BenchModel("wide", wide)]
    seconds = [2.0, 4.0, 1.0, 8.0]
    monkeypatch.setattr(run_module, "measure_interleaved", lambda *_: [Timing((number,)) for number in seconds])
    report = run_sampling_bench(subjects, SamplingPlan([2], 1, rerun=False), "fp32")
    assert [row["times_softmax"] for row in report.rows] == [2, 1, 1, 1 / 8]


def test_without_softmax_nothing_is_said_of_it(model, timed) -> None:
    report = run_sampling_bench(with_softmax("shipped", model)[:1], SamplingPlan([2], 2), "fp32")
    assert [row["times_softmax"] for row in report.rows] == [None]


def test_state_bytes_are_those_of_the_batch(model, timed) -> None:
    report = bench(model, [1, 3], 1)
    for batch in (1, 3):
        for engine, candidate in ((FASTEST_ENGINE, model), ("cached", build_softmax_twin(model))):
            row = find(report, engine=engine, batch=batch)
            assert row["state_bytes"] == candidate.state_bytes(batch)
            assert row["state_bytes_per_image"] == row["state_bytes"] // batch
        assert find(report, engine="rerun", batch=batch)["state_bytes"] == 0


def test_what_the_figures_depend_on_stands_beside_them(model, timed) -> None:
    report = bench(model, [1], 5)
    settings = report.settings
    assert (settings["repeats"], settings["warm_up_steps"], settings["interleaved"]) == (5, WARM_UP_STEPS, True)
    network = settings["networks"][0]
    assert network["image"] == {"height": 4, "width": 8, "channels": 1, "levels": 16}
    assert network["parameters"] == model.parameter_count()
    assert report.environment["versions"]["torch"]
    assert report.environment["threads"] == torch.get_num_threads()
    json.dumps([report.rows, settings, report.environment])


def test_a_whole_run_really_times(model) -> None:
    report = bench(model, [2], 2)
    for row in report.rows:
        assert len(row["samples_seconds"]) == 2
        assert min(row["samples_seconds"]) > 0
        assert (row.get("extrapolated") or row)["images_per_second"] > 0


@pytest.mark.parametrize("limit", [None, 60.0])
def test_a_row_whose_memory_runs_out_takes_no_other_along(model, timed, monkeypatch, limit) -> None:
    honest = run_module.build_rerun_case

    def build(model: PixelModel, batch: int, check: Any) -> Any:
        if batch == 3:
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes")
        return honest(model, batch, check)

    monkeypatch.setattr(run_module, "build_rerun_case", build)
    plan = SamplingPlan([1, 3], 2, limit_seconds=limit)
    report = run_sampling_bench(with_softmax("shipped", model), plan, "fp32")
    left_out = {(row["engine"], row["batch"]): row["left_out"] for row in report.rows}
    assert len(left_out) == 6 and report.ended == "finished"
    assert left_out.pop(("rerun", 3)) == "needs more memory than there is"
    assert set(left_out.values()) == {None}


def test_a_small_image_is_timed_whole_where_there_are_more_repeats_than_values(build_tiny_model) -> None:
    model = build_tiny_model(image=ImageShape(height=5, width=6, levels=16))
    report = run_sampling_bench(with_softmax("shipped", model), SamplingPlan([1], 30, False, 1e-3), "fp32")
    for row in report.rows:
        assert len(row["samples_seconds"]) == 30 and "extrapolated" not in row


# The twin and the cases


def test_the_twin_has_the_same_size_and_softmax(build_tiny_model) -> None:
    model = build_tiny_model(dtype=torch.float64)
    twin = build_softmax_twin(model)
    assert twin.config.attention == "softmax"
    assert twin.config.model_copy(update={"attention": "linear", "attention_options": {"chunk": 16}}) == model.config
    assert twin.dtype == torch.float64
    assert not twin.training
    assert twin.parameter_count() == model.parameter_count()


def test_a_step_case_draws_whole_images(model, monkeypatch) -> None:
    steps = []
    take_step = PixelModel.step

    def counted(self: PixelModel, tokens_t: torch.Tensor, state: Any) -> Any:
        steps.append(len(tokens_t))
        return take_step(self, tokens_t, state)

    case = build_step_case(model, 3, engine="textbook")
    monkeypatch.setattr(PixelModel, "step", counted)
    case.work(case.steps)
    assert steps == [3] * 32
    assert case.is_whole(32)
    assert not case.is_whole(33)


def test_a_warm_up_is_a_few_steps_of_the_same_work(build_tiny_model) -> None:
    model = build_tiny_model(image=ImageShape(height=8, width=8, levels=16))
    for build, expected in ((build_step_case, WARM_UP_STEPS), (build_rerun_case, 1)):
        case, steps = build(model, 3), []
        dataclasses.replace(case, work=steps.append).warm_up()
        assert steps == [expected]
    assert WARM_UP_STEPS < 64


def test_a_rerun_case_reads_prefixes_whose_mean_is_half_the_image(model, monkeypatch) -> None:
    shapes = []
    attend = PixelModel.attend

    def watched(self: PixelModel, tokens: torch.Tensor, state: Any = None) -> Any:
        assert state is None
        shapes.append(tuple(tokens.shape))
        return attend(self, tokens, state)

    case = build_rerun_case(model, 3)
    monkeypatch.setattr(PixelModel, "attend", watched)
    case.work(case.steps)
    assert shapes == [(3, 4), (3, 12), (3, 20), (3, 28)]
    assert sum(SHARES) / len(SHARES) == 0.5
    assert case.steps == 4
    assert not case.is_whole(32)


# Refusals


def refuse_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_arguments: object) -> None:
        raise AssertionError("timed in spite of a disagreement")

    monkeypatch.setattr(run_module, "measure_interleaved", measure)


@pytest.mark.parametrize("mechanism", [LinearAttention, SoftmaxAttention])
def test_a_mechanism_whose_executions_disagree_is_not_timed(model, monkeypatch, raises_one_line, mechanism) -> None:
    right = mechanism.step

    def wrong(self: Any, q_t: torch.Tensor, k_t: torch.Tensor, v_t: torch.Tensor, *rest: Any) -> Any:
        return right(self, q_t, k_t, v_t * 1.01, *rest)

    monkeypatch.setattr(mechanism, "step", wrong)
    refuse_timing(monkeypatch)
    with raises_one_line(DisagreementError, f"'{mechanism.name}' is not timed", "parallel against step", "lintx check"):
        bench(model, [1], 1)


def test_a_mechanism_that_hides_bytes_is_not_timed(model, monkeypatch, raises_one_line) -> None:
    monkeypatch.setattr(LinearAttention, "state_bytes", lambda *_arguments: 1)
    refuse_timing(monkeypatch)
    with raises_one_line(DisagreementError, "'linear' is not timed", "bytes"):
        bench(model, [1], 1)
