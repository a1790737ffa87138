"""Tests of the speech benchmark: its rows, its schedule, and what is kept if it ends early."""

import dataclasses
import math
import signal
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from linformer_cli.bench import budget, speech, speech_training
from linformer_cli.bench.published import find_published_speech
from linformer_cli.bench.rounds import Bench
from linformer_cli.bench.speech import METHODS, SpeechBench, SpeechSettings, parse_methods
from linformer_cli.bench.speech_report import SeedResult, SpeechReport, SpeechRow, describe_findings
from linformer_cli.bench.speech_training import LengthMeasurement, StepSetup, build_step
from linformer_cli.errors import Interrupted, UsageError
from linformer_cli.speech.corpus import Corpus, Recording
from linformer_cli.speech.ctc_task import CtcTask
from linformer_cli.speech.encoder import PRESETS, EncoderSettings
from linformer_cli.system.signals import StopRequest

TINY = EncoderSettings(layers=1, heads=2, width=16, stack=3, lstm_layers=1, lstm_cells=8)
SETTINGS = SpeechSettings(
    600.0, "small", seeds=2, epochs=3, strings=4, validation_strings=3, lengths=(), batch_frames=400
)


@pytest.fixture(autouse=True)
def tiny_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "small", TINY)


@pytest.fixture
def corpus() -> Corpus:
    """Three speakers who say the words `a b` and `b`, as noise and as a tone."""
    generator = torch.Generator().manual_seed(0)
    tone = torch.sin(torch.arange(2_400) / 3)
    recordings = []
    for speaker in ("ann", "bob", "cid"):
        noise = 0.1 * torch.randn(2_400, generator=generator)
        recordings += [
            Recording("1", speaker, ("a", "b"), torch.cat([noise, tone])),
            Recording("2", speaker, ("b",), tone),
        ]
    return Corpus("noise and tones; not WSJ", 8_000, tuple(recordings), joined=True)


def run(corpus: Corpus, names: Sequence[str] = ("softmax", "linear", "bi-lstm"), **changes: object) -> SpeechReport:
    settings = dataclasses.replace(SETTINGS, **changes)
    return SpeechBench(corpus, parse_methods(names), settings).run()


def test_every_row_has_a_curve_per_seed_and_holds_out_other_speakers(corpus: Corpus) -> None:
    report = run(corpus)
    assert [row.name for row in report.rows] == ["softmax", "linear", "bi-lstm"] and report.ended == "finished"
    for row in report.rows:
        assert (row.epochs, row.failed, row.title) == (3, None, "noise and tones; not WSJ")
        assert [list(seed.held_out) for seed in row.seeds] == [["ann"], ["bob"]]
        assert [point.epoch for point in row.seeds[0].points] == [1, 2, 3]
        rates = [seed.error_rate for seed in row.seeds]
        assert row.error_rate == pytest.approx(sum(rates) / 2) and row.error_rate_range == (min(rates), max(rates))
        assert all(seed.error_rate == seed.points[-1].error_rate for seed in row.seeds)
        assert row.beam_error_rate is not None and row.seconds_per_epoch is not None
        assert row.published == find_published_speech(row.attention, row.attention_options)
    assert report.rows[0].times_softmax == 1.0
    assert report.settings["epoch_utterances"] == 4 and report.settings["epoch_frames"] > 100


def test_a_run_depends_only_on_its_settings(corpus: Corpus) -> None:
    first, second = (run(corpus, ["linear"], seeds=1) for _ in range(2))
    losses = [[point.loss for point in report.rows[0].seeds[0].points] for report in (first, second)]
    assert losses[0] == losses[1] and losses[0][0] != losses[0][1]
    together = run(corpus, ["softmax", "linear"], seeds=1)
    assert [point.loss for point in together.rows[1].seeds[0].points] == losses[0]


@pytest.mark.slow
def test_lengths_have_times_and_memory_for_equally_many_frames(corpus: Corpus) -> None:
    report = run(corpus, ["softmax", "linear"], seeds=1, epochs=1, lengths=(60, 800))
    assert [(row.name, row.positions, row.batch) for row in report.lengths] == [
        (name, *size) for name in ("softmax", "linear") for size in ((60, 13), (800, 1))
    ]
    for row in report.lengths:
        assert row.left_out is None and len(row.samples_seconds) == 5 and row.peak_memory_bytes is not None
        assert row.seconds_per_epoch is not None and row.times_softmax is not None
    assert report.rows[0].memory_bytes == report.lengths[1].peak_memory_bytes


