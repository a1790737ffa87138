"""A model in training, with its optimizer and the average of its weights."""

import contextlib
import math
import time
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from linformer_cli.checkpoint import TrainingState
from linformer_cli.config import RunConfig
from linformer_cli.data.batches import Batches, flip_images, shift_images
from linformer_cli.data.images import ImageSet
from linformer_cli.data.sequence import images_to_values
from linformer_cli.errors import TrainingError
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.system.device import synchronize
from linformer_cli.system.distributed import ALONE, Team, keep_own

from .distillation import Teachers
from .optimizer import build_average, build_optimizer, load_optimizer_tensors, strip_prefix
from .progress import Progress
from .saving import AVERAGED, IN_TRAINING, restore_random_state
from .together import has_idle_parameters, seed_own_dropout, share_batch, share_model


def build_model(config: RunConfig) -> PixelModel:
    """Build the untrained model of a run. Its weights depend only on the seed."""
    torch.manual_seed(config.train.seed)
    return PixelModel(config.model)


class Learner:
    """A model in training on `device`, in `precision` (`fp32` or `bf16`), with the images and models it learns from.

    Each process of a `team` trains on its share of every batch. After a step, all processes have the same weights.
    Raises `UsageError` for a batch with fewer images than processes, and for images that do not have the model's size.
    Raises `DataError` if the model needs classes and the images have no labels, and `CheckpointError` if a model to
    learn from is missing or has changed.
    """

    def __init__(self, config: RunConfig, images: ImageSet, device: str, precision: str, team: Team = ALONE) -> None:
        self.config, self.device, self.train_set = config, device, images
        self.team, self.own_batch = team, share_batch(team, config.train.batch)
        images.require_shape(config.model.image)
        self.labels = images.require_labels(config.model.classes) if config.model.classes else None
        self.autocast = precision == "bf16"
        self.batches = Batches(len(images), config.train.seed)
        self.teachers = Teachers.load(config, device) if config.distill_from else None
        self._timed_steps = 0
        self._use_model(build_model(config).to(device))

    def _use_model(self, model: PixelModel) -> None:
        """Train `model` from now on, with a new optimizer and a new average."""
        self.model = model.train()
        self.optimizer = build_optimizer(model, self.config.train)
        self.average = build_average(model, self.config.train)
        self._likelihood: Module | None = None

    def restore(self, model: PixelModel, state: TrainingState) -> None:
        """Continue with the weights and the training state of a save. This leaves only the progress in `state.values`.

        Raises `KeyError`, `TypeError`, `ValueError`, `IndexError` or `RuntimeError` if `model` and `state` do not fit
        together.
        """
        self._use_model(model)
        if self.average is not None:
            # The checkpoint holds the average of the weights. The training state holds the weights in training.
            self.average.n_averaged.fill_(state.values.pop(AVERAGED))
            self.model.load_state_dict(strip_prefix(state.tensors, IN_TRAINING))
        complete = load_optimizer_tensors(self.optimizer, state.tensors)
        if not complete and state.values["step"] != 0 and not has_idle_parameters(self.model):
            raise ValueError("moments of the optimizer are missing")
        restore_random_state(state.tensors, self.device)

    @property
    def evaluated_model(self) -> PixelModel:
        """The model to evaluate, sample from and save. It has the average of the weights if there is one."""
        if self.average is None:
            return self.model
        return cast(PixelModel, self.average.module)

    @property
    def likelihood(self) -> Module:
        """The model as a module that returns the loss and nats. Backward averages the gradients of all processes."""
        if self._likelihood is None:
            self._likelihood = share_model(self.team, self.model, self.config.train.distill_share)
        return self._likelihood

    def train_step(self, progress: Progress, rate: float) -> tuple[float, float]:
        """Take one optimizer step at learning rate `rate`. Return nats per value and the gradient norm before clipping.

        Raises `TrainingError`, with the weights unchanged, if one of these two numbers is NaN or infinite.
        """
        settings = self.config.train
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_share", 1.0)
        self.model.on_training_step(progress.step, settings.seed)
        seed_own_dropout(self.team, settings.seed, progress.step)
        self.optimizer.zero_grad(set_to_none=True)
        # The gradients of the processes are averaged with equal weights, but their shares of the batch may differ in
        # size. Each loss is therefore weighted with its share.
        share = len(self.own_batch) / settings.batch
        total = 0.0
        for part in range(settings.accumulation):
            start = progress.images_seen + part * settings.batch + self.own_batch.start
            with keep_own(self.likelihood) if part + 1 < settings.accumulation else contextlib.nullcontext():
                loss, nats = self.measure_loss(start)
                (loss * (share * self.team.count / settings.accumulation)).backward()
            total += float(nats.detach()) * share / settings.accumulation
        total = self.team.total(total)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip or math.inf))
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise TrainingError(
                f"the loss or its gradient is NaN or infinite at step {progress.step} (loss {total}, gradient norm "
                f"{norm}), {self.describe_batch(progress)}"
            )
        self.optimizer.step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        return total, norm

    def measure_loss(self, start: int) -> tuple[Tensor, Tensor]:
        """Return mean loss and mean nats per value over this process's share of the batch at place `start`."""
        settings = self.config.train
        size = len(self.own_batch)
        indices = self.batches.batch(start, size)
        images = self.train_set.images[indices]
        if settings.flip:
            images = flip_images(images, self.batches.flips(start, size))
        if settings.shift:
            images = shift_images(images, self.batches.shifts(start, size, settings.shift))
        values = images_to_values(images, self.config.model.image.levels).to(self.device)
        labels = None if self.labels is None else self.labels[indices]
        if labels is not None and settings.hide_class:
            hidden = self.batches.hidden_classes(start, size, settings.hide_class)
            labels = np.where(hidden, self.config.model.default_label, labels)
        given = None if labels is None else torch.from_numpy(labels).to(self.device)
        with torch.autocast(self.device.partition(":")[0], torch.bfloat16, enabled=self.autocast):
            predicted = None if self.teachers is None else self.teachers.predict(values, given)
            loss, nats = self.likelihood(values, given, predicted)
            return loss.mean(), nats.mean()

    def describe_batch(self, progress: Progress) -> str:
        """Describe the batch of the next step by its number, its epoch and its first images, so a user can find it."""
        settings, start = self.config.train, progress.images_seen
        size = settings.batch * settings.accumulation
        epoch, place = divmod(start, len(self.train_set))
        first = ", ".join(str(index) for index in self.batches.batch(start, min(size, 3)))
        items = f"training {self.config.data.words.items} {first}{', ...' if size > 3 else ''}"
        return f"batch {place // size + 1} of epoch {epoch + 1} ({items})"

    def take_step(self) -> None:
        """Take one training step on the first batch at the full learning rate, for timing."""
        self.train_step(Progress(step=self._timed_steps), self.config.train.learning_rate)
        # Some mechanisms do extra work every few steps. The count makes them do it as often as in a run.
        self._timed_steps += 1

    def time_one_step(self) -> float:
        """Return the seconds of one training step, after a warm-up step. Changes the weights."""
        self.take_step()
        synchronize(self.device)
        began = time.perf_counter()
        self.take_step()
        synchronize(self.device)
        return time.perf_counter() - began
