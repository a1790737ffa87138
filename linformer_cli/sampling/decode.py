"""Draws images, and bytes without end: an engine steps the model, and values are drawn from its predictions."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linformer_cli.data.sequence import values_to_images
from linformer_cli.errors import UsageError
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.system.memory import work_in_batches
from linformer_cli.system.signals import Check, never_stop
from linformer_cli.system.timing import time_work
from .choose import Filters, UniformStreams, check_guidance
from .engines import AUTO, Engine, EngineCache, build_engine


class Labels(Protocol):
    """A sequence or mapping from image numbers to classes."""

    def __getitem__(self, index: int, /) -> int: ...


@dataclass(frozen=True)
class SampledBatch:
    """Finished images: values uint8 [B, T] on the CPU. With look-ahead, there are fewer passes than T per image."""

    indices: Sequence[int]
    values: Tensor
    seconds: float
    state_bytes: int
    passes: int


class Sampler:
    """Draws images from `model`. Batches of the same size share one engine.

    Up to rounding, image i depends only on (seed, i) and its class. With guidance, images need a class. `engine` is one
    of `ENGINES` or `auto`; `Engine` explains `products`.
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

        `labels[i]` is the class of image i, by default none if the class is optional, or else all classes in turn.
        `Engine.draw_values` explains `before_step`. Raises `LintxError` for NaN or infinity, or as `check_guidance`.
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
        """Return start tokens int64 [rows] of `count` images of these classes; with guidance, also without a class."""
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
        """Draw the images `indices` in order, in batches; see `sample`, and `work_in_batches` for `on_halve`."""
        return work_in_batches(indices, batch, lambda part: self.sample(part, labels, before_step), on_halve)

    def sample_images(
        self, count: int, batch: int = 64, labels: Labels | None = None, before_step: Check = never_stop
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


WARM_UP_STEPS = 32


@dataclass
class WholeImages:
    """Draw whole images, in each sample others, because they decide how often look-ahead succeeds."""

    model: PixelModel
    batch: int
    engine: str = AUTO
    look_ahead: bool = True
    check: Check = never_stop
    products: torch.dtype | None = None
    drawn: int = 0
    looked_ahead: bool = False

    @property
    def steps(self) -> int:
        return self.model.config.image.positions

    @torch.no_grad()
    def time_sample(self) -> float:
        # Each sample builds a new engine, so the engine takes no memory while other rows are timed.
        engine = build_engine(self.engine, self.model, self.batch, None, self.look_ahead, self.products)
        warm_up(partial(self._draw, engine), min(WARM_UP_STEPS, self.steps))
        seconds = time_work(lambda: self._draw(engine, self.steps), str(self.model.device))
        self.looked_ahead |= engine.look_aheads > 0
        self.drawn += self.batch
        return seconds

    def _draw(self, engine: Engine, steps: int) -> None:
        engine.start()
        first = engine.step(self.model.start_tokens(self.batch))
        streams = UniformStreams(0, range(self.drawn, self.drawn + self.batch))
        engine.draw_values(first, streams, Filters(), steps, self.check)


@torch.no_grad()
def warm_up(draw: Callable[[int], None], steps: int) -> None:
    """Draw `steps` values in two parts, because the engine `cuda` records each graph in its second run."""
    for _ in range(2):
        draw(steps // 2)


_VALUES = 32  # the number of values in a part


@dataclass(frozen=True)
class Stream:
    """A sequence that begins with `prompt` int64 [P], and `count` drawn values (None: without end), or `UsageError`."""

    sampler: Sampler
    prompt: Tensor
    count: int | None = None

    def __post_init__(self) -> None:
        model, known = self.sampler.model, len(self.prompt)
        positions, bound = model.config.image.positions, model.find_bound()
        if bound is None:
            return
        if self.count is None or known + self.count > positions:
            wanted = "a sequence without end" if self.count is None else f"{known + self.count:,} values"
            raise UsageError(f"this model draws at most {positions:,} values, prompt included, found {wanted}: {bound}")

    @torch.no_grad()
    def draw(self, index: int = 0) -> Iterator[bytes]:
        """Yield the values after the prompt in parts of up to 32, which depend on the seed, `index` and the prompt."""
        model, left = self.sampler.model, self.count
        if left == 0:
            return
        streams = UniformStreams(self.sampler.seed, [index])
        tokens = torch.cat([model.start_tokens(1), self.prompt.to(model.device)]).unsqueeze(0)
        with self.sampler.engines.start(1) as engine:
            parameters = engine.read(tokens)
            while left is None or left > 0:
                count = _VALUES if left is None else min(_VALUES, left)
                values = engine.draw_values(parameters, streams, self.sampler.filters, count)
                yield values.numpy().tobytes()
                left = None if left is None else left - count
                if left != 0:
                    parameters = engine.step(values[:, -1].to(model.device, torch.int64))