def test_a_step_has_the_same_frames_at_every_length(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark begins with the lengths next to the one in the table."""
    setups: list[StepSetup] = []

    def build(repeats: int, bench: Bench, setup: StepSetup, frames: int) -> LengthMeasurement:
        setups.append(setup)
        if len(setups) == 3:
            raise Interrupted("enough", 2)
        return LengthMeasurement(repeats, bench, setup, frames)

    monkeypatch.setattr(speech, "LengthMeasurement", build)
    assert run(corpus, ["softmax"], seeds=1, epochs=1, lengths=(300, 2_400, 600)).ended == "interrupted"
    assert [(one.frames, one.batch) for one in setups] == [(600, 4), (300, 8), (2_400, 1)]
    assert build_step(setups[1])() is not None


def test_an_interrupted_round_is_forgotten(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, saved, measure_errors, count = StopRequest(), [], speech_training.measure_errors, 0

    def interrupt(*arguments: Any) -> object:
        nonlocal count
        count += 1
        if count == 2 * 2 * 2 + 1:  # the first model has finished its third epoch
            stop.signal_number = signal.SIGINT
        return measure_errors(*arguments)

    monkeypatch.setattr(speech_training, "measure_errors", interrupt)
    report = SpeechBench(corpus, parse_methods(["softmax", "linear"]), SETTINGS, save=saved.append, stop=stop).run()
    assert report.ended == "interrupted" and saved[-1] == report
    assert {len(seed.points) for row in report.rows for seed in row.seeds} == {2}
    assert all(row.beam_error_rate is None for row in report.rows)
    assert not any("time ran out" in line for line in report.reduced)


def test_an_encoder_whose_loss_is_not_a_number_fails_alone(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_loss = CtcTask.measure_loss

    def fail(self: CtcTask, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if any(isinstance(module, torch.nn.LSTM) for module in self.model.modules()):
            self.model.head.bias.data.fill_(math.nan)
        return measure_loss(self, batch)

    monkeypatch.setattr(CtcTask, "measure_loss", fail)
    report = run(corpus, ["bi-lstm", "linear"])
    assert report.rows[0].failed is not None and report.rows[0].seeds == ()
    assert report.rows[0].failed.startswith("the loss or its gradient is NaN or infinite at step 0 (loss nan")
    assert report.rows[1].failed is None and report.rows[1].epochs == 3 and report.show("md").failure is None
    assert run(corpus, ["bi-lstm"]).show("md").failure == "every encoder failed; the table says why"


def test_without_epochs_the_budget_decides(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000_000, 5))  # every look at the clock takes five seconds
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    report = run(corpus, ["linear"], epochs=None, seeds=1)
    rates = [point.learning_rate for point in report.rows[0].seeds[0].points]
    assert 2 <= len(rates) < 60 and rates[-1] < 0.3 * max(rates)


def test_methods_are_those_of_the_paper_by_default() -> None:
    assert METHODS == ("bi-lstm", "softmax", "lsh-4=lsh:rounds=4", "linear")
    found = parse_methods(["linear", " bi-lstm ", "r=linear:feature_map=relu"])
    assert [one.label for one in found] == ["linear", "bi-lstm", "r"]
    for names, message in (
        (["bi-lstm", "bi-lstm"], "'bi-lstm' is given twice"),
        (["linear", "linear"], "'linear' is given twice"),
        (["rfa:gate=true"], "'rfa' with these options has no bidirectional form"),
        (["lineal"], "unknown attention 'lineal'; did you mean 'linear'"),
    ):
        with pytest.raises(UsageError, match=message):
            parse_methods(names)


def make_row(attention: str, rates: Sequence[float], seconds: float) -> SpeechRow:
    seeds = [SeedResult(number, ["ann"], 100, rate, None, 0, 0, 0, ()) for number, rate in enumerate(rates)]
    return SpeechRow(
        title="t",
        name=attention,
        attention=attention,
        attention_options={},
        device="cpu",
        parameters=1,
        error_rate=sum(rates) / len(rates),
        seconds_per_epoch=seconds,
        times_softmax=None,
        memory_bytes=None,
        published=find_published_speech(attention, {}),
        failed=None,
        seeds=seeds,
    )


def test_findings_compare_linear_with_softmax_here_and_in_the_paper() -> None:
    rows = [make_row("softmax", [0.1, 0.3, 0.2], 2.0), make_row("linear", [0.2, 0.2, 0.2], 1.0)]
    assert describe_findings(rows) == [
        "errors: linear 20.0%, softmax 20.0%; linear makes more in 1 of 3 seeds. In the paper: 8.08% and 5.12%",
        "time: an epoch of linear takes 50% of softmax's. In the paper: 30%",
    ]
    assert describe_findings(rows[:1]) == []
    rows[1] = dataclasses.replace(rows[1], seeds=rows[1].seeds[1:])  # each seed holds out other speakers
    assert "linear makes more in 0 of 2 seeds" in describe_findings(rows)[0]
