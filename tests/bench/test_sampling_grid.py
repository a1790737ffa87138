"""Sampling over mechanisms, batch sizes and networks: what is shortened, left out, shared and looked up."""

import dataclasses
import json
from collections.abc import Sequence

import pytest
import torch
from machine import FASTEST_ENGINE, HAS_COMPILER, TIMED_ENGINE

from linformer_cli.bench import sample as run_module
from linformer_cli.bench.measure.ceilings import Ceilings, CopyCeiling, ProductCeiling
from linformer_cli.bench.measure.costs import count_product_flops, count_rerun_positions, state_traffic_bytes
from linformer_cli.bench.measure.sampling_work import build_middle_case, build_step_case, place_state
from linformer_cli.bench.measure.timing import Timing
from linformer_cli.bench.models import BenchModel, build_models
from linformer_cli.bench.sample import SamplingPlan, run_sampling_bench
from linformer_cli.bench.trained_runs import TrainedRun
from linformer_cli.bench.variants import parse_variants
from linformer_cli.errors import Interrupted
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.sampling.choose import UniformStreams

needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="the native engine needs a C++ compiler")


@pytest.fixture
def subjects(tiny_model_config) -> list[BenchModel]:
    variants = parse_variants(["softmax", "linear:chunk=16", "lsh-1=lsh:rounds=1"])
    small = tiny_model_config.model_copy(update={"layers": 1})
    return build_models(variants, [("one", tiny_model_config), ("two", small)], "cpu", "fp32")


class FixedCeilings(Ceilings):
    """100 GFLOP/s in float32, 200 in bfloat16, 10 GB/s."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.asked: list[tuple[int, str]] = []

    def product(self, shapes, rows, precision):
        self.asked.append((rows, precision))
        return ProductCeiling(rows, precision, {"fp32": 100.0, "bf16": 200.0}[precision], (1.0, 1.0), 1, (1.0,))

    @property
    def copy(self) -> CopyCeiling:
        return CopyCeiling(10.0, 1, (1.0,))


def fix_seconds(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    def measure(works, warm_ups, repeats, device):
        for work in works:
            work()
        return [Timing((seconds,) * repeats) for _ in works]

    monkeypatch.setattr(run_module, "measure_interleaved", measure)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The numbers of the images of every batch that is begun."""
    begun: list[list[int]] = []

    def record(seed: int, indices: Sequence[int]) -> UniformStreams:
        begun.append(list(indices))
        return UniformStreams(seed, indices)

    monkeypatch.setattr("linformer_cli.bench.measure.sampling_work.UniformStreams", record)
    return begun


def test_every_mechanism_in_every_network_at_every_batch_size(subjects, monkeypatch) -> None:
    fix_seconds(monkeypatch, 2.0)
    told = []
    report = run_sampling_bench(subjects, SamplingPlan([1, 2], 3), "fp32", report=told.append)
    found = [(row["preset"], row["name"], row["engine"], row["batch"]) for row in report.rows]
    methods = [("softmax", "cached"), ("softmax", "rerun"), ("linear-16", TIMED_ENGINE), ("lsh-1", "textbook")]
    assert found == [(preset, *method, batch) for preset in ("one", "two") for batch in (1, 2) for method in methods]
    assert told == report.rows
    assert report.rows[3]["attention_options"]["rounds"] == 1
    assert all(row["published"] is None and row["bits_per_dim"] is None for row in report.rows)
    assert [network["preset"] for network in report.settings["networks"]] == ["one"] * 3 + ["two"] * 3


def test_shares_of_the_ceilings(subjects, monkeypatch) -> None:
    fix_seconds(monkeypatch, 2.0)
    ceilings = FixedCeilings()
    report = run_sampling_bench(subjects[:2], SamplingPlan([4], 1), "fp32", ceilings)
    cached, rerun, linear = report.rows
    flops = count_product_flops(subjects[1].model)
    # Four images of 64 positions in two seconds, against 100 GFLOP/s and 10 GB/s.
    assert linear["product_gigaflops"] == pytest.approx(4 / 2 * 64 * flops / 1e9)
    assert linear["product_share"] == pytest.approx(linear["product_gigaflops"] / 100)
    moved = 64 / 2 * state_traffic_bytes(subjects[1].model, 4) / 1e9
    assert (linear["state_gigabytes"], linear["copy_share"]) == pytest.approx((moved, moved / 10))
    # A re-run reads every prefix, and has no state.
    speed = rerun["extrapolated"]["images_per_second"]
    assert rerun["product_gigaflops"] == pytest.approx(speed * count_rerun_positions(64) * flops / 1e9)
    assert rerun["copy_share"] is None and cached["copy_share"] > 0
    assert set(ceilings.asked) == {(4, "fp32"), (4, "bf16"), (4 * 32, "fp32"), (4 * 32, "bf16")}
    json.dumps(report.rows)


