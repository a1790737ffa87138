"""`lintx bench speech`: table 3 of Katharopoulos 2020, on spoken digits; every seed holds out other speakers."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from linformer_cli.errors import Interrupted, UsageError
from linformer_cli.model.mixers import Variant, parse_variants
from linformer_cli.speech.corpus import Corpus
from linformer_cli.speech.ctc_task import CtcSettings
from linformer_cli.speech.encoder import BI_LSTM, PRESETS, build_encoder
from linformer_cli.speech.utterances import Fold
from linformer_cli.system.signals import StopRequest
from linformer_cli.system.timing import Timing
from .budget import BudgetBench, Groups, Part, Schedule
from .measure.ceilings import Ceilings
from .published import find_published_speech
from .rounds import Bench, release, rows_of, turns_of
from .speech_report import LengthRow, SpeechReport, SpeechRow, describe_findings
from .speech_training import LengthMeasurement, StepSetup, Trainee, compare_epochs

METHODS = (BI_LSTM, "softmax", "lsh-4=lsh:rounds=4", "linear")
TABLE_FRAMES = 800  # the length whose memory stands in the table: about the mean of the paper's utterances
# Shares of the budget. The rest of it is for reading the data and for the beam.
_SCHEDULED_SHARE, _TRAINING_SHARE = 0.94, 0.92
_LENGTH_ROUNDS = 5
_MANY_EPOCHS = 2**24


@dataclass(frozen=True)
class SpeechSettings:
    """The settings that a user may choose. Without `epochs`, training lasts as long as the budget."""

    budget_seconds: float
    preset: str = "small"
    seeds: int = 3
    epochs: int | None = None
    strings: int = 128
    validation_strings: int = 64
    lengths: Sequence[int] = (400, 800, 1_600, 3_200, 6_400)
    batch_frames: int = 1_200
    beam: int = 8
    device: str = "cpu"


def parse_methods(entries: Sequence[str]) -> list[Variant]:
    """Parse variants such as `bi-lstm`, `linear` or `NAME=lsh:rounds=4`. Raises `UsageError` for impossible ones."""
    entries = [entry.strip() for entry in entries]
    if entries.count(BI_LSTM) > 1:
        raise UsageError(f"attention '{BI_LSTM}' is given twice")
    others = iter(parse_variants([entry for entry in entries if entry != BI_LSTM]))
    variants = [Variant(BI_LSTM, BI_LSTM, {}) if entry == BI_LSTM else next(others) for entry in entries]
    for variant in variants:
        build_encoder(variant.attention, variant.options, PRESETS["small"], 1)  # raises for a mechanism that cannot
    return variants


class SpeechBench(BudgetBench[SpeechReport]):
    """Trains all mechanisms in turn by epochs, then calls `report`, and times steps at some lengths in between."""

    def __init__(
        self,
        corpus: Corpus,
        variants: Sequence[Variant],
        settings: SpeechSettings,
        report: Callable[[Sequence[SpeechRow]], None] = lambda rows: None,
        save: Callable[[SpeechReport], None] = lambda report: None,
        stop: StopRequest | None = None,
    ) -> None:
        super().__init__(save, stop)
        self._corpus, self._variants, self._settings, self._report = corpus, variants, settings, report
        self._encoder = PRESETS[settings.preset]
        self._folds: list[Fold] = []
        self._trainees: dict[str, list[Trainee]] = {}
        self._lengths: dict[str, list[LengthMeasurement]] = {}
        self._epoch_frames: list[int] = []
        self._epoch_utterances = 0
        self._ended = "interrupted"
        self._round_share = 0.0
        rounds = _MANY_EPOCHS if settings.epochs is None else settings.epochs
        parts = [Part("training", _TRAINING_SHARE, rounds, self._prepare_training)]
        if settings.lengths:
            parts.append(Part("lengths", 1 - _TRAINING_SHARE, _LENGTH_ROUNDS, self._prepare_lengths))
        self._schedule = Schedule(parts, self._finish_group, self.elapsed_seconds)

    def measure(self) -> None:
        """Train until the budget or all epochs are over. Raises `DataError` for too short an utterance."""
        self._schedule.run(_SCHEDULED_SHARE * self._settings.budget_seconds - self.elapsed_seconds())
        for trainee in self._list_trainees():
            self._stop.raise_if_set()
            trainee.decode_by_beam(self._settings.beam)
        self._ended = "finished"

    def describe(self) -> SpeechReport:
        rows = [self._describe_row(variant) for variant in self._variants if variant.label in self._trainees]
        training = self._schedule.parts[0]
        reduced = [line for line in self._schedule.reduced if not line.startswith(f"{training.name}:")]
        if self._settings.epochs is not None and self._schedule.finished and training.rounds_done < training.rounds:
            reduced.append(f"training: {training.rounds_done} of {training.rounds} epochs because time ran out")
        if self._settings.preset != "paper":
            paper, own = PRESETS["paper"], self._encoder
            reduced.append(
                f"encoder: {own.layers} layers, {own.heads} heads, width {own.width}, {own.stack} frames per position, "
                f"bi-lstm of {own.lstm_layers} x {own.lstm_cells}; the paper's are {paper.layers}, {paper.heads}, "
                f"{paper.width}, {paper.stack} and {paper.lstm_layers} x {paper.lstm_cells}"
            )
        return SpeechReport(
            budget_seconds=self._settings.budget_seconds,
            elapsed_seconds=self.elapsed_seconds(),
            reduced=reduced,
            rows=rows,
            lengths=self._list_lengths(),
            findings=describe_findings(rows),
            ended=self._ended,
            settings={
                "title": self._corpus.title,
                "notes": self._corpus.notes,
                "preset": self._settings.preset,
                "encoder": self._encoder,
                "training": CtcSettings(),
                "optimizer": "radam",
                "seeds": self._settings.seeds,
                "epochs_wanted": self._settings.epochs,
                "batch_frames": self._settings.batch_frames,
                "epoch_frames": self._mean_epoch_frames,
                "epoch_utterances": self._epoch_utterances,
                "beam": self._settings.beam,
                "precision": "fp32",
            },
        )

    @property
    def _mean_epoch_frames(self) -> int:
        return round(statistics.fmean(self._epoch_frames or [0]))

    def _describe_row(self, variant: Variant) -> SpeechRow:
        trainees = self._trainees[variant.label]
        softmax = next((self._trainees[one.label] for one in self._variants if one.attention == "softmax"), None)
        lengths = {(row.name, row.positions): row.peak_memory_bytes for row in self._list_lengths()}
        figures: dict[str, Any] = {}
        seeds = [found for one in trainees if (found := one.result()) is not None]
        if seeds:
            rates = [seed.error_rate for seed in seeds]
            timing = Timing([one for each in trainees for one in each.seconds])
            beams = [seed.beam_error_rate for seed in seeds if seed.beam_error_rate is not None]
            figures = {
                "epochs": min(len(seed.points) for seed in seeds),
                "error_rate": statistics.fmean(rates),
                "error_rate_range": (min(rates), max(rates)),
                "beam_error_rate": statistics.fmean(beams) if len(beams) == len(seeds) else None,
                "seconds_per_epoch": timing.median,
                "seconds_per_epoch_quartiles": timing.quartiles,
                "seeds": seeds,
            }
        return SpeechRow(
            title=self._corpus.title,
            **variant.described,
            device=self._settings.device,
            parameters=trainees[0].parameters,
            times_softmax=None if softmax is None else compare_epochs(trainees, softmax),
            memory_bytes=lengths.get((variant.label, TABLE_FRAMES)),
            published=find_published_speech(variant.attention, variant.options),
            failed=next((one.failed for one in trainees if one.failed), None),
            **figures,
        )

    def _list_trainees(self) -> list[Trainee]:
        return [one for trainees in self._trainees.values() for one in trainees]

    def _list_lengths(self) -> list[LengthRow]:
        labels = [variant.label for variant in self._variants]
        rows = [row for group in self._lengths.values() for row in rows_of(group)]
        return sorted(rows, key=lambda row: (labels.index(row.name), row.positions))

    def _prepare_training(self, seconds: float) -> Groups:
        settings = self._settings
        for seed in range(settings.seeds):
            self._stop.raise_if_set()
            sizes = (settings.strings, settings.validation_strings), self._encoder.stack, settings.batch_frames
            self._folds.append(Fold(self._corpus, seed, *sizes, settings.device))
        self._trainees = {
            variant.label: [Trainee(variant, fold, self._encoder, settings.device) for fold in self._folds]
            for variant in self._variants
        }
        return {"epoch": [self._train_epoch]}

    def _train_epoch(self) -> None:
        """Train every model for one epoch: the mechanisms in turn, on the same batches."""
        number, began = self._schedule.parts[0].rounds_done, self.elapsed_seconds()
        progress = partial(self._progress, number, began)
        try:
            for index, fold in enumerate(self._folds):
                epoch = fold.draw_batches(number)
                self._epoch_frames.append(sum(int(batch.lengths.sum()) for batch in epoch))
                self._epoch_utterances = sum(len(batch.lengths) for batch in epoch)
                for trainees in self._trainees.values():
                    self._stop.raise_if_set()
                    if trainees[index].failed is None:
                        trainees[index].train(epoch, progress, self._stop.raise_if_set)
        except Interrupted:
            for trainee in self._list_trainees():
                trainee.cut(number)
            raise
        if all(trainee.failed for trainee in self._list_trainees()):
            self._schedule.parts[0].rounds = number + 1
        self._round_share = (self.elapsed_seconds() - began) / self._settings.budget_seconds

    def _progress(self, number: int, began: float, share: float) -> float:
        """Return the share of the whole training when `share` of epoch `number` is done, by epochs or else by time."""
        if self._settings.epochs is not None:
            return (number + share) / self._settings.epochs
        return (began / self._settings.budget_seconds + self._round_share * share) / _SCHEDULED_SHARE

    def _prepare_lengths(self, seconds: float) -> Groups:
        settings, symbols = self._settings, len(self._corpus.alphabet)
        frames = self._mean_epoch_frames
        bench = Bench(Ceilings(settings.device), check=self._stop.raise_if_set)
        for length in sorted(set(settings.lengths), key=lambda length: abs(length - TABLE_FRAMES)):
            batch = max(settings.lengths) // length  # as many frames as the longest utterance
            setups = [StepSetup(one, self._encoder, symbols, length, batch, settings.device) for one in self._variants]
            self._lengths[f"{length:,} frames"] = [LengthMeasurement(1, bench, setup, frames) for setup in setups]
        return {title: list(turns_of(group)) for title, group in self._lengths.items()}

    def _finish_group(self, part: Part, title: str) -> None:
        release(self._lengths.get(title, ()))
        if part.name == "training":
            self._report(self.describe().rows)
            self.save_now_and_then()
