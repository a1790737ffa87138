"""The paper's benchmark: what a budget allows for, what is said to be less, and what an interruption leaves."""

import copy
import dataclasses
import json
from types import SimpleNamespace

import pytest
from machine import TIMED_ENGINE

from linformer_cli.bench import paper as paper_module
from linformer_cli.bench import turns as turns_module
from linformer_cli.bench.memory import PassMemory
from linformer_cli.bench.paper import PaperBench, PaperReport
from linformer_cli.bench.paper_sizes import PAPER_LENGTHS, PAPER_TRAINING_BATCH, Sizes, choose_lengths, choose_sizes
from linformer_cli.bench.trained import read_trained_runs
from linformer_cli.checkpoint import save_checkpoint
from linformer_cli.errors import Interrupted
from linformer_cli.report.paper_page import render_figures, render_page
from linformer_cli.report.tables import to_json
from linformer_cli.system.signals import StopRequest

PARTS = ["sampling", "training", "scaling", "memory", "copy"]


@pytest.fixture
def networks(tiny_model_config):
    return [("mnist-paper", tiny_model_config), ("two", tiny_model_config.model_copy(update={"layers": 1}))]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No processes, sizes that take no time, and a budget that none of them spends."""
    real = paper_module.run_copy_task

    def copy_little(variants, settings, seconds, stop, ceilings):
        little = dataclasses.replace(settings, length=8, width=16, updates=2)
        return real(variants, little, None, stop, ceilings=ceilings)

    monkeypatch.setattr(paper_module, "run_copy_task", copy_little)
    monkeypatch.setattr(paper_module, "choose_sizes", lambda seconds: Sizes((1, 2), 1, {"mnist-paper": 2}, 64))
    monkeypatch.setattr(paper_module, "measure_row_memory", lambda model, row, limit: 1000 * row["batch"])
    monkeypatch.setattr(paper_module, "choose_lengths", lambda seconds, methods: [16, 32])
    monkeypatch.setattr(
        "linformer_cli.bench.scaling.measure_pass_memory", lambda setup, limit: PassMemory(100 * setup.positions, 0.001)
    )


def set_clock(monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace) -> None:
    for module in (paper_module, turns_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))


def test_a_budget_decides_sizes() -> None:
    short, usual, long = (choose_sizes(60 * minutes) for minutes in (1, 10, 60))
    assert short.batches == (1, 16) and usual.batches == (1, 16, 64) and long.batches[-1] == 256
    assert short.rounds < usual.rounds < long.rounds
    assert long.training_batches == PAPER_TRAINING_BATCH
    assert all(sizes.batches[0] == 1 for sizes in (short, usual, long))  # one image's latency
    assert usual.largest_batches == {"cifar10-paper": 16} and not long.largest_batches


@pytest.mark.parametrize("seconds", [1, 60, 90, 150, 300, 10_000])
def test_lengths_are_of_the_papers_and_far_apart(seconds) -> None:
    lengths = choose_lengths(seconds, 4)
    assert len(lengths) >= 3 and lengths == sorted(set(lengths))
    assert set(lengths) <= set(PAPER_LENGTHS)
    if seconds == 10_000:
        assert lengths == list(PAPER_LENGTHS)


def test_all_parts_are_measured_and_saved_one_by_one(networks, quick, monkeypatch) -> None:
    monkeypatch.setattr(paper_module, "_SAVE_SECONDS", 0.0)
    told, saved = [], []
    bench = PaperBench(
        600.0,
        "cpu",
        networks=networks,
        report=lambda part, row, number: told.append((part, row["name"])),
        save=lambda report: saved.append(copy.deepcopy(report)),
    )
    result = bench.run()
    assert result.unfinished == []
    # After the one round of each, and at the end.
    assert [len(report.unfinished) for report in saved] == [5, 5, 5, 2, 1, 0]
    assert any("rows are extrapolated" in line for line in saved[0].reduced)
    assert saved[0].sampling and not saved[0].training
    assert saved[1].training and not saved[1].scaling
    methods = [
        *(("linear", TIMED_ENGINE), ("softmax", "cached"), ("softmax", "rerun")),
        *(("lsh-1", "textbook"), ("lsh-4", "textbook")),
    ]
    assert [(row["name"], row["engine"]) for row in result.sampling[:5]] == methods
    # One image at once first, in both networks.
    assert [(row["preset"], row["batch"]) for row in result.sampling[::5]] == [
        (name, batch) for batch in (1, 2) for name in ("mnist-paper", "two")
    ]
    assert {(row["preset"], row["batch"]) for row in result.sampling} == {
        (name, batch) for name in ("mnist-paper", "two") for batch in (1, 2)
    }
    assert [row["name"] for row in result.training] == ["linear", "softmax", "lsh-1", "lsh-4"] * 2
    assert {(row["positions"], row["batch"]) for row in result.scaling} == {(16, 4), (32, 2)}
    assert [row["name"] for row in result.exponents] == ["linear", "softmax", "lsh-1", "lsh-4"]
    assert result.copy is not None and [row["name"] for row in result.copy["rows"]] == ["linear", "softmax", "lsh-4"]
    assert all(row["product_share"] > 0 for row in result.copy["rows"])
    assert all(row["copy_share"] > 0 for row in result.scaling)
    assert {part for part, _ in told} == {"sampling", "training", "scaling"}
    timed = [row for row in result.sampling if row["samples_seconds"]]
    assert {row["peak_memory_bytes"] for row in timed} <= {1000, 2000}
    assert result.sampling[0]["published"]["images_per_second"] == 142.8
    assert result.sampling[-1]["published"] is None
    said = "\n".join(result.reduced)
    for words in (
        "training mnist-paper: batch 2, the paper's is 10",
        "at 16, 32",
        "64 positions a pass",
        "copy task, length 32",
    ):
        assert words in said
    document = json.loads(to_json(result))
    page = render_page(document)
    for words in (
        "## Sampling",
        "bits/dim",
        "142.8",
        "## Training",
        "## Exponents",
        "## Where less was done",
        "GFLOP/s",
    ):
        assert words in page
    assert "Not finished" not in page
    figures = render_figures(document)
    assert {"images-per-second.png", "images-per-second.svg", "attention.png", "attention.svg"} <= set(figures)
    assert figures["attention.png"].startswith(b"\x89PNG") and b"<svg" in figures["images-per-second.svg"]


@pytest.mark.slow
def test_every_repeat_is_a_round_over_all_rows_of_a_part(networks, quick, monkeypatch) -> None:
    monkeypatch.setattr(paper_module, "choose_sizes", lambda seconds: Sizes((1, 2), 2, {"mnist-paper": 2}, 64))
    told = []
    bench = PaperBench(600.0, "cpu", networks=networks, report=lambda *given: told.append(copy.deepcopy(given)))
    result = bench.run()
    for part in ("sampling", "training", "scaling"):
        rows = getattr(result, part)
        first, second = ([row for name, row, number in told if (name, number) == (part, wanted)] for wanted in (1, 2))
        assert [number for name, _, number in told if name == part] == [1] * len(rows) + [2] * len(rows)
        for before, after, row in zip(first, second, rows, strict=True):
            work = ("name", "preset", "engine", "batch", "positions", "left_out", "peak_memory_bytes")
            assert [before.get(key) for key in work] == [after.get(key) for key in work]
            times = 2 if part == "scaling" else 1
            assert len(before["samples_seconds"]) == times
            assert before["samples_seconds"] == after["samples_seconds"][:times]
            assert row["samples_seconds"] == after["samples_seconds"] and row["repeats"] == 2 * times


def test_what_is_left_out_is_said_once(networks, quick, monkeypatch) -> None:
    monkeypatch.setattr(paper_module, "choose_sizes", lambda seconds: Sizes((1,), 3, {"mnist-paper": 2}, 64))
    monkeypatch.setattr(paper_module, "_LONGEST_POINT_SHARE", 0.0)
    told = []
    bench = PaperBench(600.0, "cpu", networks=networks, report=lambda *given: told.append(given))
    bench._turns._given["scaling"] = 600.0
    assert list(bench._scale(600.0)) == [1, 2, 3]
    left_out = [(row["name"], row["positions"], number) for part, row, number in told if row["left_out"]]
    assert left_out and len(left_out) == len(set(left_out)) and {number for *_, number in left_out} == {1}


@pytest.mark.slow
def test_rounds_end_with_the_time(networks, quick, monkeypatch) -> None:
    """A clock on which a round of training takes 36 of the 125 s that it gets: there is no time for a fourth.

    The first of time against T takes 90 of 154 s and the others 20: three more, as the first does more than they do.
    """
    clock = SimpleNamespace(now=0.0)
    set_clock(monkeypatch, clock)
    monkeypatch.setattr(paper_module, "choose_sizes", lambda seconds: Sizes((1,), 9, {"mnist-paper": 2}, 64))

    def report(part, row, number):
        rows = {"training": 8, "scaling": 8}
        seconds = {"training": 36, "scaling": 90 if number == 1 else 20}
        clock.now += seconds.get(part, 0) / rows.get(part, 1)

    result = PaperBench(600.0, "cpu", networks=networks, report=report).run()
    assert {row["repeats"] for row in result.training} == {3}
    assert {row["repeats"] for row in result.scaling} == {4 * 2}
    assert "training: 3 of 9 rounds, the time was up" in result.reduced


@pytest.mark.slow
def test_parts_take_turns_by_what_they_have_used_of_their_time(networks, quick, monkeypatch) -> None:
    """A clock on which a round of sampling takes 0.45 of its time, the others' about a quarter of theirs."""
    clock = SimpleNamespace(now=0.0)
    set_clock(monkeypatch, clock)
    monkeypatch.setattr(paper_module, "choose_sizes", lambda seconds: Sizes((1,), 9, {"mnist-paper": 2}, 64))
    turns = []

    def report(part, row, number):
        share = {"sampling": 0.45 * 212.4 / 10, "training": 0.25 * 125.4 / 8, "scaling": 0.26 * 153.9 / 8}
        clock.now += share[part]
        if turns[-1:] != [(part, number)]:
            turns.append((part, number))

    PaperBench(600.0, "cpu", networks=networks, report=report).run()
    begun = [("sampling", 1), ("training", 1), ("scaling", 1), ("training", 2), ("scaling", 2)]
    assert turns[:7] == [*begun, ("sampling", 2), ("training", 3)]


