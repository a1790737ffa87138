"""Training of a `PixelModel` on images or windows of bytes, and on the predictions of teachers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linformer_cli.checkpoint import load_weights, reopen_checkpoint
from linformer_cli.checkpoint_files import CheckpointInfo, DataSummary, TrainingSummary
from linformer_cli.config import RunConfig
from linformer_cli.data.batches import Batches, flip_images, shift_images
from linformer_cli.data.digest import DataDigest, digest_data
from linformer_cli.data.images import ImageSet
from linformer_cli.data.sequence import images_to_values, paint
from linformer_cli.evaluation.bits import Bits, measure_nats
from linformer_cli.files import write_file
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.report.grids import encode_png, render_grid
from linformer_cli.report.terminal import render_windows
from linformer_cli.sampling.decode import Sampler
from linformer_cli.system.signals import Check
from linformer_cli.units import WINDOWS
from .optimizer import build_optimizer
from .progress import Progress
from .task import Task
from .transfer import Transfer, transfer_weights


class Teachers:
    """Trained models of images of the same shape, from which a model learns (Hinton 2015, arXiv 1503.02531)."""

    def __init__(self, models: Sequence[PixelModel]) -> None:
        self.models = models

    @classmethod
    def load(cls, config: RunConfig, device: str) -> Self:
        """Load the models that a run learns from. Raises `CheckpointError` if one is missing or has other weights."""
        return cls([load_weights(reopen_checkpoint(origin), device) for origin in config.distill_from])

    @torch.no_grad()
    def predict(self, values: Tensor, labels: Tensor | None) -> Tensor:
        """Return probabilities [B, T, levels] of the next value, for values int64 [B, T] and labels int64 [B].

        They are proportional to the geometric mean of the models' probabilities. For a model without classes, a class
        changes its log probabilities as it does those of the others, on average over those with an optional class.
        """
        logs = [_log_probabilities(model, values, labels if model.config.classes else None) for model in self.models]
        mean = torch.stack(logs).mean(dim=0)
        unaware = sum(not model.config.classes for model in self.models)
        aware = [(model, log) for model, log in zip(self.models, logs, strict=True) if model.config.optional_class]
        if unaware and aware and labels is not None:
            # For an image without a class, the change is 0.
            changes = [log - _log_probabilities(model, values, None) for model, log in aware]
            mean += torch.stack(changes).mean(dim=0) * (unaware / len(self.models))
        return mean.softmax(dim=-1)

    def measure_loss(
        self, model: PixelModel, values: Tensor, labels: Tensor | None, share: float
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, `share` of it cross-entropy with teachers, and the nats [B, T] of values int64 [B, T]."""
        predicted, logs = self.predict(values, labels), _log_probabilities(model, values, labels)
        nats = -logs.gather(-1, values.unsqueeze(-1)).squeeze(-1)
        return share * -(predicted * logs).sum(dim=-1) + (1 - share) * nats, nats


def _log_probabilities(model: PixelModel, values: Tensor, labels: Tensor | None) -> Tensor:
    """Log probabilities [B, T, levels] of every value, for values int64 [B, T]."""
    parameters, _ = model.attend(model.shift_values(values, labels))
    return model.head.log_probabilities(parameters)


def build_model(config: RunConfig) -> PixelModel:
    """Build the untrained model of a run. Its weights depend only on the seed."""
    torch.manual_seed(config.train.seed)
    return PixelModel(config.model)


