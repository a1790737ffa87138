"""`lintx bench quality`: samples of a model beside images of a data set, judged by a classifier trained on them."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.config import TrainConfig
from linformer_cli.data.batches import Batches, shift_images
from linformer_cli.data.images import ImageSet
from linformer_cli.documents import read_bytes
from linformer_cli.errors import LintxError
from linformer_cli.evaluation.nearest import find_nearest
from linformer_cli.files import user_cache, write_file
from linformer_cli.report.tables import Output, RecordTable, Report, Shown, TableStyle, list_columns
from linformer_cli.system.device import seeded
from linformer_cli.system.signals import Check, never_stop
from linformer_cli.training.loop import Trainer
from linformer_cli.training.task import Task
from linformer_cli.units import format_percent

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]

_LARGEST_FILE = 2**30
_AT_ONCE = 500
SURE = 0.9  # an image counts as sure if the judge gives one class at least this probability


@dataclass(frozen=True)
class JudgeRecipe:
    """Two convolutions of 3 x 3, each with ReLU and 2 x 2 max pooling, a hidden layer with ReLU, and a linear one.

    They have `channels`, 2 * `channels` and `features` outputs. Training images are shifted by up to `shift` pixels.
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
    """Load the judge of training images uint8 [N, H, W, C] with labels int64 [N] in 0 .. classes - 1.

    If the user's cache has no file of the same images, labels and recipe, it is trained, and `on_update` counts.
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
    """A batch consists of images uint8 [B, H, W, C] and labels int64 [B]."""

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


@dataclass(frozen=True, kw_only=True)
class QualityRow:
    """Figures of a set of `images` images; None where a figure does not apply.

    bits_per_dim: the model's validation bits/dim, if its checkpoint records it for this data set
    frechet_distance: `measure_frechet_distance` to all test images, in the judge's features
    sure_share: share of images to which the judge gives one class with probability `SURE` or more
    class_share: share of images that the judge assigns to the class that the model was asked for, or to their label
    nearest_distance, smallest_distance: mean and smallest distance of an image to its nearest training image
    """

    name: Annotated[str, Shown("", names=True)]
    images: Annotated[int, Shown("images", ",")]
    bits_per_dim: Annotated[float | None, Shown("bits/dim", ".4f")] = None
    frechet_distance: Annotated[float | None, Shown("Frechet distance", ".3g")]
    sure_share: Annotated[float, Shown("sure", format_percent)]
    class_share: Annotated[float | None, Shown("right class", format_percent)]
    nearest_distance: Annotated[float | None, Shown("nearest training image", ",.0f")]
    smallest_distance: Annotated[float | None, Shown("smallest", ",.0f")]


@dataclass(frozen=True)
class ClassRow:
    """Samples of a class, those that the judge `recognised`, and the judge's accuracy on its test images, if any."""

    label: int
    name: Annotated[str, Shown("class", names=True)]
    samples: Annotated[int, Shown("samples", ",")]
    recognised: Annotated[int, Shown("recognised", ",")]
    accuracy: Annotated[float | None, Shown("judge's accuracy", format_percent)]


@dataclass(frozen=True, kw_only=True)
class QualityReport(Report):
    """`judge_sha256` identifies the judge: distances in the features of two judges cannot be compared."""

    rows: Sequence[QualityRow]
    classes: Sequence[ClassRow]
    judge_accuracy: float
    judge_sha256: str
    test_images: int
    settings: JudgeRecipe

    def show(self, style: TableStyle) -> Output:
        classes = RecordTable(self.classes, list_columns(ClassRow))
        judge = f"judge: {format_percent(self.judge_accuracy)} right on all {self.test_images:,} test images"
        return Output([RecordTable(self.rows, list_columns(QualityRow)), classes], remarks=[judge])


def measure_quality(
    judge: Judge,
    samples: Pixels,
    asked: Labels | None,
    train: ImageSet,
    test: ImageSet,
    bits_per_dim: float | None = None,
    check: Check = never_stop,
) -> QualityReport:
    """Compare `samples` uint8 [N, H, W, C], of the classes `asked` int64 [N] if any, with images of a data set."""

    def choose(images: ImageSet) -> tuple[Pixels, Labels]:
        chosen = Batches(len(images), judge.recipe.seed).batch(0, min(len(samples), len(images)))
        return images.images[chosen], images.require_labels(judge.classes, "the judge")[chosen]

    reference, found = judge.judge(test.images[:], check)
    test_labels = test.require_labels(judge.classes, "the judge")
    right, assigned, rows = found.argmax(axis=1) == test_labels, {}, []
    sets = {"samples": (samples, asked), "test images": choose(test), "training images": choose(train)}
    for name, (images, labels) in sets.items():
        features, found = judge.judge(images, check)
        assigned[name] = best = found.argmax(axis=1)
        nearest = None if name == "training images" else find_nearest(images, train.images, check=check).distances
        row = QualityRow(
            name=name,
            images=len(images),
            bits_per_dim=bits_per_dim if name == "samples" else None,
            frechet_distance=None if name == "test images" else measure_frechet_distance(features, reference),
            sure_share=float((found.max(axis=1) >= SURE).mean()),
            class_share=None if labels is None else float((best == labels).mean()),
            nearest_distance=None if nearest is None else float(nearest.mean()),
            smallest_distance=None if nearest is None else float(nearest.min()),
        )
        rows.append(row)
    classes, names = [], train.measured.class_names if train.measured else ()
    for label in range(judge.classes if asked is not None else 0):
        drawn, held_out = assigned["samples"][asked == label], right[test_labels == label]
        accuracy = float(held_out.mean()) if held_out.size else None
        name = names[label] if names else str(label)
        classes.append(ClassRow(label, name, len(drawn), int((drawn == label).sum()), accuracy))
    return QualityReport(
        rows=rows,
        classes=classes,
        judge_accuracy=float(right.mean()),
        judge_sha256=judge.sha256,
        test_images=len(test),
        settings=judge.recipe,
    )


def measure_frechet_distance(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Return the squared Frechet distance of the Gaussians with the means and covariances of [N, F] and [M, F].

    With means m and covariances S, it is |m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)) (Dowson and Landau 1982). The
    published FID (Heusel 2017) is the same formula in the features of an Inception network.
    """
    covariances = [np.cov(features, rowvar=False) for features in (first, second)]
    values, vectors = np.linalg.eigh(covariances[0])
    root = vectors * np.sqrt(values.clip(0)) @ vectors.T
    # S1 S2 has the same eigenvalues as the symmetric matrix S1^(1/2) S2 S1^(1/2).
    shared = np.sqrt(np.linalg.eigvalsh(root @ covariances[1] @ root).clip(0)).sum()
    between = np.square(first.mean(axis=0) - second.mean(axis=0)).sum()
    return max(0.0, float(between + sum(map(np.trace, covariances)) - 2 * shared))
