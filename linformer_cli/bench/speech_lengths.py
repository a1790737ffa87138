"""Time and memory of training steps of `lintx bench speech`, against the length of the utterances."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from linformer_cli.errors import TrainingError
from linformer_cli.speech.ctc_task import CtcSettings, CtcTask
from linformer_cli.speech.encoder import EncoderSettings, build_encoder
from linformer_cli.speech.features import BANDS
from linformer_cli.speech.utterances import Batch
from linformer_cli.system.device import seeded
from linformer_cli.system.signals import Check
from linformer_cli.system.timing import Timing, time_work
from linformer_cli.training.learner import Learner

from .measure.ceilings import Ceilings
from .measure.memory import PassFailed, measure_peak
from .rounds import Measurement
from .speech_rows import LengthRow

# Digits have about one symbol in this many frames.
_FRAMES_PER_SYMBOL = 16
_MEMORY_LIMIT_SECONDS = 60.0


@dataclass(frozen=True)
class StepSetup:
    """A training step on `batch` utterances of `frames` frames."""

    attention: str
    options: dict[str, Any]
    settings: EncoderSettings
    symbols: int
    frames: int
    batch: int
    device: str


class LengthMeasurement(Measurement[LengthRow, Learner[CtcTask]]):
    """Training steps of one mechanism at one length. `epoch_frames` is the number of frames of an epoch."""

    def __init__(self, label: str, setup: StepSetup, epoch_frames: int, ceilings: Ceilings, check: Check) -> None:
        super().__init__(1, ceilings, check, setup.frames)
        self._label, self._setup, self._epoch_frames = label, setup, epoch_frames
        self._batch = draw_batch(setup)
        self._peak_bytes: int | None = None

    def prepare(self) -> Learner[CtcTask]:
        self.check()
        if self._peak_bytes is None:
            self._peak_bytes = self.measure_apart(
                lambda: measure_peak(build_step, self._setup, _MEMORY_LIMIT_SECONDS)
            ).bytes
        learner = build_learner(self._setup, self._batch)
        try:
            learner.train_step()
        except TrainingError as error:
            raise PassFailed(str(error)) from None
        return learner

    def time_sample(self, work: Learner[CtcTask]) -> float:
        self.check()
        return time_work(work.train_step, self._setup.device)

    def row(self) -> LengthRow:
        setup = self._setup
        row = LengthRow(
            name=self._label,
            attention=setup.attention,
            attention_options=setup.options,
            engine="parallel",
            precision="fp32",
            device=setup.device,
            batch=setup.batch,
            positions=setup.frames,
            repeats=len(self.samples),
            samples_seconds=list(self.samples),
            peak_memory_bytes=self._peak_bytes,
            left_out=self.left_out,
        )
        if not self.samples:
            return row
        timing, steps = Timing(self.samples), self._epoch_frames / (setup.batch * setup.frames)
        low, high = timing.quartiles
        return replace(
            row, seconds_per_epoch=steps * timing.median, seconds_per_epoch_quartiles=(steps * low, steps * high)
        )


def build_step(setup: StepSetup) -> Callable[[], object]:
    """Return a training step whose gradients have been allocated."""
    learner = build_learner(setup, draw_batch(replace(setup, batch=1, frames=min(setup.frames, 200))))
    learner.train_step()
    learner.task.begin_epoch([draw_batch(setup)])
    return learner.train_step


def build_learner(setup: StepSetup, batch: Batch) -> Learner[CtcTask]:
    """Return an untrained encoder that learns from `batch` again and again."""
    with seeded(0):
        encoder = build_encoder(setup.attention, setup.options, setup.settings, setup.symbols)
    task = CtcTask(encoder.to(setup.device), CtcSettings(), 0, setup.device)
    task.begin_epoch([batch])
    return Learner(task)


def draw_batch(setup: StepSetup) -> Batch:
    """Return random features and symbols."""
    generator = torch.Generator().manual_seed(0)
    count = max(1, setup.frames // _FRAMES_PER_SYMBOL)
    shape = (setup.batch, setup.frames, BANDS)
    return Batch(
        torch.randn(shape, generator=generator),
        torch.full((setup.batch,), setup.frames),
        torch.randint(1, setup.symbols + 1, (setup.batch, count), generator=generator),
        torch.full((setup.batch,), count),
    ).to(setup.device)
