"""`lintx bench quality`: samples of a model compared with the images of a data set."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from linformer_cli.data.batches import Batches
from linformer_cli.data.images import ImageSet
from linformer_cli.evaluation.nearest import find_nearest
from linformer_cli.report.tables import Shown
from linformer_cli.system.environment import describe_environment
from linformer_cli.system.signals import Check, never_stop
from linformer_cli.units import format_percent

from .judge import Judge, JudgeRecipe, Labels, Pixels

# An image counts as sure if the judge gives one class at least this probability.
SURE = 0.9


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
    """One class: how many `samples` were drawn of it, and how many of them the judge `recognised` as this class.

    `accuracy` is the judge's accuracy on the test images of the class, or None if there are none.
    """

    label: Annotated[int, Shown("class", names=True)]
    samples: Annotated[int, Shown("samples", ",")]
    recognised: Annotated[int, Shown("recognised", ",")]
    accuracy: Annotated[float | None, Shown("judge's accuracy", format_percent)]


@dataclass(frozen=True)
class QualityReport:
    """The samples, as many test and training images, and each class if the model has classes.

    `judge_accuracy` is over all `test_images`. `judge_sha256` identifies the judge: distances in the features of two
    judges cannot be compared.
    """

    rows: Sequence[QualityRow]
    classes: Sequence[ClassRow]
    judge_accuracy: float
    judge_sha256: str
    test_images: int
    settings: JudgeRecipe
    environment: dict[str, Any] = field(default_factory=describe_environment)


def measure_quality(
    judge: Judge,
    samples: Pixels,
    asked: Labels | None,
    train: ImageSet,
    test: ImageSet,
    bits_per_dim: float | None = None,
    check: Check = never_stop,
) -> QualityReport:
    """Compare `samples` uint8 [N, H, W, C], drawn of the classes `asked` int64 [N] if any, with a data set.

    Random test and training images, N or all of them, are measured in the same way. `check` is called between steps
    and may raise to stop. Raises `DataError` if labels are missing or out of range.
    """

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
    classes = []
    for label in range(judge.classes if asked is not None else 0):
        drawn, held_out = assigned["samples"][asked == label], right[test_labels == label]
        accuracy = float(held_out.mean()) if held_out.size else None
        classes.append(ClassRow(label, len(drawn), int((drawn == label).sum()), accuracy))
    return QualityReport(rows, classes, float(right.mean()), judge.sha256, len(test), judge.recipe)


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
