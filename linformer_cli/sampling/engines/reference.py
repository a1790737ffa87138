"""The reference engine: the model's own `step` in plain torch. All other engines are tested against it."""

import torch
from torch import Tensor

from linformer_cli.attention.base import fork_state, measure_state_bytes, select_images
from linformer_cli.model.pixel_model import PixelModel, PixelState
from .base import Engine


class ReferenceEngine(Engine):
    """Steps the model with `PixelModel.step`, which makes one torch call for each term of a formula."""

    name = "reference"

    @classmethod
    def refusal(cls, model: PixelModel, products: torch.dtype | None = None) -> str | None:
        return cls.refuse_products(model, products)

    def prepare(self, look_ahead: bool) -> None:
        self._state: PixelState | None = None

    def start(self, state: PixelState | None = None) -> None:
        self._state = None  # keeps only one state in memory at a time
        if state is None:
            self._state = self.model.init_state(self.batch)
        else:
            self._state = fork_state(state, self.batch // len(state.embedding.recent))
        self._state_bytes = measure_state_bytes(self._state)

    def fork(self, ancestors: Tensor) -> None:
        assert self._state is not None
        self._state = select_images(self._state, ancestors.to(self.model.device))

    @torch.no_grad()
    def step(self, tokens_t: Tensor) -> Tensor:
        assert self._state is not None
        parameters, self._state = self.model.step(tokens_t, self._state)
        return parameters

    @property
    def state_bytes(self) -> int:
        return self._state_bytes
