"""Bits/dim: the number of bits per value that a model needs for a set of images."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linformer_cli.data.byte_windows import ByteWindows
from linformer_cli.data.sequence import images_to_values
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.report.plots import Curve, Panel, PlotFormat, render_plot, with_error
from linformer_cli.sampling.engines import EngineCache
from linformer_cli.system.memory import work_in_batches
from linformer_cli.system.signals import Check, never_stop
from linformer_cli.units import Words, format_bits


@dataclass(frozen=True)
class Bits:
    """Bits/dim of a model over `images` images of `values_per_image` values.

    The code of Katharopoulos 2020 does not score the first value. Standard errors are over images (one: None).
    """

    bits_per_dim: float
    standard_error: float | None
    bits_per_dim_without_first_value: float
    standard_error_without_first_value: float | None
    images: int
    values_per_image: int


@dataclass(frozen=True)
class PositionBits:
    """Bits/dim of the values `first` to `last` of every image, counted from 0, with the standard error over images."""

    first: int
    last: int
    bits_per_dim: float
    standard_error: float | None

    @property
    def place(self) -> str:
        return f"{self.first:,}" + (f" to {self.last:,}" if self.last > self.first else "")

    @property
    def bits(self) -> str:
        return format_bits(self.bits_per_dim, self.standard_error)


@dataclass(frozen=True)
class ImageNats:
    """Nats float64 of each image, whole [N] and by ranges [N, R]: positions 0, 1, 2 to 3, 4 to 7, and so on."""

    whole: Tensor
    by_range: Tensor
    positions: int

    @property
    def first(self) -> Tensor:
        return self.by_range[:, 0]

    @property
    def bits_per_image(self) -> Tensor:
        """Bits/dim of every image, float64 [N]."""
        return _to_bits(self.whole, self.positions)

    def describe(self) -> Bits:
        bits, error = _mean_and_error(self.whole, self.positions)
        rest, rest_error = _mean_and_error(self.whole - self.first, self.positions - 1)
        return Bits(bits, error, rest, rest_error, len(self.whole), self.positions)

    def describe_positions(self) -> list[PositionBits]:
        return [
            PositionBits(part.start, part.stop - 1, *_mean_and_error(nats, len(part)))
            for part, nats in zip(_double_ranges(self.positions), self.by_range.unbind(dim=1), strict=True)
        ]

    def measure_difference(self, other: "ImageNats") -> tuple[float, float | None]:
        """Bits/dim minus those of `other` on the same images, with the standard error of the mean difference."""
        return _mean_and_error(self.whole - other.whole, self.positions)


@torch.no_grad()
def measure_nats(
    model: PixelModel,
    images: NDArray[np.uint8] | ByteWindows,
    batch: int = 32,
    before_batch: Check = never_stop,
    nats: Callable[[Tensor, Tensor | None], Tensor] | None = None,
    labels: NDArray[np.int64] | None = None,
) -> ImageNats:
    """Measure the nats of each image of `images`, uint8 [N, H, W, C], summed over the values of the image.

    Windows of bytes may have any length; for those longer than the model's, `nats` is `block_nats`. `before_batch` is
    called before every batch and may raise to stop. `nats` computes the nats [B, T] of values int64 [B, T] and labels
    int64 [B] or None, by default in parallel. A model with classes needs `labels` int64 [N], and the nats are
    conditional on them. When memory runs out, the batch is halved.
    """

    def measure(part: Sequence[int]) -> tuple[Tensor, Tensor]:
        before_batch()
        chosen = slice(part[0], part[-1] + 1)
        values = images_to_values(images[chosen], model.config.image).to(model.device)
        given = None if labels is None else torch.from_numpy(labels[chosen]).to(model.device)
        found = (nats or model.nats)(values, given).cpu().double()
        ranges = [found[:, part.start : part.stop].sum(dim=1) for part in _double_ranges(positions)]
        return found.sum(dim=1), torch.stack(ranges, dim=1)

    positions = math.prod(images.shape[1:])
    training = model.training
    model.eval()
    try:
        measured = list(work_in_batches(range(len(images)), batch, measure))
    finally:
        model.train(training)
    whole, by_range = map(torch.cat, zip(*measured, strict=True))
    return ImageNats(whole, by_range, positions)


def block_nats(model: PixelModel, values: Tensor, labels: Tensor | None) -> Tensor:
    """Return nats [B, N] of values int64 [B, N] in blocks of the model's T positions, for models without a bound."""
    tokens, length = model.shift_values(values, labels), model.config.image.positions
    state, found = None, []
    for part, known in zip(tokens.split(length, dim=1), values.split(length, dim=1), strict=True):
        parameters, state = model.attend(part, state)
        found.append(-model.head.log_likelihood(parameters, known))
    return torch.cat(found, dim=1)


@torch.no_grad()
def stepped_nats(engines: EngineCache, values: Tensor, labels: Tensor | None) -> Tensor:
    """Return nats [B, T] of values int64 [B, T] given classes int64 [B], from the predictions of an engine."""
    model = engines.model
    found = torch.empty(values.shape, dtype=torch.float64 if model.dtype == torch.float64 else torch.float32)
    with engines.start(len(values)) as stepper:
        for position, token in enumerate(model.shift_values(values, labels).unbind(dim=1)):
            found[:, position] = -model.head.log_likelihood(stepper.step(token), values[:, position])
    return found


def render_positions(parts: Sequence[PositionBits], kind: PlotFormat, words: Words) -> bytes:
    """Plot the bits of each range of positions at its last position, counted from 1, with a band for the error."""
    points = [with_error(part.last + 1, part.bits_per_dim, part.standard_error) for part in parts]
    curve = Curve(f"mean over {words.items}, with standard error", points)
    return render_plot([Panel("", [curve], y_scale="linear")], f"position in the {words.item}", words.bits, kind)


def _double_ranges(positions: int) -> list[range]:
    """Divide `positions` positions into ranges that end before 1, 2, 4, 8 and so on."""
    ends = [min(2**power, positions) for power in range((positions - 1).bit_length() + 1)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _to_bits(nats_per_image: Tensor, values: int) -> Tensor:
    return nats_per_image / (math.log(2) * max(values, 1))


def _mean_and_error(nats_per_image: Tensor, values: int) -> tuple[float, float | None]:
    return measure_mean(_to_bits(nats_per_image, values)[None])


def measure_mean(bits: Tensor) -> tuple[float, float | None]:
    """Return the mean of `bits` [S, N], of S runs and N images, and its standard error over images and, if S > 1, runs.

    The variances of both means are added. Noise of single images counts twice, so the error is rather too large.
    """
    means = [part for part in (bits.mean(dim=0), bits.mean(dim=1)) if len(part) > 1]
    return float(bits.mean()), math.sqrt(sum(float(part.var()) / len(part) for part in means)) if means else None
