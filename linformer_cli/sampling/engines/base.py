"""The interface of an engine. An engine steps a model and is prepared once for a number of images."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from linformer_cli.errors import LintxError
from linformer_cli.model.pixel_model import PixelModel, PixelState
from linformer_cli.sampling.choose import Filters, UniformStreams, draw_filtered
from linformer_cli.sampling.particles import DAMAGED as DAMAGED
from linformer_cli.sampling.particles import KeptImage, draw_particles
from linformer_cli.system.signals import Check, never_stop

_CHECK_EVERY = 64


class Engine(ABC):
    """Steps `batch` images of `model`. Building the engine also starts the first images, as `start(state)` does.

    Every engine computes what `PixelModel.step` computes, up to rounding, and may copy the weights. With `look_ahead`,
    it may compute several values in one pass, with the same results. `products` is the type of the inputs and weights
    of matrix products (None: the model's type).
    """

    name: ClassVar[str]

    def __init__(
        self,
        model: PixelModel,
        batch: int,
        state: PixelState | None = None,
        look_ahead: bool = True,
        products: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.batch = batch
        self.products = products
        self.prepare(look_ahead)
        self.start(state)

    @classmethod
    @abstractmethod
    def refusal(cls, model: PixelModel, products: torch.dtype | None = None) -> str | None:
        """Say why the engine does not support `model` with `products`, or return None if it does."""

    @classmethod
    def doubt(cls, model: PixelModel, forks: bool) -> str | None:
        """Say why `auto` does not choose the engine although it supports `model`, or return None if it does.

        `forks` tells whether images begin or continue from copies of other states, as completions do.
        """
        return None

    @staticmethod
    def refuse_products(model: PixelModel, products: torch.dtype | None) -> str | None:
        """Say why an engine whose products are always in the model's type rejects `products`, or return None."""
        if products in (None, model.dtype):
            return None
        return f"it does not support {str(products).removeprefix('torch.')}"

    @abstractmethod
    def prepare(self, look_ahead: bool) -> None:
        """Copy weights and allocate memory for all steps; called once, before the first `start`."""

    @abstractmethod
    def start(self, state: PixelState | None = None) -> None:
        """Begin `batch` new images, each from a copy of one of the n in `state` (None: the start), in equal groups."""

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        """Begin `batch` new images with given tokens int64 [n, t], and return the head parameters [B, P] after them.

        Tokens are read in parallel, in blocks of T. Each row is continued by `batch` / n adjacent images.
        """
        state = self.model.init_state(len(tokens))
        for block in tokens.split(self.model.config.image.positions, dim=1):
            parameters, state = self.model.attend(block, state)
        self.start(state)
        return parameters[:, -1].repeat_interleave(self.batch // len(tokens), dim=0)

    @abstractmethod
    def step(self, tokens_t: Tensor) -> Tensor:
        """Read the next token int64 [B] and return head parameters [B, P]. The next step may overwrite the result."""

    @abstractmethod
    def fork(self, ancestors: Tensor) -> None:
        """Let row i continue where row ancestors[i] is, for int64 ancestors in any order and number up to `batch`.

        Until `start`, the next steps take and return as many rows as there are ancestors.
        """

    def draw(self, parameters: Tensor, uniforms: Tensor, filters: Filters) -> Tensor:
        """Draw values int64 [B] from the result of `step`, after `filters`, with uniforms float64 [B].

        With guidance, `parameters` has 2 B rows; see `guide`. Without filters, no table of probabilities is computed.
        """
        if filters.active:
            return draw_filtered(self.model.head.log_probabilities(parameters), uniforms, filters)
        return self.model.head.draw(parameters, uniforms)

    @torch.no_grad()
    def draw_values(
        self, parameters: Tensor, streams: UniformStreams, filters: Filters, count: int, before_step: Check = never_stop
    ) -> Tensor:
        """Draw the next `count` values of every image, uint8 [B, count] on the CPU, the first from `parameters`.

        With guidance, the engine has 2 B rows: images with their classes, and then without. `before_step` is called
        before every step but the last value's and may raise to stop. Raises `LintxError` for NaN and infinity.
        """
        # A small tensor kept from every step would fragment the heap, and memory would grow with the image.
        values = torch.empty(count, self.batch // filters.rows_per_image, dtype=torch.uint8)
        for number in range(count):
            before_step()
            # The check makes a GPU wait, so it runs only every `_CHECK_EVERY` values. NaN persists in the state.
            if (number % _CHECK_EVERY == 0 or number == count - 1) and not bool(torch.isfinite(parameters).all()):
                raise LintxError(DAMAGED)
            drawn = self.draw(parameters, streams.take(), filters)
            values[number] = drawn
            if number < count - 1:
                parameters = self.step(drawn.repeat(filters.rows_per_image))
        return values.T.contiguous()

    def keep_values(
        self, starts: Tensor, given: Tensor, streams: UniformStreams, filters: Filters, before_step: Check = never_stop
    ) -> KeptImage:
        """Draw an image that keeps the values of `given` int64 [T] that are not -1, with `batch` rows of particles.

        `starts` is the start token of the image, or two with guidance, and `streams` has one stream. Given values are
        weighed with guidance, but before the other filters. Call it after `start`.
        """
        return draw_particles(self, starts, given, streams, filters, before_step)

    @property
    def look_aheads(self) -> int:
        """The number of look-ahead passes through the layers since `start`."""
        return 0

    @property
    @abstractmethod
    def state_bytes(self) -> int:
        """Return the bytes of the state that is carried from step to step."""
