"""A block that mixes no positions, for comparison: it shows what the context of the embedding predicts alone."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from linformer_cli.attention.base import Memory
from linformer_cli.config import NetworkConfig
from linformer_cli.documents import Config
from linformer_cli.native.program import Builder
from .blocks import Block, FeedForward
from .dropout import Vectors, exact


class NoneOptions(Config):
    """There are no options."""

    parses_text = True


class NoneBlock(Block):
    """x + FF(x): the feed-forward branch of a transformer block, without its attention branch. It has no state."""

    name = "none"
    source = "no source"
    family = "no mixing"
    method = "only the feed-forward layers"
    memory = Memory.CONSTANT
    options_type = NoneOptions

    @staticmethod
    def count_state_traffic(positions: int) -> float:
        return 0.0

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)

    def attend(self, x: Vectors, state: Any) -> tuple[Vectors, tuple[()]]:
        return self.add_branch(x, self.feed_forward_norm, lambda x: (self.feed_forward(x), ()))

    @torch.no_grad()
    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, tuple[()]]:
        y_t, state = self.attend(x_t, state)
        return exact(y_t), state

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> tuple[()]:
        return ()

    def branch_ends(self) -> Sequence[nn.Linear]:
        return (self.feed_forward.end,)

    def emit(self, builder: Builder, name: str) -> None:
        builder.add_branch(self.feed_forward_norm, self.pre, lambda x: self.feed_forward.emit(builder, x))

    def list_states(self, state: Any) -> list[Tensor]:
        return []