@pytest.mark.slow
def test_what_a_part_takes_too_much_is_taken_from_all_that_follow(networks, quick, monkeypatch) -> None:
    """A clock on which the first round of sampling takes 100 of 120 s."""
    clock = SimpleNamespace(now=0.0)
    set_clock(monkeypatch, clock)

    monkeypatch.setattr(paper_module, "choose_sizes", lambda seconds: Sizes((1,), 1, {"mnist-paper": 2}, 64))
    monkeypatch.setattr(turns_module, "_PATIENCE", 10.0)

    def report(part, row, number):
        clock.now += 10 if part == "sampling" else 0  # of ten rows

    bench = PaperBench(120.0, "cpu", networks=networks, report=report)
    bench.run()
    # No other takes any time, and so the last two are given all that is left.
    training, scaling, memory, copy_task = 20 * 0.22 / 0.68, 20 * 0.27 / 0.68, 20 * 0.07 / 0.19, 20
    expected = [30 + 0.32 * 90, training, scaling, memory, copy_task]
    assert [bench._turns._given[part] for part in PARTS] == pytest.approx(expected)


@pytest.mark.slow
def test_runs_of_other_networks_are_timed_too(networks, quick, build_tiny_model, tiny_info, tmp_path) -> None:
    changes = {"ours": {"attention_options": {}}, "wide": {"feed_forward": 64}, "rfa": {"attention": "rfa"}}
    for number, (name, change) in enumerate(changes.items()):
        model = build_tiny_model(**change)
        training = tiny_info.training.model_copy(
            update={"validation_bits_per_dim": 1.0 + number, "validation_standard_error": 0.1, "validation_images": 9}
        )
        save_checkpoint(
            tmp_path / name, model, tiny_info.model_copy(update={"model": model.config, "training": training})
        )
    networks = [("a", build_tiny_model(attention_options={}).config), ("b", build_tiny_model(layers=1).config)]
    result = PaperBench(600.0, "cpu", read_trained_runs([str(tmp_path)]), networks).run()
    assert {
        (row["preset"], row["name"], row["batch"]): row["bits_per_dim"]
        for row in result.sampling
        if row["bits_per_dim"] is not None
    } == {
        (*row, batch): bits
        for row, bits in {("a", "linear"): 1.0, (None, "wide"): 2.0, (None, "rfa"): 3.0}.items()
        for batch in (1, 2)
    }
    assert [row["name"] for row in result.training if row["bits_per_dim"] is not None] == ["linear"]
    figures = render_figures(json.loads(to_json(result)))
    assert {"bits-per-dim.png", "bits-per-dim.svg"} <= set(figures)


