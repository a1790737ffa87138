"""The gated block of Hua 2022 (arXiv 2202.10447): one branch in place of attention and feed-forward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.attention.base import Attention
from linformer_cli.config import ModelConfig
from linformer_cli.native.program import Builder, MixInputs
from .blocks import InnerBlock
from .dropout import Vectors, exact
from .linear_layers import Linear


class GatedBlock(InnerBlock):
    """x + (U * (A V)) W_o, where U, V = SiLU(x W) and A is computed from Z = SiLU(x W_z).

    This is figure 2 and equation 4 of the source. A is the matrix of attention weights of the configured mechanism.
    U and V have twice the model's width by default.
    `heads`, `head_width`, `feed_forward` and `activation` are ignored. The source has only `pre` norm.
    """

    def __init__(self, config: ModelConfig, attention: Attention) -> None:
        super().__init__(config)
        self.attention = attention
        shape = attention.shape
        self.widths = (shape.value_width, shape.value_width, shape.key_width)
        self.input = Linear(config.width, sum(self.widths))
        self.output = Linear(shape.value_width, config.width)
        self.norm = nn.LayerNorm(config.width)

    @property
    def inner(self) -> Attention:
        return self.attention

    def attend(self, x: Vectors, state: Any) -> tuple[Vectors, Any]:
        return self._mix(x, lambda q, k, v: self.attention.attend(q, k, v, state))

    def attend_all(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return exact(self._mix(x, lambda q, k, v: (self.attention.attend_all(q, k, v, lengths), None))[0])

    @torch.no_grad()
    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        y_t, state = self._mix(x_t, lambda q, k, v: self.attention.step(q, k, v, state))
        return exact(y_t), state

    def _mix(self, x: Vectors, run: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Any]]) -> tuple[Vectors, Any]:
        def branch(x: Tensor) -> tuple[Tensor, Any]:
            gate, v, z = self._project(x)
            y, new = run(z.unsqueeze(1), z.unsqueeze(1), v.unsqueeze(1))
            return self.output(gate * y.squeeze(1)), new

        return self.add_branch(x, self.norm, branch)

    def branch_ends(self) -> Sequence[nn.Linear]:
        return (self.output,)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """U, V and Z in separate memory, because a view in a state would keep the whole projection in memory."""
        u, v, z = (functional.silu(part) for part in self.input(x).split(self.widths, dim=-1))
        return u, v, z

    def emit(self, builder: Builder, name: str) -> None:
        def branch(x: int) -> int:
            projected = builder.project(self.input, x, f"projected{name}", "silu")
            inner, (gate, value, z) = self.inner, (0, self.widths[0], 2 * self.widths[0])
            mixed = builder.scratch("mixed", inner.shape.value_width)
            inner.emit(MixInputs(builder, projected, mixed, (z, z, value, 0), inner.shape.heads_and_widths))
            builder.gate(mixed, projected, self.widths[0], gate)
            return builder.project(self.output, mixed, "branch")

        builder.add_branch(self.norm, self.pre, branch)
