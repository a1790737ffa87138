"""The work of `lintx bench speech`: training a model for each mechanism and seed, and steps at several lengths."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from linformer_cli.errors import TrainingError
from linformer_cli.model.mixers import Variant
from linformer_cli.speech.ctc_task import CtcSettings, CtcTask, Errors, measure_errors
from linformer_cli.speech.encoder import EncoderSettings, build_encoder
from linformer_cli.speech.utterances import Batch, Fold
from linformer_cli.speech.waves import BANDS
from linformer_cli.system.device import seeded
from linformer_cli.system.signals import Check
from linformer_cli.system.timing import Timing, time_work
from linformer_cli.training.learner import Learner, Step
from linformer_cli.training.loop import Trainer
from .measure.peak_memory import PassFailed, measure_peak
from .rounds import Measurement
from .speech_report import LengthRow, SeedResult, SpeechPoint

# Digits have about one symbol in this many frames.
_FRAMES_PER_SYMBOL = 16
_MEMORY_LIMIT_SECONDS = 60.0


def build_task(variant: Variant, settings: EncoderSettings, symbols: int, seed: int, device: str) -> CtcTask:
    with seeded(seed):
        encoder = build_encoder(variant.attention, variant.options, settings, symbols)
    return CtcTask(encoder.to(device), CtcSettings(), seed, device)


class Trainee:
    """The model of a mechanism and a seed, with its curve. `failed` says why its training ended early."""

    def __init__(self, variant: Variant, fold: Fold, settings: EncoderSettings, device: str) -> None:
        self.variant, self.fold = variant, fold
        self.failed: str | None = None
        self.seconds: list[float] = []
        self.points: list[SpeechPoint] = []
        self._errors: list[Errors] = []
        self._beam_errors: Errors | None = None
        self._trainer = Trainer(build_task(variant, settings, len(fold.corpus.alphabet), fold.seed, device))
        self.encoder = self._trainer.task.model
        self.parameters = sum(parameter.numel() for parameter in self.encoder.parameters())
        self._steps = self._trainer.steps()

    def train(self, batches: Sequence[Batch], progress: Callable[[float], float], check: Check) -> None:
        """Train for one timed epoch, and validate. `progress` maps a share of the epoch to one of the training."""
        steps: list[Step] = []

        def work() -> None:
            for _ in batches:
                check()
                steps.append(next(self._steps))

        self._trainer.task.begin_epoch(batches, self._trainer.progress.step, progress)
        with seeded(self.fold.seed * 1_000_003 + len(self.points)):  # dropout depends only on seed and epoch
            try:
                self.seconds.append(time_work(work, self._trainer.task.device))
            except TrainingError as error:
                self.failed = str(error)
                return
        self._errors.append(measure_errors(self.encoder, self.fold.validation))
        loss, rate = sum(step.nats for step in steps) / len(steps), steps[-1].learning_rate
        self.points.append(SpeechPoint(len(self.points) + 1, loss, self._errors[-1].rate, sum(self.seconds), rate))

    def cut(self, epochs: int) -> None:
        """Forget results after `epochs` epochs. If a round is interrupted, some models have one epoch too many."""
        for results in (self.points, self.seconds, self._errors):
            del results[epochs:]

    def decode_by_beam(self, width: int) -> None:
        if self._errors:
            self._beam_errors = measure_errors(self.encoder, self.fold.validation, width)

    def result(self) -> SeedResult | None:
        if not self._errors:
            return None
        errors, fold, beam = self._errors[-1], self.fold, self._beam_errors
        counts = errors.substitutions, errors.deletions, errors.insertions
        rates = errors.rate, None if beam is None else beam.rate
        return SeedResult(fold.seed, fold.held_out, errors.symbols, *rates, *counts, tuple(self.points))


def compare_epochs(trainees: Sequence[Trainee], others: Sequence[Trainee]) -> float | None:
    """Return how many epochs `trainees` train in one of `others`: the median ratio over rounds and seeds."""
    ratios = [
        theirs / own
        for one, other in zip(trainees, others, strict=True)
        for own, theirs in zip(one.seconds, other.seconds, strict=False)
    ]
    return statistics.median(ratios) if ratios else None


@dataclass(frozen=True)
class StepSetup:
    variant: Variant
    settings: EncoderSettings
    symbols: int
    frames: int
    batch: int
    device: str


@dataclass(eq=False)
class LengthMeasurement(Measurement[LengthRow, Learner[CtcTask]]):
    """Training steps of one mechanism at one length. `epoch_frames` is the number of frames of an epoch."""

    setup: StepSetup
    epoch_frames: int
    peak_bytes: int | None = field(default=None, init=False)

    @property
    def network(self) -> int:
        return self.setup.frames

    def prepare(self) -> Learner[CtcTask]:
        self.bench.check()
        if self.peak_bytes is None:
            peak = self.measure_apart(lambda: measure_peak(build_step, self.setup, _MEMORY_LIMIT_SECONDS))
            self.peak_bytes = peak.bytes
        learner = build_learner(self.setup, draw_batch(self.setup))
        try:
            learner.train_step()
        except TrainingError as error:
            raise PassFailed(str(error)) from None
        return learner

    def time_sample(self, work: Learner[CtcTask]) -> float:
        self.bench.check()
        return time_work(work.train_step, self.setup.device)

    def row(self) -> LengthRow:
        setup = self.setup
        steps = self.epoch_frames / (setup.batch * setup.frames)
        timing = Timing([steps * seconds for seconds in self.samples])
        return LengthRow(
            **setup.variant.described,
            device=setup.device,
            batch=setup.batch,
            positions=setup.frames,
            peak_memory_bytes=self.peak_bytes,
            seconds_per_epoch=timing.median if self.samples else None,
            seconds_per_epoch_quartiles=timing.quartiles if self.samples else None,
            **self.outcome,
        )


def build_step(setup: StepSetup) -> Callable[[], object]:
    """Return a training step whose gradients have been allocated."""
    learner = build_learner(setup, draw_batch(replace(setup, batch=1, frames=min(setup.frames, 200))))
    learner.train_step()
    learner.task.begin_epoch([draw_batch(setup)])
    return learner.train_step


def build_learner(setup: StepSetup, batch: Batch) -> Learner[CtcTask]:
    """Return an untrained encoder that learns from `batch` again and again."""
    task = build_task(setup.variant, setup.settings, setup.symbols, 0, setup.device)
    task.begin_epoch([batch])
    return Learner(task)


def draw_batch(setup: StepSetup) -> Batch:
    generator = torch.Generator().manual_seed(0)
    count = max(1, setup.frames // _FRAMES_PER_SYMBOL)
    shape = (setup.batch, setup.frames, BANDS)
    return Batch(
        torch.randn(shape, generator=generator),
        torch.full((setup.batch,), setup.frames),
        torch.randint(1, setup.symbols + 1, (setup.batch, count), generator=generator),
        torch.full((setup.batch,), count),
    ).to(setup.device)
