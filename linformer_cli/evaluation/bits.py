"""bits/dim: how many bits per value a model needs for images it has not seen."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from linformer_cli.data.sequence import images_to_values
from linformer_cli.model.pixel_model import PixelModel


@dataclass(frozen=True)
class Bits:
    """bits/dim of a model over `images` images of `values_per_image` values.

    `bits_per_dim` counts every value, the first one too; `bits_per_dim_without_first_value` is the convention of the
    code that came with Katharopoulos 2020, which never scores the first. The standard errors are over images.
    """

    bits_per_dim: float
    standard_error: float
    bits_per_dim_without_first_value: float
    standard_error_without_first_value: float
    images: int
    values_per_image: int


@torch.no_grad()
def measure_bits(
    model: PixelModel, images: NDArray[np.uint8], batch: int = 32, before_batch: Callable[[], None] | None = None
) -> Bits:
    """Sum the nats of every value of uint8 images [N, H, W, C]; divide once by ln 2 and by the number of values.

    `before_batch` is called before every batch, and may raise to give up.
    """
    training = model.training
    model.eval()
    per_image, first = [], []
    try:
        for start in range(0, len(images), batch):
            if before_batch is not None:
                before_batch()
            values = images_to_values(images[start : start + batch], model.config.image.levels).to(model.device)
            nats = model.nats(values).cpu().double()
            per_image.append(nats.sum(dim=1))
            first.append(nats[:, 0])
    finally:
        model.train(training)
    positions = model.config.image.positions
    whole = torch.cat(per_image)
    bits, error = _mean_and_error(whole, positions)
    rest, rest_error = _mean_and_error(whole - torch.cat(first), positions - 1)
    return Bits(bits, error, rest, rest_error, len(whole), positions)


def _mean_and_error(nats_per_image: torch.Tensor, values: int) -> tuple[float, float]:
    bits = nats_per_image / (math.log(2) * max(values, 1))
    error = float(bits.std()) / math.sqrt(len(bits)) if len(bits) > 1 else 0.0
    return float(bits.mean()), error