class PixelTask(Task[PixelModel, tuple[Tensor, Tensor | None]]):
    """A batch consists of values int64 [B, T] and, if the model has classes, labels int64 [B].

    `images` are for training and validation. `precision` (`fp32` or `bf16`) is kept in `config`. Raises `UsageError`
    for images of another size, `DataError` if labels are missing, and `CheckpointError` if a teacher is missing or has
    changed.
    """

    def __init__(self, config: RunConfig, images: tuple[ImageSet, ImageSet], device: str, precision: str) -> None:
        # A run keeps the precision that "auto" chose, even if it is resumed on another machine.
        settings = config.train.model_copy(update={"precision": precision})
        self.config = config.model_copy(update={"train": settings})
        self.words, self.autocast = config.data.words, precision == "bf16"
        self.training, self.validation = images
        self.training.require_shape(config.model.image)
        given, required = config.model.classes, config.model.required_classes
        self.labels = self.training.require_labels(given) if given else None
        self.validation_labels = self.validation.require_labels(required) if required else None
        self.items, self.pretrained = len(self.training), config.init_from is not None
        self.batches = Batches(self.items, settings.seed)
        self.drawn: NDArray[np.uint8] | None = None  # the images of the last grid
        self.teachers = Teachers.load(config, device) if config.distill_from else None
        model = build_model(config).to(device)
        super().__init__(model, build_optimizer(model, settings), settings, device)

    def transfer(self, source: PixelModel) -> Transfer:
        self.pretrained = True
        return transfer_weights(self.model, source)

    def load_batch(self, number: int, rows: range) -> tuple[Tensor, Tensor | None]:
        settings, size = self.settings, len(rows)
        start = number * settings.batch + rows.start
        indices = self.batches.batch(start, size)
        images = self.training.images[indices]
        if settings.flip:
            images = flip_images(images, self.batches.flips(start, size))
        if settings.shift:
            images = shift_images(images, self.batches.shifts(start, size, settings.shift))
        values = images_to_values(images, self.config.model.image).to(self.device)
        if self.labels is None:
            return values, None
        labels = self.labels[indices]
        if settings.hide_class:
            hidden = self.batches.hidden_classes(start, size, settings.hide_class)
            labels = np.where(hidden, self.config.model.default_label, labels)
        return values, torch.from_numpy(labels).to(self.device)

    def measure_loss(self, batch: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.device.partition(":")[0], torch.bfloat16, enabled=self.autocast):
            if self.teachers is None:
                nats = self.model.nats(*batch).mean()
                return nats, nats
            loss, nats = self.teachers.measure_loss(self.model, *batch, self.settings.distill_share)
            return loss.mean(), nats.mean()

    def describe_batch(self, step: int) -> str:
        size = self.settings.batch * self.settings.accumulation
        epoch, place = divmod(step * size, self.items)
        first = ", ".join(str(index) for index in self.batches.batch(step * size, min(size, 3)))
        items = f"training {self.words.items} {first}{', ...' if size > 3 else ''}"
        return f"batch {place // size + 1} of epoch {epoch + 1} ({items})"

    def validate(self, model: PixelModel, check: Check) -> Bits:
        images = self.validation.images[: self.settings.evaluate_images]
        return measure_nats(model, images, before_batch=check, labels=self.validation_labels).describe()

    def draw(self, model: PixelModel, path: Path, progress: Progress, check: Check) -> Path:
        """Write a grid or, for a model of bytes, a text, always from the same random streams."""
        model.eval()
        try:
            images = Sampler(model, self.settings.seed).sample_images(self.settings.sample_images, before_step=check)
            self.drawn = images
        finally:
            model.train()
        if self.words is WINDOWS:
            path, text = path.with_suffix(".txt"), render_windows([window.tobytes() for window in images])
            write_file(path, text.encode())
        else:
            path, facts = path.with_suffix(".png"), {"step": progress.step, "images_seen": progress.images_seen}
            write_file(path, encode_png(render_grid(paint(images, model.config.image)), facts))
        return path

    def digest_data(self) -> DataDigest:
        return digest_data(self.training, self.validation)

    def describe(self, progress: Progress) -> CheckpointInfo:
        """Only validated weights have bits/dim."""
        measured = progress.is_validated
        return CheckpointInfo(
            model=self.config.model,
            data=DataSummary(
                name=self.training.name,
                train_images=self.items,
                border_mean=round(self.training.border_mean(), 2),
                **self.training.look.stored,
            ),
            training=TrainingSummary(
                step=progress.step,
                images_seen=progress.images_seen,
                elapsed_seconds=round(progress.elapsed_seconds, 3),
                validation_bits_per_dim=progress.validation_bits_per_dim if measured else None,
                validation_standard_error=progress.validation_standard_error if measured else None,
                validation_images=min(self.settings.evaluate_images, len(self.validation)) if measured else None,
                preset=self.config.preset,
                init_from=self.config.init_from,
                distill_from=self.config.distill_from,
                settings=self.settings,
            ),
        )
