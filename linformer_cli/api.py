"""The Python interface: train, evaluate, draw, complete and score images, and attention for models of one's own.

Images are uint8 arrays [N, H, W, C]. In a model with a palette, they hold numbers of colours. All functions raise
`LintxError` (`UsageError` for wrong arguments). docs/guide/python.md has examples.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from .attention.base import AttentionShape
from .attention.catalogue import find_attention
from .checkpoint import load_model
from .config import PARTICLES, NetworkConfig
from .data import Split, pictures
from .data.images import DATA_SETS, ImageSet, load_for_training, name_folder
from .data.look import Look
from .data.sequence import images_to_values, paint, values_to_images
from .documents import parse_config
from .errors import UsageError
from .evaluation.bits import Bits, ImageNats, measure_nats
from .model.attention_layer import AttentionLayer
from .model.mixers import build_attention
from .model.pixel_model import PixelModel
from .probe import choose_precision
from .report import grids
from .sampling.complete import complete_values
from .sampling.decode import Sampler, sample_images
from .system.device import choose_device
from .training.learner import Step
from .training.loop import Trainer
from .training.pixel_task import PixelTask
from .training.progress import Progress
from .training.run_folder import RunFolder
from .training.settings import Given, Pictures, merge_settings

__all__ = [
    "build_attention",
    "build_layer",
    "complete",
    "evaluate",
    "load_model",
    "load_picture",
    "sample_images",
    "score",
    "to_picture",
    "train",
]

_MEMORY = "memory"


def train(
    config: Mapping[str, Any],
    data: str | NDArray[np.uint8],
    labels: NDArray[np.int64] | None = None,
    on_step: Callable[[Progress, Step], object] | None = None,
    out: str | Path | None = None,
) -> PixelModel:
    """Train a model and return it in evaluation mode.

    `config` has the tables of a run's config.toml, such as `{"preset": "tiny", "train": {"steps": 100}}`. `data` is the
    name of a data set, a folder of pictures, or images, of which the last tenth is for validation.
    With `labels` int64 [N] of the images, the model is conditioned on their classes. `on_step(progress, step)` is
    called after every step; `progress.step` counts them, and `step.nats` is the loss in nats per value. With the new
    folder `out`, the run is logged and saved there, as by `lintx train --out`.
    """
    if unknown := config.keys() - {"preset", "model", "data", "train"}:
        raise UsageError(f"unknown key '{sorted(unknown)[0]}' in the configuration; known: preset, model, data, train")
    if isinstance(data, str) and data not in DATA_SETS and Path(data).is_dir():
        data = name_folder(data)
    own = {"name": data if isinstance(data, str) else _MEMORY} | ({} if labels is None else {"labels": True})
    tables = {name: config.get(name, {}) for name in ("model", "data", "train")}
    given = Given(config.get("preset"), tables["model"], {**tables["data"], **own}, tables["train"])
    settings = merge_settings(given)
    images = load_for_training(settings.data) if isinstance(data, str) else _hold_out(data, labels)
    for note in images[0].skipped:
        warnings.warn(note, stacklevel=2)
    shape, classes = images[0].shape, images[0].classes
    if settings.data.name.startswith("folder:"):
        settings = merge_settings(given, pictures=Pictures(shape, classes, len(images[0])))
    run = settings.build(shape, classes)
    device = choose_device(run.train.device).value
    precision = choose_precision(run.train.precision, device, run.model.width, run.model.feed_forward).value
    folder = None if out is None else RunFolder(Path(out))
    trainer = Trainer(PixelTask(run, images, device, precision), folder)
    with contextlib.ExitStack() as stack:
        if folder is not None:
            folder.create(trainer.task.config)
            stack.enter_context(folder.lock())
        for step in trainer.steps():
            if on_step is not None:
                on_step(trainer.progress, step)
    model = trainer.evaluated_model.eval()
    assert isinstance(model, PixelModel)
    model.look = images[0].look
    return model


def load_picture(model: PixelModel, path: str | Path) -> NDArray[np.uint8]:
    """Return a picture file as an image [H, W, C] for `model`, as `lintx complete` reads it: resized or framed."""
    return pictures.load_picture(path, model.look or Look(model.config.image), framing=True).image


def to_picture(model: PixelModel, images: NDArray[np.uint8]) -> Image.Image:
    """Show an image [H, W, C] of `model` in the colours of its palette, or several [N, H, W, C] in an enlarged grid."""
    shape = model.config.image
    return grids.render_grid(paint(images, shape)) if images.ndim == 4 else grids.to_picture(images, shape.colours)


def _hold_out(images: NDArray[np.uint8], labels: NDArray[np.int64] | None) -> tuple[ImageSet, ImageSet]:
    """Return the training and validation images of an array."""
    if images.dtype != np.uint8 or images.ndim != 4 or len(images) < 2:
        raise UsageError(f"images must be uint8 [N, H, W, C] with N > 1, found {images.dtype} {list(images.shape)}")
    if labels is not None and (labels.shape != images.shape[:1] or labels.dtype.kind not in "iu"):
        found = f"{labels.dtype} {list(labels.shape)}"
        raise UsageError(f"labels must be the numbers of classes, int64 [{len(images)}], found {found}")
    classes = 0 if labels is None else int(labels.max()) + 1
    first = len(images) - max(1, len(images) // 10)

    def select(split: Split, part: slice) -> ImageSet:
        return ImageSet(_MEMORY, split, images[part], None if labels is None else labels[part], classes=classes)

    return select("train", slice(first)), select("validation", slice(first, None))


def evaluate(
    model: PixelModel, images: NDArray[np.uint8], labels: NDArray[np.int64] | None = None, batch: int = 32
) -> Bits:
    """Bits/dim over every value of `images`, with the standard error over images. `labels` int64 [N] are classes."""
    return _measure(model, images, labels, batch).describe()


def score(
    model: PixelModel, images: NDArray[np.uint8], labels: NDArray[np.int64] | None = None, batch: int = 32
) -> NDArray[np.float64]:
    """Bits/dim of each image, float64 [N]. A larger figure means that the image is less like the training images."""
    return _measure(model, images, labels, batch).bits_per_image.numpy()


def _measure(model: PixelModel, images: NDArray[np.uint8], labels: NDArray[np.int64] | None, batch: int) -> ImageNats:
    ImageSet(_MEMORY, "test", images, labels).require_shape(model.config.image)
    return measure_nats(model, images, batch, labels=labels)


def complete(
    model: PixelModel | Sampler,
    image: NDArray[np.uint8],
    kept: NDArray[np.bool_],
    count: int = 4,
    label: int | None = None,
    particles: int = PARTICLES,
) -> NDArray[np.uint8]:
    """Return `count` completions [count, H, W, C] of `image` [H, W, C] that keep its pixels `kept` bool [H, W].

    `complete_values` explains `particles`. A `Sampler` in place of the model has a seed, filters and an engine.
    """
    sampler = Sampler(model) if isinstance(model, PixelModel) else model
    shape = sampler.model.config.image
    sizes = (shape.height, shape.width, shape.channels)
    if image.shape != sizes or kept.shape != sizes[:2]:
        raise UsageError(f"the image must be {list(sizes)} and kept {list(sizes[:2])}, found {list(image.shape)}")
    values = images_to_values(image[None], shape)[0]
    places = torch.from_numpy(np.broadcast_to(kept[..., None], sizes).reshape(-1).copy())
    return values_to_images(complete_values(sampler, values, places, count, label, particles=particles).values, shape)


def build_layer(
    name: str,
    width: int,
    heads: int,
    options: Mapping[str, Any] | None = None,
    *,
    positions: int,
    row: int | None = None,
) -> AttentionLayer:
    """Return a layer around mechanism `name`: `forward(x)` maps [B, T, width] to [B, T, width].

    `init_state(batch, capacity, device, dtype)` and `step(x_t, state)` compute the same position by position, with x_t
    [B, width]. `positions` is the longest T of tables and windows, and `row` the length from which windows are derived
    (default: its square root). Raises `UsageError` for mechanisms that are no layer of heads.
    """
    mechanism = find_attention(name)
    if mechanism.gated or mechanism.shared_key_value:
        raise UsageError(f"'{name}' needs a block of its own; use build_attention")
    if width % heads:
        raise UsageError(f"the width must be a multiple of {heads} heads, found {width}")
    shape = AttentionShape(heads, width // heads, width // heads, positions, row or max(1, math.isqrt(positions)))
    network = parse_config(NetworkConfig, {"width": width, "heads": heads}, "layer")
    return AttentionLayer(network, build_attention(name, options or {}, shape))
