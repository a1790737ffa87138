"""Draws images value by value: an engine steps the model, and values are drawn from its predictions."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linformer_cli.data.sequence import values_to_images
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.system.memory import work_in_batches
from linformer_cli.system.signals import Check, never_stop
from .choose import Filters, UniformStreams, check_guidance
from .engines import AUTO, EngineCache


class Labels(Protocol):
    """A sequence or mapping from image numbers to classes."""

    def __getitem__(self, index: int, /) -> int: ...


@dataclass(frozen=True)
class SampledBatch:
    """The finished images `indices`: values uint8 [B, T] on the CPU, seconds of sampling, and bytes of the state.

    `passes` is the number of passes through the layers per image: T, or fewer with look-ahead.
    """

    indices: Sequence[int]
    values: Tensor
    seconds: float
    state_bytes: int
    passes: int


class Sampler:
    """Draws images from `model`. Batches of the same size share one engine.

    Up to rounding, image i depends only on (seed, i) and its class, and not on the batch size, the engine or the other
    images. By default, there are no `filters`; with guidance, images need a class. `engine` is one of `ENGINES` or
    `auto`; `Engine` explains `products`.
    """

    def __init__(
        self,
        model: PixelModel,
        seed: int = 0,
        filters: Filters | None = None,
        engine: str = AUTO,
        products: torch.dtype | None = None,
    ) -> None:
        self.model, self.seed, self.filters = model, seed, filters or Filters()
        self.engines = EngineCache(engine, model, products=products)

    @torch.no_grad()
    def sample(
        self, indices: Sequence[int], labels: Labels | None = None, before_step: Check = never_stop
    ) -> SampledBatch:
        """Draw the images `indices` as one batch.

        `labels[i]` is the class of image i. By default, images have no class if the class is optional, or else they
        rotate through all classes of the model.
        `Engine.draw_values` explains `before_step`. Raises `LintxError` if the model predicts NaN or infinity, and what
        `check_guidance` raises.
        """
        check_guidance(self.model, self.filters.guidance, labels is not None)
        began = time.perf_counter()
        batch, positions = len(indices), self.model.config.image.positions
        if labels is None:
            chosen = self.model.take_turns(indices)
        else:
            chosen = torch.tensor([labels[index] for index in indices])
        tokens = self.start_tokens(batch, chosen)
        with self.engines.start(len(tokens)) as engine:
            streams = UniformStreams(self.seed, indices)
            values = engine.draw_values(engine.step(tokens), streams, self.filters, positions, before_step)
        # The start token counts as one pass.
        passes = 1 + engine.look_aheads if engine.look_aheads else positions
        return SampledBatch(indices, values, time.perf_counter() - began, engine.state_bytes, passes)

    def start_tokens(self, count: int, labels: Tensor | None) -> Tensor:
        """Return the start tokens of `count` images with these classes, int64 [rows]: a row of the engine per image.

        With guidance, another `count` rows follow, for the same images without a class.
        """
        tokens = self.model.start_tokens(count, labels)
        return tokens if self.filters.guidance == 1 else torch.cat([tokens, self.model.start_tokens(count)])

    def iter_batches(
        self,
        indices: Sequence[int],
        batch: int = 64,
        labels: Labels | None = None,
        before_step: Check = never_stop,
        on_halve: Callable[[int], None] | None = None,
    ) -> Iterator[SampledBatch]:
        """Draw the images `indices` in order, in batches.

        `sample` explains `labels` and `before_step`; `work_in_batches` explains `on_halve`.
        """
        return work_in_batches(indices, batch, lambda part: self.sample(part, labels, before_step), on_halve)

    def sample_images(
        self,
        count: int,
        batch: int = 64,
        labels: Labels | None = None,
        before_step: Check = never_stop,
    ) -> NDArray[np.uint8]:
        """Return images 0 to `count` - 1, uint8 [count, H, W, C]. `iter_batches` explains the other arguments."""
        parts = self.iter_batches(range(count), batch, labels, before_step)
        return values_to_images(torch.cat([part.values for part in parts]), self.model.config.image)


def sample_images(
    model: PixelModel,
    count: int,
    batch: int = 64,
    seed: int = 0,
    filters: Filters | None = None,
    engine: str = AUTO,
    labels: Sequence[int] | None = None,
) -> NDArray[np.uint8]:
    """Return `count` images, uint8 [count, H, W, C]. `Sampler.sample` explains `labels`."""
    return Sampler(model, seed, filters, engine).sample_images(count, batch, labels)
