"""What an engine is: a way to step a model, prepared once for a number of images."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from linformer_cli.model.pixel_model import PixelModel, PixelState
from linformer_cli.sampling.choose import Filters, draw_filtered


class Engine(ABC):
    """Steps `batch` images of `model` from `state` (None: the start of an image), which it takes for its own.

    Every engine computes what `PixelModel.step` computes, up to rounding; they differ in how fast.
    """

    name: ClassVar[str]

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
            return draw_filtered(self.model.head, parameters, uniforms.to(parameters.device), filters)
        return self.draw_unfiltered(parameters, uniforms)

    def draw_unfiltered(self, parameters: Tensor, uniforms: Tensor) -> Tensor:
        """Values int64 [B] from exactly the head's distribution, with uniforms float64 [B] on the CPU."""
        return self.model.head.draw(parameters, uniforms.to(parameters.device))

    @property
    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes that stepping carries."""
