"""What an engine is: a way to step a model, prepared once for a number of images."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from linformer_cli.errors import LintxError
from linformer_cli.model.pixel_model import PixelModel, PixelState
from linformer_cli.sampling.choose import Filters, UniformStreams, draw_filtered

_CHECK_EVERY = 64
DAMAGED = "the model's prediction is not a finite number: its weights are damaged"


class Engine(ABC):
    """Steps `batch` images of `model` from `state` (None: the start of an image), which it takes for its own.

    Every engine computes what `PixelModel.step` computes, up to rounding; they differ in how fast.
    """

    name: ClassVar[str]
    # Whether `auto` thinks of it.
    automatic: ClassVar[bool] = True
    # Whether it has ever run on the device that it is for: `auto` takes no other.
    tried: ClassVar[bool] = True

    # How many passes through the layers drew values by looking ahead, where it does.
    look_aheads: int = 0

    def __init__(self, model: PixelModel, batch: int, state: PixelState | None = None) -> None:
        self.model = model
        self.batch = batch

    @classmethod
    @abstractmethod
    def refusal(cls, model: PixelModel) -> str | None:
        """Why it does not serve `model`; None where it does."""

    @abstractmethod
    def step(self, tokens_t: Tensor) -> Tensor:
        """Head parameters [B, P] at one more token int64 [B]; what it returns may be overwritten by the next step."""

    def draw(self, parameters: Tensor, uniforms: Tensor, filters: Filters) -> Tensor:
        """Values int64 [B] from what `step` gave, after `filters`, with uniforms float64 [B] on the CPU.

        Without a filter nothing makes the table of all values' probabilities.
        """
        if filters.active:
            return draw_filtered(self.model.head, parameters, uniforms, filters)
        return self.draw_unfiltered(parameters, uniforms)

    def draw_unfiltered(self, parameters: Tensor, uniforms: Tensor) -> Tensor:
        """Values int64 [B] from exactly the head's distribution, with uniforms float64 [B] on the CPU."""
        return self.model.head.draw(parameters, uniforms)

    @torch.no_grad()
    def draw_values(
        self,
        parameters: Tensor,
        streams: UniformStreams,
        filters: Filters,
        count: int,
        before_step: Callable[[], None] | None = None,
    ) -> Tensor:
        """The next `count` values of every image, uint8 [B, count] on the CPU, the first of them from `parameters`.

        A step follows each value but the last. `before_step` is called before every step, and may raise to give up.
        Raises `LintxError` when the model gives no numbers.
        """
        # Each is written into its place at once. Keeping a small tensor per step instead pins the heap around the
        # large ones of every step, and memory would grow with the image after all.
        values = torch.empty(count, self.batch, dtype=torch.uint8)
        for number in range(count):
            if before_step is not None:
                before_step()
            # Now and then, since it makes a GPU wait; a state that is no number stays so.
            if (number % _CHECK_EVERY == 0 or number == count - 1) and not bool(torch.isfinite(parameters).all()):
                raise LintxError(DAMAGED)
            drawn = self.draw(parameters, streams.take(), filters)
            values[number] = drawn
            if number < count - 1:
                parameters = self.step(drawn)
        return values.T.contiguous()

    @property
    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes that stepping carries."""
