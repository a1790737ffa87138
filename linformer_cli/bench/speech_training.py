"""The models that `lintx bench speech` trains, one for each mechanism and seed."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from linformer_cli.errors import TrainingError
from linformer_cli.model.variants import Variant
from linformer_cli.speech.ctc_task import CtcSettings, CtcTask, measure_errors
from linformer_cli.speech.decoding import Errors
from linformer_cli.speech.encoder import EncoderSettings, build_encoder
from linformer_cli.speech.saved import Recogniser
from linformer_cli.speech.utterances import Batch, Fold, group_by_length, make_batches
from linformer_cli.system.device import seeded
from linformer_cli.system.signals import Check
from linformer_cli.system.timing import time_work
from linformer_cli.training.learner import Step
from linformer_cli.training.loop import Trainer

from .speech_rows import SeedResult, SpeechPoint


@dataclass(frozen=True)
class Epoch:
    """The batches of an epoch, and how many there are."""

    batches: Sequence[Batch]
    frames: int
    utterances: int


class FoldData:
    """The batches of a seed. All mechanisms train on the same ones."""

    def __init__(self, fold: Fold, settings: EncoderSettings, batch_frames: int, device: str) -> None:
        self.fold, self._stack, self._frames, self._device = fold, settings.stack, batch_frames, device
        validation = group_by_length(fold.draw_validation(self._stack), 4 * batch_frames)
        self.validation = [batch.to(device) for batch in make_batches(validation)]

    def draw_epoch(self, epoch: int) -> Epoch:
        """Return the batches of an epoch, counted from 0, in an order that depends on seed and epoch."""
        utterances = self.fold.draw_training(epoch, self._stack)
        groups = group_by_length(utterances, self._frames)
        batches = [batch.to(self._device) for batch in make_batches(groups, self.fold.seed * 1_000_003 + epoch)]
        return Epoch(batches, sum(one.frames for one in utterances), len(utterances))


class Trainee:
    """The model of a mechanism and a seed, with its curve. `failed` says why its training ended early."""

    def __init__(self, variant: Variant, data: FoldData, settings: EncoderSettings, device: str) -> None:
        self.variant, self.data = variant, data
        self.failed: str | None = None
        self.seconds: list[float] = []
        self.points: list[SpeechPoint] = []
        self._errors: list[Errors] = []
        self._beam_errors: Errors | None = None
        self._alphabet = data.fold.corpus.alphabet
        seed = data.fold.seed
        with seeded(seed):
            encoder = build_encoder(variant.attention, variant.options, settings, len(self._alphabet))
        self.parameters = sum(parameter.numel() for parameter in encoder.parameters())
        self.encoder, self._device = encoder.to(device), device
        self._trainer = Trainer(CtcTask(self.encoder, CtcSettings(), seed, device))
        self._steps = self._trainer.steps()

    def train(self, epoch: Epoch, progress: Callable[[float], float], check: Check) -> None:
        """Train for one epoch and validate. Only the training is timed.

        `progress` returns the share of all training that is done when a share of this epoch is done. `check` is called
        before every update.
        """
        steps: list[Step] = []

        def work() -> None:
            for _ in epoch.batches:
                check()
                steps.append(next(self._steps))

        self._trainer.task.begin_epoch(epoch.batches, self._trainer.progress.step, progress)
        with seeded(self.data.fold.seed * 1_000_003 + len(self.points)):  # dropout depends only on seed and epoch
            try:
                seconds = time_work(work, self._device)
            except TrainingError as error:
                self.failed = str(error)
                return
        self.seconds.append(seconds)
        self._errors.append(measure_errors(self.encoder, self.data.validation))
        loss, rate = sum(step.nats for step in steps) / len(steps), steps[-1].learning_rate
        self.points.append(SpeechPoint(len(self.points) + 1, loss, self._errors[-1].rate, sum(self.seconds), rate))

    def cut(self, epochs: int) -> None:
        """Forget results after `epochs` epochs. If a round is interrupted, some models have one epoch too many."""
        for results in (self.points, self.seconds, self._errors):
            del results[epochs:]

    def decode_by_beam(self, width: int) -> None:
        """Measure the error rate of a beam of this width."""
        if self._errors:
            self._beam_errors = measure_errors(self.encoder, self.data.validation, width)

    def result(self) -> SeedResult | None:
        """Return the results so far, or None before the first epoch."""
        if not self._errors:
            return None
        errors, fold = self._errors[-1], self.data.fold
        return SeedResult(
            fold.seed,
            fold.held_out,
            errors.symbols,
            errors.rate,
            None if self._beam_errors is None else self._beam_errors.rate,
            errors.substitutions,
            errors.deletions,
            errors.insertions,
            tuple(self.points),
        )

    def recogniser(self) -> Recogniser | None:
        """Return the model for transcribing, or None before the first epoch."""
        if not self._errors:
            return None
        corpus = self.data.fold.corpus
        return Recogniser(
            self.variant.label,
            self.variant.attention,
            self.variant.options,
            self.encoder,
            self._alphabet,
            corpus.rate,
            corpus.title,
            tuple(self.data.fold.held_out),
            self._errors[-1].rate,
        )


def compare_epochs(trainees: Sequence[Trainee], others: Sequence[Trainee]) -> float | None:
    """Return how many epochs `trainees` train while `others` train one: the median ratio over rounds and seeds."""
    ratios = [
        theirs / own
        for one, other in zip(trainees, others, strict=True)
        for own, theirs in zip(one.seconds, other.seconds, strict=False)
    ]
    return statistics.median(ratios) if ratios else None
