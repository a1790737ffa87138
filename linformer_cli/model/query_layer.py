"""The layer around a mechanism whose keys and values are the layer's input."""

from typing import Any

from torch import Tensor, nn

from linformer_cli.attention.single_head import SingleHeadAttention
from linformer_cli.config import ModelConfig
from linformer_cli.native.constants import TILE_ROWS
from linformer_cli.native.program import Builder, MixInputs

from .linear_layers import Linear


class QueryLayer(nn.Module):
    """Projects vectors to queries; the input itself is k and v, and the mechanism's output is the layer's output."""

    def __init__(self, config: ModelConfig, inner: SingleHeadAttention) -> None:
        super().__init__()
        self.inner = inner
        self.input = Linear(config.width, config.width)

    def attend(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        memory = x.unsqueeze(1)
        y, state = self.inner.attend(self.input(x).unsqueeze(1), memory, memory, state)
        return y.squeeze(1), state

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        memory_t = x_t.unsqueeze(1)
        y_t, state = self.inner.step(self.input(x_t).unsqueeze(1), memory_t, memory_t, state)
        return y_t.squeeze(1), state

    def emit(self, builder: Builder, source: int, name: str) -> int:
        """Emit a step whose input is in buffer `source`. Queries and a copy of the input go to memory `name`."""
        width = self.input.in_features
        start = width + -width % TILE_ROWS  # a product fills whole tiles
        projected = builder.project(self.input, source, name)
        builder.scratch(name, start + width)
        builder.emit("copy", (projected, source), (width, start))
        output = builder.scratch("branch", width)
        self.inner.emit(MixInputs(builder, projected, output, (0, start, start, 0), self.inner.shape.heads_and_widths))
        return output

    @property
    def end(self) -> nn.Linear:
        """The last matrix of the branch: if its weights and bias are 0, the output is 0."""
        return self.inner.value_gate
