"""The layers between embedding and head: projections around an attention, and the residual blocks."""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.attention import build_attention
from linformer_cli.attention.base import AttentionShape
from linformer_cli.config import ModelConfig


class AttentionLayer(nn.Module):
    """Projects vectors to heads, lets the inner attention mix positions, projects back. Owns no mixing of its own."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        shape = AttentionShape(
            heads=config.heads,
            key_width=config.head_width,
            value_width=config.head_width,
            positions=config.image.positions,
            row=config.image.values_per_row,
            layer=layer,
        )
        self.inner = build_attention(config.attention, config.attention_options, shape)
        self.heads = shape.heads
        keys = shape.key_width if self.inner.shared_query_key else 2 * shape.key_width
        self.widths = (keys - shape.key_width, shape.key_width, shape.value_width, self.inner.extra_per_head)
        self.input = nn.Linear(config.width, shape.heads * sum(self.widths))
        self.output = nn.Linear(shape.heads * shape.value_width, config.width)

    @property
    def input_rows(self) -> dict[str, slice]:
        """Which rows of `input` give q, k, v and extra; `qk` where one projection gives both, and nothing absent."""
        names = ("q", "qk" if self.inner.shared_query_key else "k", "v", "extra")
        ends = list(itertools.accumulate(self.heads * width for width in self.widths))
        rows = zip(names, [0, *ends], ends, strict=False)
        return {name: slice(start, end) for name, start, end in rows if end > start}

    @torch.no_grad()
    def start_extra_bias(self) -> None:
        """The extra scalars start around the value that the mechanism asks for."""
        if self.inner.extra_per_head:
            self.input.bias[-self.heads * self.inner.extra_per_head :] = self.inner.extra_bias

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """x [..., width] to q, k, v and extra, each [..., H, its own width]."""
        parts = self.input(x).split([self.heads * width for width in self.widths], dim=-1)
        q, k, v, extra = (part.unflatten(-1, (self.heads, -1)) if part.shape[-1] else None for part in parts)
        assert k is not None and v is not None
        return (k if q is None else q), k, v, extra

    def attend(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        q, k, v, extra = (None if part is None else part.transpose(1, 2) for part in self._project(x))
        assert q is not None and k is not None and v is not None
        y, state = self.inner.attend(q, k, v, state, extra)
        return self.output(y.transpose(1, 2).flatten(2)), state

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        q_t, k_t, v_t, extra_t = self._project(x_t)
        y_t, state = self.inner.step(q_t, k_t, v_t, state, extra_t)
        return self.output(y_t.flatten(1)), state


class FeedForward(nn.Module):
    """Two layers with an activation between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input = nn.Linear(config.width, config.feed_forward)
        self.output = nn.Linear(config.feed_forward, config.width)
        self.activation = functional.gelu if config.activation == "gelu" else functional.relu

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.output(self.activation(self.input(x)))
        return y


class Block(nn.Module):
    """Attention and feed-forward, each with a residual; LayerNorm before them (`pre`) or behind the sum (`post`)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention = AttentionLayer(config, layer)
        self.feed_forward = FeedForward(config)
        self.attention_norm = nn.LayerNorm(config.width)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.pre = config.norm == "pre"

    def attend(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Vectors [B, T, width] behind the positions in `state` (None: none)."""
        return self._mix(x, state, self.attention.attend)

    @torch.no_grad()
    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Vectors [B, width] of one position; may update `state` in place."""
        return self._mix(x_t, state, self.attention.step)

    def _mix(self, x: Tensor, state: Any, attention: Any) -> tuple[Tensor, Any]:
        # One formula for both executions: they differ in the attention alone.
        if self.pre:
            y, state = attention(self.attention_norm(x), state)
            x = x + self.dropout(y)
            return x + self.dropout(self.feed_forward(self.feed_forward_norm(x))), state
        y, state = attention(x, state)
        x = self.attention_norm(x + self.dropout(y))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x))), state