@needs_compiler
def test_an_untrained_model_is_not_timed_looking_ahead(subjects, monkeypatch) -> None:
    fix_seconds(monkeypatch, 2.0)
    plan = SamplingPlan([1], 1, engines=["native", "textbook"])
    report = run_sampling_bench(subjects[1:2], plan, "fp32")
    assert [row["engine"] for row in report.rows] == ["stepwise", "textbook"]


def test_without_ceilings_there_are_no_shares(subjects, monkeypatch) -> None:
    fix_seconds(monkeypatch, 2.0)
    report = run_sampling_bench(subjects[1:2], SamplingPlan([1], 1), "fp32")
    assert report.rows[0]["product_share"] is None and report.ceilings is None


@pytest.mark.parametrize(("per_call", "limit", "steps"), [(0.02, 10.0, 64), (0.02, 1.0, 15), (2.0, 0.001, 1)])
def test_a_long_image_is_timed_around_its_middle(subjects, monkeypatch, per_call, limit, steps) -> None:
    """A probe of two steps takes `per_call`; three repeats are wanted."""
    monkeypatch.setattr(run_module, "_time_second", lambda *given, **rest: per_call)
    fix_seconds(monkeypatch, 2.0)
    (row,) = run_sampling_bench(subjects[1:2], SamplingPlan([2], 3, limit_seconds=limit), "fp32").rows
    if steps == 64:
        assert row["images_per_second"] == 1.0 and "extrapolated" not in row
        return
    figures = row["extrapolated"]
    assert (figures["timed_positions"], figures["of_positions"]) == (steps, 64)
    assert figures["images_per_second"] == pytest.approx(2 / 2 * steps / 64)
    assert "images_per_second" not in row


@pytest.mark.parametrize(
    ("trained", "limit", "engine"),
    [(True, 10.0, FASTEST_ENGINE), (True, 1.0, TIMED_ENGINE), (False, 10.0, TIMED_ENGINE)],
)
def test_looking_ahead_is_timed_on_whole_images_of_trained_models(
    subjects, monkeypatch, trained, limit, engine
) -> None:
    monkeypatch.setattr(run_module, "_time_second", lambda *given, **rest: 0.02)
    fix_seconds(monkeypatch, 2.0)
    subject = dataclasses.replace(subjects[1], trained=trained)
    (row,) = run_sampling_bench([subject], SamplingPlan([1], 3, limit_seconds=limit), "fp32").rows
    assert row["engine"] == engine and ("extrapolated" in row) == (limit == 1.0)


@needs_compiler
def test_parts_of_an_image_are_not_timed_twice_over(subjects, monkeypatch) -> None:
    monkeypatch.setattr(run_module, "_time_second", lambda *given, **rest: 0.02)
    fix_seconds(monkeypatch, 2.0)
    plan = SamplingPlan([1], 3, limit_seconds=1.0, engines=["native", "stepwise"])
    trained = dataclasses.replace(subjects[1], trained=True)
    ahead, stepwise = run_sampling_bench([trained], plan, "fp32").rows
    assert ahead["engine"] == "native" and not ahead["samples_seconds"]
    assert ahead["left_out"] == "an image takes longer than the limit of 1 s; see stepwise"
    assert stepwise["engine"] == "stepwise" and stepwise["extrapolated"]["timed_positions"] < 64


