"""Tests of `bench paper`: sizes for a budget, the list of reductions, and reports after an interruption."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from fixed_ceilings import FixedCeilings
from loops import loop_over
from machine import FASTEST_ENGINE

from linformer_cli.bench import attention, budget, copy, paper, sample, train
from linformer_cli.bench.measure.ceilings import count_product_flops
from linformer_cli.bench.measure.peak_memory import PeakMemory
from linformer_cli.bench.models import BenchModel, build_models, read_trained_runs
from linformer_cli.bench.paper import (
    METHODS,
    PAPER_LENGTHS,
    PAPER_TRAINING_BATCH,
    PaperBench,
    PaperSettings,
    Sizes,
    choose_lengths,
    choose_sizes,
)
from linformer_cli.bench.paper_report import PaperReport
from linformer_cli.bench.rows import Row
from linformer_cli.bench.sequence_tasks import CopySettings
from linformer_cli.checkpoint import save_checkpoint
from linformer_cli.config import ImageShape
from linformer_cli.errors import DisagreementError, Interrupted
from linformer_cli.model.mixers import parse_variants
from linformer_cli.system.signals import StopRequest
from linformer_cli.training.loop import Trainer

ROW_PARTS = ("sampling", "training", "scaling")


@pytest.fixture(scope="module")
def networks(tiny_model_config):
    small = tiny_model_config.model_copy(update={"image": ImageShape(height=4, width=4, levels=16)})
    return [("mnist-paper", small), ("two", small.model_copy(update={"layers": 1}))]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Keeps `bench paper` from starting processes and from comparing attend with step.

    Ceilings are made up; the copy task has two updates.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paper, "Ceilings", FixedCeilings)
        patch.setattr(BenchModel, "require_agreement", lambda timed: None)
        for module in (attention, copy):
            patch.setattr(module, "require_agreement", lambda model: None)
        patch.setattr(sample, "measure_peak", lambda build, setup, limit: PeakMemory(10**9 * setup.batch, 0.001))
        patch.setattr(attention, "measure_peak", lambda build, setup, limit: PeakMemory(100 * setup.positions, 0.001))
        patch.setattr(paper, "CopySettings", lambda length, width, device: CopySettings(8, 16, 2, device=device))
        yield


@pytest.fixture
def two_methods(monkeypatch) -> None:
    monkeypatch.setattr(paper, "METHODS", ("linear", "softmax"))
    monkeypatch.setattr(paper, "COPY_METHODS", ("linear",))


def measure(networks: Any, rounds: int = 1, **given: Any) -> PaperReport:
    sizes = given.pop("sizes", Sizes((1, 2), rounds, {"mnist-paper": 2}, 64, lengths=(16, 32)))
    runs = given.pop("runs", ())
    return PaperBench(PaperSettings(600.0, "cpu", runs, networks, sizes), **given).run()


def test_the_budget_determines_the_sizes() -> None:
    short, usual, long = (choose_sizes(60 * minutes) for minutes in (1, 10, 60))
    assert short.batches == (1, 16) and usual.batches == (1, 16, 64) and long.batches[-1] == 256
    assert short.rounds < usual.rounds < long.rounds
    assert long.training_batches == PAPER_TRAINING_BATCH
    assert all(sizes.batches[0] == 1 for sizes in (short, usual, long))  # a batch of one image gives the latency
    assert usual.largest_batches == {"cifar10-paper": 16} and not long.largest_batches


@loop_over("seconds", [1, 60, 90, 150, 300, 10_000])
def test_at_least_three_of_the_papers_lengths_are_chosen(seconds) -> None:
    lengths = choose_lengths(seconds, 4)
    assert len(lengths) >= 3 and lengths == sorted(set(lengths))
    assert set(lengths) <= set(PAPER_LENGTHS)
    if seconds == 10_000:
        assert lengths == list(PAPER_LENGTHS)


def test_all_parts_are_measured_and_shown_in_the_report(networks) -> None:
    saved: list[PaperReport] = []
    sizes = Sizes((1, 2), 1, {"mnist-paper": 2}, 64, {"two": 1}, (16, 32))
    report = measure(networks, sizes=sizes, save=saved.append)
    assert report.unfinished == [] and len(saved) == 1 and saved[0].sampling == report.sampling
    methods = [
        *(("linear", FASTEST_ENGINE), ("softmax", FASTEST_ENGINE), ("softmax", "rerun")),
        *(("lsh-1", FASTEST_ENGINE), ("lsh-4", FASTEST_ENGINE)),
    ]
    # Single images come first, for both networks. The second network has a lower limit on its batches.
    assert [(row.batch, row.preset, row.name, row.engine) for row in report.sampling] == [
        (*group, *method) for group in ((1, "mnist-paper"), (1, "two"), (2, "mnist-paper")) for method in methods
    ]
    assert [line for line in report.reduced if "at most" in line] == ["sampling two: batches of at most 1"]
    assert [row.name for row in report.training] == ["linear", "softmax", "lsh-1", "lsh-4"] * 2
    assert [row.batch for row in report.training] == [2] * 4 + [1] * 4
    assert {(row.positions, row.batch) for row in report.scaling} == {(16, 4), (32, 2)}
    assert [row.name for row in report.exponents] == ["linear", "softmax", "lsh-1", "lsh-4"]
    assert report.copy is not None and [row.name for row in report.copy.rows] == ["linear", "softmax", "lsh-4"]
    timed = [row for row in report.sampling if row.samples_seconds]
    assert timed and all(row.peak_memory_bytes == 10**9 * row.batch for row in timed)
    assert report.sampling[0].published.images_per_second == 142.8 and report.sampling[5].published is None
    said = "\n".join(report.reduced)
    for words in (
        "training mnist-paper: batch 2; the paper's is 10",
        "at 16, 32",
        "64 positions per pass",
        "copy task",
    ):
        assert words in said
    page = report.render_page()
    for words in ("## Sampling", "142.8", "## Training", "## Exponents", "## Remarks", "GB/s"):
        assert words in page
    assert "Not finished" not in page
    ceilings = page.split("## The ceilings of this machine")[1].split("\n\n")[1].splitlines()[2:]
    models = build_models(parse_variants(METHODS), networks, "cpu", "fp32")
    wanted = {count_product_flops(timed.model): timed.preset for timed in models}
    names = [wanted[product.flops // product.rows] for product in report.ceilings.products]
    assert [line.split("|")[1].strip() for line in ceilings] == names and len(set(names)) == 2
    plots = report.show("md").plots
    assert {"images-per-second", "attention"} <= set(plots)
    assert plots["attention"]("png").startswith(b"\x89PNG") and b"<svg" in plots["images-per-second"]("svg")


def test_the_ceilings_of_a_network_that_steps_over_pixels_have_its_name(build_tiny_model) -> None:
    """Its blocks compute fewer products per position than the network has."""
    config = build_tiny_model(context="residual", image=ImageShape(height=4, width=4, channels=3)).config
    stop = StopRequest()

    def report(part: str, row: Row, number: int) -> None:
        stop.signal_number = 2

    found = measure([("pixel", config)], report=report, stop=stop)
    _, ceilings = found.render_page().split("## The ceilings of this machine")
    names = [line.split("|")[1].strip() for line in ceilings.split("\n\n")[1].splitlines()[2:]]
    assert names and set(names) == {"pixel"}


def test_nothing_is_timed_if_attend_and_step_disagree(networks, monkeypatch) -> None:
    compared: list[str] = []

    def disagree(timed: BenchModel) -> None:
        compared.append(timed.name)
        if timed.name == "lsh-4":
            raise DisagreementError("'lsh' is not timed")

    monkeypatch.setattr(BenchModel, "require_agreement", disagree)
    told: list[Row] = []
    with pytest.raises(DisagreementError):
        measure(networks, report=lambda part, row, number: told.append(row))
    assert compared == ["linear", "softmax", "lsh-1", "lsh-4"] and told == []


@pytest.mark.slow
def test_every_round_adds_a_sample_to_all_rows_and_reports_those_left_out_once(networks, monkeypatch) -> None:
    monkeypatch.setattr(
        attention, "measure_peak", lambda build, setup, limit: PeakMemory(100, 9.0 if setup.positions > 16 else 0.001)
    )
    told: list[tuple[str, Row, int]] = []
    report = measure(networks, 2, report=lambda *given: told.append(given))
    for part in ROW_PARTS:
        times = 2 if part == "scaling" else 1
        first, second = ([row for name, row, number in told if (name, number) == (part, n)] for n in (1, 2))
        left_out = [(row.name, row.positions) for row in first if row.left_out]
        assert part != "scaling" or left_out == [(name, 32) for name in ("linear", "softmax", "lsh-1", "lsh-4")]
        rows: list[Row] = [row for row in getattr(report, part) if not row.left_out]
        assert rows and second == rows
        for before, row in zip((row for row in first if not row.left_out), rows, strict=True):
            assert (before.name, before.engine, before.batch) == (row.name, row.engine, row.batch)
            assert (before.repeats, row.repeats) == (times, 2 * times)
            assert before.samples_seconds == row.samples_seconds[:times]


@pytest.mark.slow
def test_runs_of_other_networks_are_sampled_too(build_tiny_model, tiny_info, tmp_path) -> None:
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
    report = measure(networks, runs=read_trained_runs([str(tmp_path)]))
    wanted = {("a", "linear"): 1.0, (None, "wide"): 2.0, (None, "rfa"): 3.0}
    assert {
        (row.preset, row.name, row.batch): row.bits_per_dim for row in report.sampling if row.bits_per_dim is not None
    } == {(*row, batch): bits for row, bits in wanted.items() for batch in (1, 2)}
    assert [row.name for row in report.training if row.bits_per_dim is not None] == ["linear"]
    assert "bits-per-dim" in report.show("md").plots


def test_an_interruption_keeps_what_was_measured(networks, two_methods, tmp_path) -> None:
    stop, saved = StopRequest(), []

    def report(part: str, row: Row, number: int) -> None:
        if part == "scaling":
            stop.signal_number = 2

    found = measure(networks, 2, report=report, save=saved.append, stop=stop)
    assert found.unfinished == ["sampling", "training", "scaling", "memory", "copy"]
    assert found.sampling and found.training and found.scaling and found.copy is None
    assert saved[-1].scaling == found.scaling
    found.write(tmp_path, "paper")
    assert {"paper.json", "paper.md", "images-per-second.png"} <= {path.name for path in tmp_path.iterdir()}
    page = found.render_page()
    assert "Not finished: sampling, training, scaling, memory, copy." in page and "rows are extrapolated" in page
    found = measure(networks, save=saved.clear, stop=StopRequest(2))  # it saves nothing, so an earlier report stays
    assert saved and found.sampling == [] and found.copy is None and found.show("md").plots == {}
    assert "Not finished: sampling" in found.render_page()


def test_an_error_keeps_what_was_measured(networks, two_methods, monkeypatch) -> None:
    def fail(*given: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(train, "build_trainer", fail)
    saved: list[PaperReport] = []
    with pytest.raises(RuntimeError):
        measure(networks[:1], save=saved.append)
    (found,) = saved
    assert [row.batch for row in found.sampling] == [1] * 3 + [2] * 3
    assert found.unfinished == ["training", "scaling", "memory", "copy"]


def test_trainers_are_freed_after_the_training_part(networks, two_methods, monkeypatch) -> None:
    alive: weakref.WeakSet[Trainer] = weakref.WeakSet()
    build, left = train.build_trainer, []

    def watch(*given: Any) -> Trainer:
        trainer = build(*given)
        alive.add(trainer)
        left.append(len(alive))
        return trainer

    def prepare_scaling(*given: object) -> None:
        gc.collect()
        left.append(len(alive))
        raise Interrupted("enough", 2)

    monkeypatch.setattr(train, "build_trainer", watch)
    monkeypatch.setattr(attention, "prepare", prepare_scaling)
    measure(networks[:1], sizes=Sizes((1,), 1, {}, 64, lengths=(16,)))
    assert left == [1, 2, 0]


def test_files_are_written_every_few_minutes(networks, two_methods, monkeypatch) -> None:
    """The made-up clock advances by 70 s at each reading."""
    ticks: Iterator[int] = iter(range(0, 10**6, 70))
    monkeypatch.setattr(budget.time, "monotonic", lambda: next(ticks))
    saved: list[PaperReport] = []
    measure(networks[:1], save=saved.append)
    assert len(saved) > 2 and saved[0].sampling and not saved[0].copy
