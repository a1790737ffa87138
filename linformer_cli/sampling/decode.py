"""Images drawn value by value: an engine steps the model, this draws from what it predicts."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linformer_cli.data.sequence import values_to_images
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.system.memory import work_in_batches

from .choose import Filters, UniformStreams
from .engines import AUTO, build_engine

# The class of image number i at i.
Labels = Sequence[int] | Mapping[int, int]


@dataclass(frozen=True)
class SampledBatch:
    """Finished images number `indices`: values uint8 [B, T] on the CPU, the seconds taken, the bytes of their state.

    `passes` through the layers gave all values of one image: T, or fewer by looking ahead.
    """

    indices: Sequence[int]
    values: Tensor
    seconds: float
    state_bytes: int
    passes: int


@torch.no_grad()
def sample_values(
    model: PixelModel,
    indices: Sequence[int],
    seed: int = 0,
    filters: Filters | None = None,
    before_step: Callable[[], None] | None = None,
    engine: str = AUTO,
    labels: Labels | None = None,
) -> SampledBatch:
    """Whole images number `indices` of `seed`, as one batch, by `engine`; `before_step` as in `Engine.draw_values`.

    `labels` are the classes of all images, image i's being `labels[i]`; by default a model with classes takes all in
    turn. Raises `LintxError` when the model gives no numbers.
    """
    began = time.perf_counter()
    batch, positions = len(indices), model.config.image.positions
    chosen = model.take_turns(indices) if labels is None else torch.tensor([labels[index] for index in indices])
    stepper = build_engine(engine, model, batch)
    streams = UniformStreams(seed, indices)
    first = stepper.step(model.start_tokens(batch, chosen))
    values = stepper.draw_values(first, streams, filters or Filters(), positions, before_step)
    # That with the start token is one, too.
    passes = 1 + stepper.look_aheads if stepper.look_aheads else positions
    return SampledBatch(indices, values, time.perf_counter() - began, stepper.state_bytes, passes)


def iter_samples(
    model: PixelModel,
    indices: Sequence[int],
    batch: int = 64,
    seed: int = 0,
    filters: Filters | None = None,
    on_halve: Callable[[int], None] | None = None,
    before_step: Callable[[], None] | None = None,
    engine: str = AUTO,
    labels: Labels | None = None,
) -> Iterator[SampledBatch]:
    """Images number `indices` in batches, in that order.

    Image i depends on (seed, i) and its class alone, up to rounding, not on `batch`, `engine` or the other indices.
    `on_halve` as in `work_in_batches`, `before_step` as in `Engine.draw_values`, `labels` as in `sample_values`.
    """

    def draw(part: Sequence[int]) -> SampledBatch:
        return sample_values(model, part, seed, filters, before_step, engine, labels)

    return work_in_batches(indices, batch, draw, on_halve)


def sample_images(
    model: PixelModel,
    count: int,
    batch: int = 64,
    seed: int = 0,
    filters: Filters | None = None,
    before_step: Callable[[], None] | None = None,
    engine: str = AUTO,
    labels: Sequence[int] | None = None,
) -> NDArray[np.uint8]:
    """`count` images, uint8 [count, H, W, C], of the classes `labels`, one each; by default of all in turn."""
    parts = iter_samples(model, range(count), batch, seed, filters, None, before_step, engine, labels)
    return values_to_images(torch.cat([part.values for part in parts]), model.config.image)