@needs_compiler
@pytest.mark.parametrize("batch", [1, 2])
def test_what_a_look_ahead_multiplies_and_copies_is_not_known(subjects, monkeypatch, batch) -> None:
    fix_seconds(monkeypatch, 2.0)
    plan = SamplingPlan([batch], 1, engines=["native", "stepwise"])
    trained = dataclasses.replace(subjects[1], trained=True)
    ahead, stepwise = run_sampling_bench([trained], plan, "fp32", FixedCeilings()).rows
    for share in ("product_share", "copy_share"):
        assert stepwise[share] > 0 and (ahead[share] is None) == (batch == 1)


def test_every_repeat_draws_other_images(subjects, drawn) -> None:
    case = build_step_case(subjects[1].model, 2)
    for _ in range(3):
        case.work(2)
    assert drawn == [[0, 1], [2, 3], [4, 5]]


def test_the_middle_is_in_the_middle(build_tiny_model, monkeypatch) -> None:
    """Three repeats of five steps of 64 positions, and the state that they begin with."""
    positions = []
    model = build_tiny_model(attention="softmax")
    step = PixelModel.step

    def watched(self, tokens_t, state):
        positions.append(int(state.embedding.position))
        return step(self, tokens_t, state)

    monkeypatch.setattr(PixelModel, "step", watched)
    case = build_middle_case(model, 3, 5, 3, engine="textbook")
    for _ in range(3):
        case.work(case.steps)
    assert sum(positions) / len(positions) == pytest.approx(32, abs=1)
    assert max(positions) - min(positions) == len(positions) - 1 == 14
    assert case.warm_up_steps == 1 and not case.is_whole(64)


@pytest.mark.parametrize("attention", ["linear", "softmax", "lsh", "longformer", "lstm"])
def test_a_placed_state_is_the_one_that_stepping_reaches(build_tiny_model, attention) -> None:
    model = build_tiny_model(attention=attention, dtype=torch.float64)
    placed = place_state(model, 2, 20)
    state = model.init_state(2)
    for _ in range(20):
        _, state = model.step(torch.zeros(2, dtype=torch.int64), state)
    token = torch.full((2,), 3)
    expected, _ = model.step(token, state)
    found, _ = model.step(token, placed)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_what_does_not_fit_or_takes_too_long_says_so(subjects, monkeypatch) -> None:
    fix_seconds(monkeypatch, 2.0)
    monkeypatch.setattr(run_module, "_time_second", lambda *given, **rest: 3.0)
    cached, rerun = run_sampling_bench(subjects[:1], SamplingPlan([1], 2, limit_seconds=40.0), "fp32").rows
    # The first of four prefixes is a sixteenth of them: 48 seconds, twice.
    assert rerun["left_out"] == "would take about 1 min 36 s, the limit is 40 s"
    assert rerun["samples_seconds"] == [] and rerun["repeats"] == 0
    assert cached["left_out"] is None
    patient = SamplingPlan([1], 2, limit_seconds=40.0, rerun_limit_seconds=48.0)
    assert run_sampling_bench(subjects[:1], patient, "fp32").rows[1]["left_out"] is None
    monkeypatch.setattr(run_module, "measure_free_memory", lambda device: 1000)
    for row in run_sampling_bench(subjects[:2], SamplingPlan([1], 2, rerun=False), "fp32").rows:
        assert "1000 B are free" in row["left_out"] and row["product_share"] is None
        assert not {"images_per_second", "extrapolated"} & row.keys()
    # And where it fits, but not beside what others will need.
    monkeypatch.setattr(run_module, "measure_free_memory", lambda device: 10**9)
    for spare, fits in ((0, True), (10**9, False)):
        plan = SamplingPlan([1], 2, rerun=False, spare_bytes=spare)
        (row,) = run_sampling_bench(subjects[:1], plan, "fp32").rows
        assert (row["left_out"] is None) == fits


