"""What a `Trainer` trains: a model with its batches and its loss, and its learning rate at every step."""

import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from linformer_cli.checkpoint_files import CheckpointInfo
from linformer_cli.config import TrainConfig
from linformer_cli.data.digest import DataDigest
from linformer_cli.evaluation.bits import Bits
from linformer_cli.system.signals import Check
from linformer_cli.units import IMAGES
from .progress import Progress

FALL = 0.25  # with the `trapezoid` schedule, the learning rate falls over this last share of a run

Batch = TypeVar("Batch")
Model = TypeVar("Model", bound=nn.Module)


class Task(ABC, Generic[Model, Batch]):
    """A model, its optimizer and settings. Tasks that are validated or saved need more than the abstract methods."""

    words = IMAGES
    # The number of training items, which is the length of an epoch.
    items = 1
    # Whether the model starts from trained weights. They are validated before the first step.
    pretrained = False

    def __init__(self, model: Model, optimizer: Optimizer, settings: TrainConfig, device: str = "cpu") -> None:
        self.model, self.optimizer, self.settings, self.device = model.train(), optimizer, settings, device

    @abstractmethod
    def load_batch(self, number: int, rows: range) -> Batch:
        """Load the `rows` of batch `number`, counted from 0. They depend only on the settings and the number."""

    @abstractmethod
    def measure_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the mean loss, whose gradient trains the model, and the mean nats, which are reported."""

    def learning_rate_at(self, step: int, share: float) -> float:
        return learning_rate_at(self.settings, step, share)

    def describe_batch(self, step: int) -> str:
        """Describe the batches of step number `step` for an error message."""
        return f"batch {step + 1}"

    def validate(self, model: Model, check: Check) -> Bits | None:
        """Measure bits/dim of `model`. `check` is called between batches and may raise to stop."""

    def draw(self, model: Model, path: Path, progress: Progress, check: Check) -> Path | None:
        """Write samples of `model` to `path` with an ending of its own. Return the name of the file."""

    def digest_data(self) -> DataDigest | None:
        """Return what the run remembers of its images, or None if it compares no images when it is resumed."""
        return None

    def describe(self, progress: Progress) -> CheckpointInfo:
        raise NotImplementedError


AnyTask = TypeVar("AnyTask", bound=Task[Any, Any])


def measure_progress(
    config: TrainConfig, step: int, elapsed_seconds: float, train_items: int, ending_seconds: float = 0.0
) -> float:
    """Return the finished share of a run in [0, 1], the largest by steps, images and time less `ending_seconds`.

    It is 1 if there is none of these limits.
    """
    done = []
    if config.steps is not None:
        done.append(step / config.steps)
    if config.epochs is not None:
        done.append(step * config.batch * config.accumulation / (config.epochs * train_items))
    if config.max_time is not None:
        done.append(elapsed_seconds / max(config.max_time - ending_seconds, config.max_time / 2))
    return min(max(done, default=1.0), 1.0)


def learning_rate_at(config: TrainConfig, step: int, share: float) -> float:
    """Return the learning rate after `step` steps, when the finished share of the run is `share` in [0, 1].

    After a linear warm-up, the rate follows half a `cosine`, or a `trapezoid`, which falls only in the last quarter, so
    that a run can be extended before, or is `constant`.
    """
    falling = {
        "cosine": (1 + math.cos(math.pi * share)) / 2,
        "trapezoid": min(1.0, (1 - share) / FALL),
        "constant": 1.0,
    }[config.schedule]
    floor = config.final_learning_rate_fraction
    warm = (step + 1) / (config.warmup_steps + 1)
    if config.warmup_share:
        warm = max(warm, share / config.warmup_share)
    return config.learning_rate * min(1.0, warm) * (floor + (1 - floor) * falling)
