"""The engine: images drawn value by value, carrying the state."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linformer_cli.attention.base import measure_state_bytes
from linformer_cli.data.sequence import values_to_images
from linformer_cli.errors import LintxError
from linformer_cli.model.pixel_model import PixelModel, PixelState

from .choose import Filters, UniformStreams, choose_values

_CHECK_EVERY = 64


@dataclass(frozen=True)
class SampledBatch:
    """Some finished images: values uint8 [B, T] on the CPU, the seconds they took, the bytes of their state."""

    values: Tensor
    seconds: float
    state_bytes: int


@torch.no_grad()
def iter_values(
    model: PixelModel, parameters: Tensor, state: PixelState, streams: UniformStreams, filters: Filters
) -> Iterator[Tensor]:
    """Draw values int64 [B] from `parameters` [B, P], step, draw the next, without end; `state` is consumed.

    Raises `LintxError` when the model gives no numbers.
    """
    for step in itertools.count():
        # Now and then, since it makes a GPU wait; a state that is no number stays so.
        if step % _CHECK_EVERY == 0 and not bool(torch.isfinite(parameters).all()):
            raise LintxError("the model's prediction is not a finite number: its weights are damaged")
        values = choose_values(model.head, parameters, streams.take(), filters)
        yield values
        parameters, state = model.step(values, state)


def collect_values(drawn: Iterator[Tensor], batch: int, positions: int) -> Tensor:
    """The next `positions` values of `drawn` as uint8 [B, positions] on the CPU.

    Each is written into its place at once. Keeping a small tensor per step instead pins the heap around the large ones
    of every step, and memory would grow with the image after all.
    """
    values = torch.empty(positions, batch, dtype=torch.uint8)
    for position, column in enumerate(itertools.islice(drawn, positions)):
        values[position] = column
    return values.T.contiguous()


@torch.no_grad()
def sample_values(
    model: PixelModel,
    indices: range,
    seed: int = 0,
    filters: Filters | None = None,
) -> SampledBatch:
    """Whole images number `indices` of `seed`, as one batch. Raises `LintxError` when the model gives no numbers."""
    began = time.perf_counter()
    batch, positions = len(indices), model.config.image.positions
    state = model.init_state(batch)
    state_bytes = measure_state_bytes(state)
    parameters, state = model.step(model.start_tokens(batch), state)
    drawn = iter_values(model, parameters, state, UniformStreams(seed, indices), filters or Filters())
    values = collect_values(drawn, batch, positions)
    return SampledBatch(values, time.perf_counter() - began, state_bytes)


def iter_samples(
    model: PixelModel,
    count: int,
    batch: int = 64,
    seed: int = 0,
    filters: Filters | None = None,
) -> Iterator[SampledBatch]:
    """`count` images in batches. Image i depends on (seed, i) alone, up to rounding, not on `batch`."""
    for start in range(0, count, batch):
        yield sample_values(model, range(start, min(start + batch, count)), seed, filters)


def sample_images(
    model: PixelModel, count: int, batch: int = 64, seed: int = 0, filters: Filters | None = None
) -> NDArray[np.uint8]:
    """`count` images, uint8 [count, H, W, C]."""
    values = torch.cat([part.values for part in iter_samples(model, count, batch, seed, filters)])
    return values_to_images(values, model.config.image)