def test_the_same_work_is_timed_again(subjects, monkeypatch) -> None:
    """Without a probe: half of the rows around the middle, and of the re-runs none."""
    fix_seconds(monkeypatch, 2.0)
    monkeypatch.setattr(run_module, "_time_second", lambda *given, **rest: 0.02)
    plan = SamplingPlan([1, 2], 2, limit_seconds=0.1)
    first = run_sampling_bench(subjects[:2], plan, "fp32").rows
    assert [row["left_out"] is None for row in first] == [True, False, True] * 2
    monkeypatch.setattr(run_module, "_time_second", lambda *given, **rest: pytest.fail("probed again"))
    fix_seconds(monkeypatch, 8.0)
    again = run_sampling_bench(subjects[:2], dataclasses.replace(plan, earlier=first), "fp32").rows
    for row, before in zip(again, first, strict=True):
        assert row["samples_seconds"] == (before["samples_seconds"] and [2.0, 2.0, 8.0, 8.0])
        work = ("name", "engine", "batch", "left_out")
        assert [row[key] for key in work] == [before[key] for key in work]
        if before["samples_seconds"]:
            assert row["extrapolated"]["timed_positions"] == before["extrapolated"]["timed_positions"]
            assert row["extrapolated"]["images_per_second"] == before["extrapolated"]["images_per_second"] * 2 / 5


def test_images_that_are_drawn_again_are_others(subjects, drawn, monkeypatch) -> None:
    fix_seconds(monkeypatch, 2.0)
    plan = SamplingPlan([2], 3)
    first = run_sampling_bench(subjects[1:2], plan, "fp32").rows
    run_sampling_bench(subjects[1:2], dataclasses.replace(plan, earlier=first), "fp32")
    assert drawn == [[0, 1], [6, 7]]


def test_bits_stand_beside_the_model_that_was_trained(subjects, monkeypatch, tmp_path) -> None:
    fix_seconds(monkeypatch, 2.0)
    run = TrainedRun(tmp_path, subjects[1].model.config, "glyphs", 480, 1.25, 0.01, 90)
    rows = run_sampling_bench(subjects[:3], SamplingPlan([1], 1, runs=[run]), "fp32").rows
    assert [row["bits_per_dim"] for row in rows] == [None, None, 1.25, None]
    assert (rows[2]["images_seen"], rows[2]["run"]) == (480, tmp_path)


def test_memory_is_that_of_each_row(subjects, monkeypatch) -> None:
    fix_seconds(monkeypatch, 2.0)
    asked = []
    monkeypatch.setattr(run_module, "measure_sampling_memory", lambda setup, limit: asked.append(setup) or 77)
    rows = run_sampling_bench(subjects[:2], SamplingPlan([1, 2], 1, memory=True), "fp32").rows
    assert [row["peak_memory_bytes"] for row in rows] == [77] * 6
    assert [(setup.engine, setup.batch) for setup in asked] == [
        (engine, batch) for batch in (1, 2) for engine in ("cached", "rerun", TIMED_ENGINE)
    ]


def test_a_check_can_give_up_between_steps(subjects) -> None:
    calls = []

    def give_up() -> None:
        calls.append(0)
        if len(calls) > 10:
            raise Interrupted("enough", 2)

    report = run_sampling_bench(subjects[1:2], SamplingPlan([1], 3), "fp32", check=give_up, checked=True)
    assert (report.rows, report.ended) == ([], "interrupted")
    assert len(calls) == 11
    with pytest.raises(Interrupted):
        build_step_case(subjects[1].model, 1, give_up).work(4)


@pytest.mark.parametrize(
    ("after", "repeats", "memory"),
    [
        (1, [3], [None]),  # while its memory is measured
        (2, [3], [7]),  # behind the first group
        (2 + 40, [3], [7]),  # warming up for the second
        (2 + 90, [3], [7]),  # in its first turn
        (2 + 200, [3, 2], [7, None]),  # in its third
    ],
)
def test_an_interruption_keeps_every_group_and_the_turns_of_the_last(
    subjects, monkeypatch, after, repeats, memory
) -> None:
    """Every step of an image of 64 values asks whether to go on: 32 of a warm-up and 64 of a turn."""
    monkeypatch.setattr(run_module, "measure_row_memory", lambda *given: 7)
    first = 32 + 3 * 64
    left = iter(range(first + after - 1))

    def give_up() -> None:
        if next(left, None) is None:
            raise Interrupted("enough", 2)

    plan = SamplingPlan([1, 2], 3, rerun=False, memory=True)
    report = run_sampling_bench(subjects[1:2], plan, "fp32", check=give_up, checked=True)
    assert report.ended == "interrupted"
    assert [row["repeats"] for row in report.rows] == repeats
    assert [row["peak_memory_bytes"] for row in report.rows] == memory
