"""The judge of `lintx bench quality`: a small classifier of a data set's images, trained once and cached."""

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.config import TrainConfig
from linformer_cli.data.batches import Batches, shift_images
from linformer_cli.documents import read_bytes
from linformer_cli.errors import LintxError
from linformer_cli.files import user_cache, write_file
from linformer_cli.system.device import seeded
from linformer_cli.system.signals import Check, never_stop
from linformer_cli.training.loop import Trainer
from linformer_cli.training.task import Task

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]

_LARGEST_FILE = 2**30
_AT_ONCE = 500


@dataclass(frozen=True)
class JudgeRecipe:
    """The judge's network and training.

    Two convolutions of 3 x 3, with `channels` and 2 * `channels` outputs, are each followed by ReLU and 2 x 2 max
    pooling. A hidden layer of `features` units with ReLU and a linear layer follow. Training images are shifted by up
    to `shift` pixels. AdamW's learning rate rises linearly for a tenth of the updates, then falls linearly to 0.
    """

    channels: int = 16
    features: int = 128
    updates: int = 4000
    batch: int = 128
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    shift: int = 1
    seed: int = 0


RECIPE = JudgeRecipe()


class Judge(nn.Module):
    """A classifier of images of `shape` (H, W, C) into `classes` classes."""

    def __init__(self, shape: tuple[int, ...], classes: int, recipe: JudgeRecipe) -> None:
        super().__init__()
        self.classes, self.recipe = classes, recipe
        height, width, channels = shape
        pooled = -(-height // 4) * -(-width // 4)
        self.hidden = nn.Sequential(
            nn.Conv2d(channels, recipe.channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.Conv2d(recipe.channels, 2 * recipe.channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
            nn.Flatten(),
            nn.Linear(2 * recipe.channels * pooled, recipe.features),
            nn.ReLU(),
        )
        self.output = nn.Linear(recipe.features, classes)

    @property
    def sha256(self) -> str:
        """The digest of the weights."""
        return hashlib.sha256(save(self.state_dict())).hexdigest()

    def forward(self, images: Pixels) -> tuple[Tensor, Tensor]:
        """Return the features [N, F] and the logits [N, classes] of images uint8 [N, H, W, C]."""
        features = self.hidden(torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - 0.5)
        return features, self.output(features)

    @torch.no_grad()
    def judge(self, images: Pixels, check: Check = never_stop) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the features [N, F] and the probabilities [N, classes] of images uint8 [N, H, W, C], in batches."""
        features, probabilities = [], []
        for start in range(0, len(images), _AT_ONCE):
            check()
            found, logits = self(np.array(images[start : start + _AT_ONCE]))
            features.append(found.double().numpy())
            probabilities.append(logits.double().softmax(dim=1).numpy())
        return np.concatenate(features), np.concatenate(probabilities)


def load_judge(
    images: Pixels, labels: Labels, classes: int, recipe: JudgeRecipe, on_update: Callable[[int], None]
) -> Judge:
    """Return the judge of training images uint8 [N, H, W, C] with labels int64 [N] in 0 .. classes - 1.

    Its file in the user's cache is named after a digest of the images, the labels and the recipe. If the file is
    missing or damaged, the judge is trained, and `on_update` is called after each update with their number. If the file
    cannot be written, the judge is trained every time.
    """
    digest = hashlib.sha256(json.dumps([asdict(recipe), classes, images.shape]).encode())
    for array in (images, labels):
        digest.update(np.ascontiguousarray(array).data)
    path = user_cache() / "judges" / f"{digest.hexdigest()[:16]}.safetensors"
    with seeded(recipe.seed):
        judge = Judge(images.shape[1:], classes, recipe)
    try:
        judge.load_state_dict(load(read_bytes(path, _LARGEST_FILE)))
    except (OSError, ValueError, SafetensorError, RuntimeError):
        trainer = Trainer(_JudgeTask(judge, images, labels))
        for _ in trainer.steps():
            on_update(trainer.progress.step)
        with contextlib.suppress(LintxError):
            write_file(path, save(judge.state_dict()))
    return judge


class _JudgeTask(Task[Judge, tuple[Pixels, Tensor]]):
    """A batch are images uint8 [B, H, W, C] and labels int64 [B]."""

    def __init__(self, judge: Judge, images: Pixels, labels: Labels) -> None:
        recipe = self._recipe = judge.recipe
        optimizer = torch.optim.AdamW(judge.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay)
        settings = TrainConfig(steps=recipe.updates, batch=recipe.batch, clip=0, seed=recipe.seed)
        super().__init__(judge, optimizer, settings)
        self._images, self._labels, self._batches = images, labels, Batches(len(images), recipe.seed)

    def load_batch(self, number: int, rows: range) -> tuple[Pixels, Tensor]:
        start, size = number * self.settings.batch + rows.start, len(rows)
        chosen = self._batches.batch(start, size)
        shifts = self._batches.shifts(start, size, self._recipe.shift)
        return shift_images(self._images[chosen], shifts), torch.from_numpy(self._labels[chosen])

    def measure_loss(self, batch: tuple[Pixels, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = batch
        loss = functional.cross_entropy(self.model(images)[1], labels)
        return loss, loss

    def learning_rate_at(self, step: int, share: float) -> float:
        rising, falling = (step + 1) / (0.1 * self._recipe.updates), (1 - share) / 0.9
        return self._recipe.learning_rate * min(rising, falling)