def test_an_interruption_keeps_what_was_measured(networks, quick) -> None:
    stop, saved = StopRequest(), []

    def report(part, row, number):
        if part == "scaling":
            stop.signal_number = 2

    bench = PaperBench(600.0, "cpu", networks=networks, report=report, save=saved.append, stop=stop)
    with pytest.raises(Interrupted):
        bench.run()
    assert bench.result.unfinished == PARTS
    assert bench.result.sampling and bench.result.training and len(bench.result.scaling) >= 1
    assert saved[-1] is bench.result
    page = render_page(json.loads(to_json(bench.result)))
    assert "Not finished: sampling, training, scaling, memory, copy." in page
    assert "rows are extrapolated" in page  # of a part whose turn it was not


@pytest.mark.slow
def test_a_part_that_takes_far_too_long_is_broken_off_with_what_it_has(networks, quick) -> None:
    def report(part, row, number):
        if part == "sampling":
            bench._turns._part_ends = -1.0

    bench = PaperBench(600.0, "cpu", networks=networks, report=report)
    result = bench.run()
    assert {(row["preset"], row["batch"]) for row in result.sampling} == {("mnist-paper", 1)}
    assert len(result.sampling) == 5 and result.training and result.unfinished == []
    assert any(line.startswith("sampling: broken off") for line in result.reduced)


