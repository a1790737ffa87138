"""Bits/dim: the number of bits per value that a model needs for a set of images."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linformer_cli.data.sequence import images_to_values
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.sampling.engines import EngineCache
from linformer_cli.system.memory import work_in_batches


@dataclass(frozen=True)
class Bits:
    """Bits/dim of a model over `images` images of `values_per_image` values.

    `bits_per_dim` counts every value. `bits_per_dim_without_first_value` follows the code of Katharopoulos 2020, which
    does not score the first value. The standard errors are over images. They are None for a single image.
    """

    bits_per_dim: float
    standard_error: float | None
    bits_per_dim_without_first_value: float
    standard_error_without_first_value: float | None
    images: int
    values_per_image: int


@dataclass(frozen=True)
class ImageNats:
    """Nats of every image, float64 [N]: for all `positions` values of the image, and for its first value alone."""

    whole: Tensor
    first: Tensor
    positions: int

    def describe(self) -> Bits:
        """Return bits/dim: the nats divided by ln 2 and by the number of values."""
        bits, error = _mean_and_error(self.whole, self.positions)
        rest, rest_error = _mean_and_error(self.whole - self.first, self.positions - 1)
        return Bits(bits, error, rest, rest_error, len(self.whole), self.positions)

    def measure_difference(self, other: "ImageNats") -> tuple[float, float | None]:
        """Return bits/dim minus the bits/dim of `other` on the same images, and its standard error. Negative is better.

        The difference is computed for each image and then averaged. Bits/dim usually differ far more between images
        than between two models on one image. The standard error of the difference is then much smaller than those of
        the two figures.
        """
        return _mean_and_error(self.whole - other.whole, self.positions)


def measure_bits(
    model: PixelModel,
    images: NDArray[np.uint8],
    batch: int = 32,
    before_batch: Callable[[], None] | None = None,
    labels: NDArray[np.int64] | None = None,
) -> Bits:
    """Measure bits/dim over uint8 images [N, H, W, C]. `measure_nats` describes the arguments."""
    return measure_nats(model, images, batch, before_batch, labels=labels).describe()


@torch.no_grad()
def measure_nats(
    model: PixelModel,
    images: NDArray[np.uint8],
    batch: int = 32,
    before_batch: Callable[[], None] | None = None,
    nats: Callable[[Tensor, Tensor | None], Tensor] | None = None,
    labels: NDArray[np.int64] | None = None,
) -> ImageNats:
    """Measure the nats of each image of `images`, uint8 [N, H, W, C], summed over the values of the image.

    `before_batch` is called before every batch and may raise to stop. `nats` computes the nats [B, T] of values int64
    [B, T] and labels int64 [B] or None; the default is the model's parallel form. A model with classes needs `labels`
    int64 [N], and the nats are conditional on the class. When memory runs out, the batch is halved.
    """

    def measure(part: Sequence[int]) -> tuple[Tensor, Tensor]:
        if before_batch is not None:
            before_batch()
        chosen = slice(part[0], part[-1] + 1)
        values = images_to_values(images[chosen], model.config.image.levels).to(model.device)
        given = None if labels is None else torch.from_numpy(labels[chosen]).to(model.device)
        found = (nats or model.nats)(values, given).cpu().double()
        return found.sum(dim=1), found[:, 0]

    training = model.training
    model.eval()
    try:
        measured = list(work_in_batches(range(len(images)), batch, measure))
    finally:
        model.train(training)
    whole, first = map(torch.cat, zip(*measured, strict=True))
    return ImageNats(whole, first, model.config.image.positions)


@torch.no_grad()
def stepped_nats(engines: EngineCache, values: Tensor, labels: Tensor | None) -> Tensor:
    """Return nats [B, T] of values int64 [B, T] given classes int64 [B], from the predictions of an engine."""
    model = engines.model
    found = torch.empty(values.shape, dtype=torch.float64 if model.dtype == torch.float64 else torch.float32)
    with engines.start(len(values)) as stepper:
        for position, token in enumerate(model.shift_values(values, labels).unbind(dim=1)):
            parameters = stepper.step(token)
            found[:, position] = -model.head.log_likelihood(parameters, values[:, position])
    return found


def _mean_and_error(nats_per_image: Tensor, values: int) -> tuple[float, float | None]:
    bits = nats_per_image / (math.log(2) * max(values, 1))
    error = float(bits.std()) / math.sqrt(len(bits)) if len(bits) > 1 else None
    return float(bits.mean()), error
