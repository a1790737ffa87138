"""The reference engine: the model's own `step` in plain torch. All other engines are tested against it."""

import torch
from torch import Tensor

from linformer_cli.attention.base import measure_state_bytes
from linformer_cli.model.pixel_model import PixelModel, PixelState

from .base import Engine


class TextbookEngine(Engine):
    """Steps the model with `PixelModel.step`, which makes one torch call for each term of a formula."""

    name = "textbook"

    def __init__(self, model: PixelModel, batch: int, state: PixelState | None = None, look_ahead: bool = True) -> None:
        super().__init__(model, batch)
        self._state: PixelState | None = None
        self._state_bytes = 0
        self.start(state)

    @classmethod
    def refusal(cls, model: PixelModel) -> str | None:
        return None

    def start(self, state: PixelState | None = None) -> None:
        self._state = self.model.init_state(self.batch) if state is None else state
        self._state_bytes = measure_state_bytes(self._state)

    def release(self) -> None:
        self._state = None

    @torch.no_grad()
    def step(self, tokens_t: Tensor) -> Tensor:
        assert self._state is not None, "call start() before step()"
        parameters, self._state = self.model.step(tokens_t, self._state)
        return parameters

    @property
    def state_bytes(self) -> int:
        return self._state_bytes