@pytest.mark.slow
def test_a_batch_that_the_time_does_not_reach_is_left_out(networks, quick, monkeypatch) -> None:
    """A clock on which the first network takes 120 s of the 212 s of sampling and the second 88 s: 4 s are left."""
    clock = SimpleNamespace(now=0.0)
    set_clock(monkeypatch, clock)
    seconds = {"mnist-paper": 120.0, "two": 88.0}

    def report(part, row, number):
        if part == "sampling" and row["name"] == "lsh-4":  # the last of its group
            clock.now += seconds[row["preset"]]

    result = PaperBench(600.0, "cpu", networks=networks, report=report).run()
    assert {(row["preset"], row["batch"]) for row in result.sampling} == {("mnist-paper", 1), ("two", 1)}
    assert [line for line in result.reduced if line.startswith("sampling")] == [
        "sampling mnist-paper: batch 2 left out, the time was up",
        "sampling two: batch 2 left out, the time was up",
        "sampling mnist-paper: 1 of 5 rows are extrapolated from some positions",
        "sampling two: 1 of 5 rows are extrapolated from some positions",
    ]


@pytest.mark.slow
def test_a_network_may_have_smaller_batches_than_the_others(networks, quick, monkeypatch) -> None:
    sizes = Sizes((1, 2), 1, {"mnist-paper": 2}, 64, {"two": 1})
    monkeypatch.setattr(paper_module, "choose_sizes", lambda seconds: sizes)
    result = PaperBench(600.0, "cpu", networks=networks).run()
    wanted = {("mnist-paper", 1), ("mnist-paper", 2), ("two", 1)}
    assert {(row["preset"], row["batch"]) for row in result.sampling} == wanted
    assert [line for line in result.reduced if "at most" in line] == ["sampling two: batches of at most 1"]


def test_memory_goes_as_far_as_the_time(networks, quick) -> None:
    bench = PaperBench(600.0, "cpu", networks=networks)
    bench.result.sampling = [
        {"preset": "two", "name": "linear", "batch": batch, "samples_seconds": seconds, "peak_memory_bytes": None}
        for batch, seconds in ((1, [1.0]), (16, [1.0]), (64, []))
    ]
    list(bench._measure_memory(100.0))
    assert [row["peak_memory_bytes"] for row in bench.result.sampling] == [1000, 16_000, None]
    list(bench._measure_memory(-1.0))
    assert bench._turns.reduced == ["peak memory of sampling: not measured for 2 rows"]


def test_an_empty_report_is_a_page(networks) -> None:
    bench = PaperBench(600.0, "cpu", networks=networks)
    assert isinstance(bench.result, PaperReport)
    document = json.loads(to_json(bench.result))
    assert "Not finished: sampling" in render_page(document)
    assert render_figures(document) == {}
