"""Images drawn value by value: an engine steps the model, this draws from what it predicts."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linformer_cli.data.sequence import values_to_images
from linformer_cli.errors import LintxError
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.runtime import is_out_of_memory

from .choose import Filters, UniformStreams
from .engines import AUTO, build_engine

Drawn = TypeVar("Drawn")
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


def draw_in_batches(
    indices: Sequence[int],
    batch: int,
    draw: Callable[[Sequence[int]], Drawn],
    on_halve: Callable[[int], None] | None = None,
) -> Iterator[Drawn]:
    """`draw(part)` for all of `indices`, parts of `batch` at a time.

    Where memory runs out the batch is halved for good, `on_halve` is told the new one, and the same indices are drawn
    again. Raises `LintxError` when there is no memory for a single one.
    """
    start = 0
    while start < len(indices):
        part = indices[start : start + batch]
        if (drawn := _draw_if_memory_allows(draw, part)) is not None:
            yield drawn
            start += len(part)
            continue
        if len(part) == 1:
            raise LintxError("there is not enough memory to draw even one image at a time")
        batch = len(part) // 2
        if on_halve is not None:
            on_halve(batch)


def _draw_if_memory_allows(draw: Callable[[Sequence[int]], Drawn], indices: Sequence[int]) -> Drawn | None:
    try:
        return draw(indices)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # Here, and not in the handler, where the error still holds all that the attempt had allocated.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


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
    `on_halve` as in `draw_in_batches`, `before_step` as in `Engine.draw_values`, `labels` as in `sample_values`.
    """

    def draw(part: Sequence[int]) -> SampledBatch:
        return sample_values(model, part, seed, filters, before_step, engine, labels)

    return draw_in_batches(indices, batch, draw, on_halve)


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
