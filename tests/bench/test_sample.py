"""Tests of `bench sample`: rows, rows that are shortened or left out, and models that it refuses to time."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from fixed_ceilings import FixedCeilings
from machine import FASTEST_ENGINE, HAS_LIBRARY, NO_LIBRARY

from linformer_cli.attention.linear import LinearAttention
from linformer_cli.attention.softmax import SoftmaxAttention
from linformer_cli.bench import sample
from linformer_cli.bench.measure.ceilings import count_product_flops, count_rerun_positions, state_traffic_bytes
from linformer_cli.bench.measure.peak_memory import PassFailed, PeakMemory
from linformer_cli.bench.models import BenchModel, TrainedRun, build_models, with_softmax
from linformer_cli.bench.rounds import Bench, BenchReport
from linformer_cli.bench.rows import Quality, SamplingRow
from linformer_cli.bench.sample import SamplingSettings, run_sampling_bench
from linformer_cli.errors import DisagreementError
from linformer_cli.model.mixers import parse_variants
from linformer_cli.model.pixel_model import build_softmax_twin
from linformer_cli.report.tables import to_json

needs_library = pytest.mark.skipif(not HAS_LIBRARY, reason=NO_LIBRARY)


@pytest.fixture
def models(tiny_model_config, monkeypatch) -> list[BenchModel]:
    """Models whose attend and step are not compared, which would take longer than the measurements."""
    monkeypatch.setattr(BenchModel, "require_agreement", lambda timed: None)
    variants = parse_variants(["softmax", "linear:chunk=16", "lsh-1=lsh:rounds=1"])
    small = tiny_model_config.model_copy(update={"layers": 1})
    return build_models(variants, [("one", tiny_model_config), ("two", small)], "cpu", "fp32")


def bench(models: list[BenchModel], batches: list[int], repeats: int = 1, **changes: Any) -> BenchReport[SamplingRow]:
    ceilings = changes.pop("ceilings", FixedCeilings())
    calls = {name: changes.pop(name) for name in ("report", "check") if name in changes}
    return run_sampling_bench(models, SamplingSettings(batches, repeats, **changes), Bench(ceilings, **calls))


def test_every_model_has_a_row_per_batch_size_and_softmax_has_two(models, clock) -> None:
    told: list[SamplingRow] = []
    report = bench(models, [1, 2], report=told.append)
    methods = [
        ("softmax", FASTEST_ENGINE),
        ("softmax", "rerun"),
        ("linear-16", FASTEST_ENGINE),
        ("lsh-1", FASTEST_ENGINE),
    ]
    assert [(row.preset, row.name, row.engine, row.batch) for row in report.rows] == [
        (preset, *method, batch) for preset in ("one", "two") for batch in (1, 2) for method in methods
    ]
    assert told == report.rows and report.ended == "finished"
    assert report.rows[3].attention_options["rounds"] == 1
    assert all(row.published is None and row.bits_per_dim is None for row in report.rows)
    assert [network["preset"] for network in report.settings["networks"]] == ["one"] * 3 + ["two"] * 3


def test_a_trained_model_is_compared_with_softmax_of_the_same_size(build_tiny_model, clock) -> None:
    model = build_tiny_model(dtype=torch.float64)
    twin = build_softmax_twin(model)
    assert twin.config.attention == "softmax" and twin.dtype == torch.float64 and not twin.training
    assert twin.config.model_copy(update={"attention": "linear", "attention_options": {"chunk": 16}}) == model.config
    assert twin.parameter_count() == model.parameter_count()
    model = build_tiny_model()
    rows = bench(with_softmax("shipped", model), [3], rerun=False).rows
    assert [(row.name, row.engine) for row in rows] == [("shipped", FASTEST_ENGINE), ("softmax", FASTEST_ENGINE)]
    for row, owner in zip(rows, (model, build_softmax_twin(model)), strict=True):
        assert (row.state_bytes, row.state_bytes_per_image) == (owner.state_bytes(3), owner.state_bytes(3) // 3)
    assert [timed.name for timed in with_softmax("exact", build_tiny_model(attention="softmax"))] == ["exact"]


def test_speed_and_quartiles_come_from_whole_images(models, clock) -> None:
    clock.take(2.0, 4.0, 8.0, 16.0, 32.0)
    (row,) = bench(models[1:2], [3], 5).rows
    # A batch of three images takes 8 seconds (median); the quartiles are 4 and 16 seconds.
    assert row.images_per_second == row.speed == 3 / 8
    assert row.images_per_second_quartiles == (3 / 16, 3 / 4)
    assert row.seconds_per_image == pytest.approx(8 / 3)
    assert row.extrapolated is None and row.repeats == 5


def test_a_rerun_is_extrapolated(models, clock) -> None:
    clock.take(8.0)
    row = bench(models[:1], [3], 2).rows[1]
    assert row.images_per_second is row.seconds_per_image is None and row.state_bytes == 0
    # Four of 64 positions take 8 seconds, so a batch of three whole images takes 128 seconds.
    assert (row.extrapolated.timed_positions, row.extrapolated.of_positions) == (4, 64)
    assert row.extrapolated.images_per_second == row.speed == pytest.approx(3 / 128)
    assert row.extrapolated.seconds_per_image == pytest.approx(128 / 3)


@pytest.mark.parametrize(("limit", "steps"), [(10.0, 64), (1.81, 64), (1.78, 59), (1.0, 33), (0.001, 1)])
def test_a_long_image_is_timed_around_its_middle(models, clock, limit, steps) -> None:
    """A probe of two steps takes 0.02 s, and there are three repeats."""
    clock.take(0.02, 2.0)
    (row,) = bench(models[1:2], [2], 3, limit_seconds=limit).rows
    if steps == 64:
        assert row.images_per_second == 1.0 and row.extrapolated is None
        return
    assert (row.extrapolated.timed_positions, row.extrapolated.of_positions) == (steps, 64)
    assert row.extrapolated.images_per_second == pytest.approx(2 / 2 * steps / 64)
    assert row.images_per_second is None


@needs_library
@pytest.mark.parametrize(
    ("trained", "wanted", "limit", "batch", "found"),
    [
        (True, True, None, 1, True),
        (True, True, None, 2, False),
        (True, False, None, 1, False),
        (False, True, None, 1, False),
        (True, True, 1.0, 1, False),
    ],
)
def test_look_ahead_is_used_only_for_whole_single_images_of_trained_models(
    models, clock, ceilings, trained, wanted, limit, batch, found
) -> None:
    clock.take(0.02, 2.0) if limit else clock.take(2.0)
    timed = dataclasses.replace(models[1], trained=trained)
    (row,) = bench([timed], [batch], 3, look_ahead=wanted, limit_seconds=limit, ceilings=ceilings).rows
    assert (row.engine, row.look_ahead) == ("native", found)
    # With look-ahead, it is unknown how often weights and state are read.
    assert (row.product_share is None) == (row.copy_share is None) == found


def test_every_engine_has_one_row(models, clock) -> None:
    rows = bench(models[1:2], [1], engines=["reference", "auto", FASTEST_ENGINE]).rows
    assert [row.engine for row in rows] == list(dict.fromkeys(["reference", FASTEST_ENGINE]))
    (row,) = bench(models[:1], [1], engines=["cuda"], rerun=False).rows
    assert row.engine == "cuda" and row.left_out.startswith("cuda: ")


def test_rows_have_their_shares_of_the_ceilings(models, clock, ceilings) -> None:
    cached, rerun, linear = bench(models[:2], [4], ceilings=ceilings).rows
    flops = count_product_flops(models[1].model)
    # Four images of 64 positions take two seconds. The ceilings are 100 GFLOP/s and 10 GB/s.
    assert linear.product_gigaflops == pytest.approx(4 / 2 * 64 * flops / 1e9)
    assert linear.product_share == pytest.approx(linear.product_gigaflops / 100)
    moved = 64 / 2 * state_traffic_bytes(models[1].model, 4) / 1e9
    assert (linear.state_gigabytes, linear.copy_share) == pytest.approx((moved, moved / 10))
    # A re-run reads every prefix and has no state.
    assert rerun.product_gigaflops == pytest.approx(rerun.speed * count_rerun_positions(64) * flops / 1e9)
    assert rerun.copy_share is None and cached.copy_share > 0
    assert set(ceilings.asked) == {(4, "fp32"), (4, "bf16"), (4 * 32, "fp32"), (4 * 32, "bf16")}


def test_a_row_that_would_take_too_long_is_left_out(models, clock) -> None:
    """The first prefix takes 3 s. All four take 16 times as long, so two repeats take 96 s."""
    clock.take(3.0)
    settings = {"repeats": 2, "limit_seconds": 40.0}
    cached, rerun = bench(models[:1], [1], **settings).rows
    assert rerun.left_out == "would take about 1 min 36 s; the limit is 40 s"
    assert (rerun.samples_seconds, rerun.repeats, rerun.speed) == ([], 0, None)
    assert cached.left_out is None
    assert bench(models[:1], [1], **settings, rerun_patience=2.5).rows[1].left_out is None


def test_a_row_whose_state_does_not_fit_is_left_out(models, clock, monkeypatch) -> None:
    monkeypatch.setattr(sample, "measure_free_memory", lambda device: 1000)
    cached, linear = bench(models[:2], [1], rerun=False, limit_seconds=1.0).rows
    for row in (cached, linear):
        assert "1000 B are free" in row.left_out and row.speed is None
    assert clock.timed == 0
    free = iter([10**9, 10**9, 1000])  # other processes take memory after the second round
    monkeypatch.setattr(sample, "measure_free_memory", lambda device: next(free))
    (row,) = bench(models[:1], [1], 4, rerun=False).rows
    assert (row.left_out, row.repeats, row.reduced) == (None, 2, "2 of 4 repeats")


def test_every_row_has_its_own_memory(models, clock, monkeypatch) -> None:
    """Memory is measured after all rounds of a group, and only for rows with samples. It is at least the state."""
    asked, states = [], [timed.model.state_bytes(1) for timed in models[:2]]

    def measure(build, setup, limit):
        asked.append((setup.engine, setup.batch, limit, clock.timed))
        if setup.engine == "rerun":
            raise PassFailed("its process ended")
        return PeakMemory(77 if setup.batch == 1 else 10**9, 0.1)

    monkeypatch.setattr(sample, "measure_peak", measure)
    rows = bench(models[:2], [1, 2], 2, memory=True, engines=["reference", "cuda"]).rows
    peaks = [[row.peak_memory_bytes for row in rows if row.batch == batch] for batch in (1, 2)]
    assert [row.engine for row in rows] == ["reference", "cuda", "rerun", "reference", "cuda"] * 2
    assert peaks == [[states[0], None, None, states[1], None], [10**9, None, None, 10**9, None]]
    assert asked == [
        (engine, batch, 60.0, 6 * batch) for batch in (1, 2) for engine in ("reference", "rerun", "reference")
    ]


def test_a_report_contains_everything_that_rows_depend_on(models, clock, tmp_path) -> None:
    run = TrainedRun(tmp_path, models[1].model.config, Quality(run=tmp_path, images_seen=480, bits_per_dim=1.25))
    report = bench(models[:3], [1], runs=[run])
    assert [row.bits_per_dim for row in report.rows] == [None, None, 1.25, None]
    assert "bits_plot" in report.show("md").plots
    assert "bits_plot" not in bench(models[:1], [1], runs=[run]).show("md").plots
    document = json.loads(to_json(bench(models[1:2], [1], 5, runs=[run])))
    assert (document["rows"][0]["images_seen"], document["rows"][0]["run"]) == (480, str(tmp_path))
    settings = document["settings"]
    assert (settings["repeats"], settings["warm_up_steps"], settings["interleaved"]) == (5, 32, True)
    network = settings["networks"][0]
    assert network["image"] == {"height": 8, "width": 8, "channels": 1, "levels": 16}
    assert network["parameters"] == models[1].model.parameter_count()
    assert document["environment"]["threads"] == torch.get_num_threads()
    assert document["rows"][0]["samples_seconds"] == [2.0] * 5


@pytest.mark.parametrize("mechanism", [LinearAttention, SoftmaxAttention])
def test_a_mechanism_whose_attend_and_step_disagree_is_not_timed(
    build_tiny_model, damage_step, clock, raises_one_line, mechanism
) -> None:
    damage_step(mechanism)
    with raises_one_line(DisagreementError, f"'{mechanism.name}' is not timed", "parallel against step", "lintx check"):
        bench(with_softmax("shipped", build_tiny_model()), [1])
    assert clock.timed == 0
