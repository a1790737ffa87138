"""Builds short runs on glyphs, and a watcher that records their events."""

import csv
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from machine import TIMING_METRICS

from linformer_cli.checkpoint import read_checkpoint
from linformer_cli.config import RunConfig
from linformer_cli.data.glyphs import draw_glyphs
from linformer_cli.data.images import ImageSet
from linformer_cli.evaluation.bits import Bits
from linformer_cli.metrics import COLUMNS, MetricsRow
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.system.signals import StopRequest
from linformer_cli.training.loop import Trainer
from linformer_cli.training.pixel_task import PixelTask
from linformer_cli.training.progress import Progress, Reporter
from linformer_cli.training.run_folder import RunFolder

TRAINING_IMAGES, VALIDATION_IMAGES = 30, 6
# Events share a step only where a test needs it. 14 steps of 4 or 8 images read the 30 images more than once.
STEPS, LOG_EVERY, EVALUATE_EVERY, SAVE_EVERY = 14, 4, 5, 3
# Each of the two layers has its own random features, redrawn in steps 0, 4, 8 and 12.
REDRAWN = {"attention": "performer", "attention_options": {"redraw_every": 4, "features": 8}, "layers": 2}


def glyphs(split: str) -> ImageSet:
    start, stop = (0, TRAINING_IMAGES) if split == "train" else (100, 100 + VALIDATION_IMAGES)
    return ImageSet("glyphs", split, *draw_glyphs("train", 8, start, stop))  # type: ignore[arg-type]


TRAIN, VALIDATION = glyphs("train"), glyphs("validation")


class Watcher(Reporter):
    """Records (event, step), and can run an action at an event, such as a stop, a fault or a check."""

    def __init__(self, stop: StopRequest | None = None, signal_number: int = signal.SIGINT) -> None:
        self.events: list[tuple[str, int]] = []
        self.rows: list[MetricsRow] = []
        self.spikes: list[str] = []
        self.actions: dict[tuple[str, int], Callable[[], object]] = {}
        self.stop = stop or StopRequest()
        self.signal_number = int(signal_number)

    def at(self, event: str, step: int, action: Callable[[], object] | None = None) -> "Watcher":
        self.actions[event, step] = action or (lambda: setattr(self.stop, "signal_number", self.signal_number))
        return self

    def record(self, event: str, step: int) -> None:
        self.events.append((event, step))
        self.actions.get((event, step), lambda: None)()

    def on_step(self, row: MetricsRow, finished_share: float) -> None:
        assert 0 <= finished_share <= 1
        self.rows.append(row)
        self.record("log", row.step)

    def on_evaluate(self, progress: Progress, bits: Bits, is_best: bool) -> None:
        assert progress.validation_bits_per_dim == bits.bits_per_dim
        self.record("best" if is_best else "evaluate", progress.step)

    def on_sample(self, path: Path) -> None:
        assert path.is_file()
        self.record("sample", int(path.stem.removeprefix("step-")))

    def on_spike(self, message: str) -> None:
        self.spikes.append(message)

    def on_save(self, path: Path, progress: Progress) -> None:
        assert read_checkpoint(path).info.training.step == progress.step
        self.record("save", progress.step)

    def steps(self, event: str) -> list[int]:
        # A run may also save its initial weights.
        return [step for name, step in self.events if name == event and step > 0]


def begin(
    config: RunConfig, path: Path, precision: str = "fp32", source: PixelModel | None = None
) -> Trainer[PixelTask]:
    """Begin or continue the run in `path`; with `source`, from its weights."""
    folder = RunFolder(path)
    if not folder.config_file.exists():
        folder.create(config)
    task = PixelTask(config, (TRAIN, VALIDATION), "cpu", precision)
    if source is not None:
        task.transfer(source)
    return Trainer(task, folder)


def train(trainer: Trainer[PixelTask], watcher: Watcher | None = None) -> Watcher:
    watcher = watcher or Watcher()
    trainer.run(watcher, watcher.stop)
    return watcher


def read_metrics(folder: RunFolder) -> list[dict[str, str]]:
    """Return all rows without the columns that depend on the machine."""
    with open(folder.metrics_file, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{key: row[key] for key in COLUMNS if key not in TIMING_METRICS} for row in rows]


def all_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def record_order(trainer: Trainer[PixelTask], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list that training fills with the image indices of every batch."""
    order: list[list[int]] = []
    draw = trainer.task.batches.batch

    def batch(start: int, size: int) -> Any:
        indices = draw(start, size)
        order.append(indices.tolist())
        return indices

    monkeypatch.setattr(trainer.task.batches, "batch", batch)
    return order
