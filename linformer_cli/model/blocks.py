"""Residual blocks, the layers between embedding and head: their interface and the transformer block."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from linformer_cli.attention.base import Attention, measure_state_bytes
from linformer_cli.attention.kernels.registry import PROJECTION, Unnormed, kernel_for
from linformer_cli.config import ModelConfig, NetworkConfig
from linformer_cli.native.program import Builder
from .attention_layer import AttentionLayer, QueryLayer
from .dropout import Rounded, Vectors, add_and_normalise, add_dropped, exact
from .linear_layers import Linear


class FeedForward(nn.Module):
    """Linear, activation, then linear or, for `boom` (Merity 2019, arXiv 1911.11423), a sum of chunks of the width."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.width = config.width
        self.input = Linear(config.width, config.feed_forward)
        self.output = None if config.feed_forward_kind == "boom" else Linear(config.feed_forward, config.width)
        self.activation = config.activation

    def forward(self, x: Tensor | Unnormed, residual: Unnormed | None = None) -> Tensor:
        hidden = self.input(x, self.activation)
        if self.output is None:
            return hidden.unflatten(-1, (-1, self.width)).sum(dim=-2)
        return self.output(hidden, residual=residual)

    @property
    def end(self) -> nn.Linear:
        return self.input if self.output is None else self.output

    def emit(self, builder: Builder, source: int) -> int:
        hidden = builder.project(self.input, source, "hidden", self.activation)
        if self.output is not None:
            return builder.project(self.output, hidden, "branch")
        output = builder.scratch("branch", self.width)
        builder.emit("fold", y=output, x=hidden, width=self.width, chunks=self.input.out_features // self.width)
        return output


class Block(nn.Module, ABC):
    """One layer: residual branches, with LayerNorm before each branch (`pre`) or after the sum (`post`)."""

    # Whether one pass of the block's program can compute several positions of an image at once.
    looks_ahead: ClassVar[bool] = True

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.pre = config.norm == "pre"

    @abstractmethod
    def attend(self, x: Vectors, state: Any) -> tuple[Vectors, Any]:
        """Output vectors [B, T, width] for inputs x that follow `state` (None: no positions), and the new state."""

    @abstractmethod
    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return a position's output [B, width] and the new state, without gradients; may update `state` in place."""

    @abstractmethod
    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> Any:
        """Return the state before the first position; a growing state reserves room for `capacity` positions."""

    def state_bytes(self, batch: int, positions: int, dtype: torch.dtype) -> int:
        """Return bytes of the state after `positions` positions, for vectors of `dtype`."""
        return measure_state_bytes(self.init_state(batch, positions, torch.device("meta"), dtype))

    @abstractmethod
    def branch_ends(self) -> Sequence[nn.Linear]:
        """Return the last matrix of every residual branch: if its weights and bias are 0, the branch outputs 0."""

    def start_biases(self) -> None:
        """Set the biases whose initial value is not 0."""

    @property
    def unbounded(self) -> bool:
        """Whether a sequence can go on beyond T positions: the state is constant and positions are not used."""
        return True

    def is_compiled(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether compiled kernels, not plain torch, mix positions for vectors of `dtype` on `device`."""
        return False

    def add_branch(
        self, x: Vectors, norm: nn.LayerNorm, branch: Callable[[Tensor], tuple[Tensor, Any]], reads_copy: bool = True
    ) -> tuple[Vectors, Any]:
        """Return x plus the output of `branch`, normalised, and its state. With `reads_copy`, it may read x rounded."""
        copy = x.copy if isinstance(x, Rounded) and reads_copy else exact(x)
        x = exact(x)
        y, state = branch(norm(x) if self.pre else copy)
        if not self.training:
            return (x + y if self.pre else norm(x + y)), state
        return (add_dropped(x, y, self.dropout) if self.pre else add_and_normalise(x, y, self.dropout, norm)), state

    @abstractmethod
    def emit(self, builder: Builder, name: str) -> None:
        """Emit a step, or raise `NoProgram`. Memory that must last to the end of a pass is named `...name`."""

    @abstractmethod
    def list_states(self, state: Any) -> list[Tensor]:
        """List the tensors [B, ...] of `state` that fill the state buffers created by `emit`, in the same order."""


class InnerBlock(Block):
    """A block whose state is the state of its attention mechanism or attention layer."""

    @property
    @abstractmethod
    def inner(self) -> Attention:
        """The attention mechanism."""

    @property
    def stateful(self) -> Attention | AttentionLayer | QueryLayer:
        return self.inner

    @abstractmethod
    def attend_all(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return outputs [B, T, width] for x [B, T, width]; see `Attention.attend_all`."""

    @property
    def unbounded(self) -> bool:
        return self.inner.unbounded

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> Any:
        return self.stateful.init_state(batch, capacity, device, dtype)

    def is_compiled(self, device: torch.device, dtype: torch.dtype) -> bool:
        return self.inner.is_compiled(device, dtype)

    def list_states(self, state: Any) -> list[Tensor]:
        return self.stateful.list_states(state)


class TransformerBlock(InnerBlock):
    """Attention and feed-forward, each in its own residual branch."""

    def __init__(self, config: ModelConfig, inner: Attention) -> None:
        super().__init__(config)
        self.attention = (QueryLayer if inner.shared_key_value else AttentionLayer)(config, inner)
        self.feed_forward = FeedForward(config)
        self.attention_norm = nn.LayerNorm(config.width)
        self.feed_forward_norm = nn.LayerNorm(config.width)

    @property
    def inner(self) -> Attention:
        return self.attention.inner

    @property
    def stateful(self) -> AttentionLayer | QueryLayer:
        return self.attention

    def attend(self, x: Vectors, state: Any) -> tuple[Vectors, Any]:
        return self.add_branches(x, lambda x: self.attention.attend(x, state))

    def attend_all(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        layer = self.attention
        assert isinstance(layer, AttentionLayer)
        return exact(self.add_branches(x, lambda x: (layer.attend_all(x, lengths), None))[0])

    @torch.no_grad()
    def step(self, x_t: Any, state: Any) -> tuple[Any, Any]:
        x, layer, pre = x_t if isinstance(x_t, Unnormed) else Unnormed(x_t), self.attention, self.pre
        dense = self.feed_forward.output is not None
        if not (isinstance(layer, AttentionLayer) and dense and kernel_for(PROJECTION, x.x)):
            y_t, state = self.add_branches(exact(x), lambda x_t: self.attention.step(x_t, state))
            return exact(y_t), state
        # Four products, each with the norms, the activation and the residual around it.
        x_t, state = layer.step(Unnormed(x.x, self.attention_norm) if pre else x, state, x)
        x = Unnormed(x_t, None if pre else self.attention_norm)
        x_t = self.feed_forward(Unnormed(x_t, self.feed_forward_norm) if pre else x, x)
        return Unnormed(x_t, None if pre else self.feed_forward_norm), state

    def branch_ends(self) -> Sequence[nn.Linear]:
        return self.attention.end, self.feed_forward.end

    def start_biases(self) -> None:
        if isinstance(self.attention, AttentionLayer):
            self.attention.start_extra_bias()

    def add_branches(self, x: Vectors, attention: Callable[[Tensor], tuple[Tensor, Any]]) -> tuple[Vectors, Any]:
        x, state = self.add_branch(x, self.attention_norm, attention, isinstance(self.attention, AttentionLayer))
        x, _ = self.add_branch(x, self.feed_forward_norm, lambda x: (self.feed_forward(x), None))
        return x, state

    def emit(self, builder: Builder, name: str) -> None:
        builder.add_branch(self.attention_norm, self.pre, lambda x: self.attention.emit(builder, x, f"projected{name}"))
        builder.add_branch(self.feed_forward_norm, self.pre, lambda x: self.feed_forward.emit(builder, x))


def initialise_weights(model: nn.Module, blocks: Sequence[Block]) -> None:
    """Initialise linear layers to N(0, 1 / inputs), and the sum of all branches to the scale of one branch."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            nn.init.zeros_(module.bias)
    for block in blocks:
        block.start_biases()
    ends = [last for block in blocks for last in block.branch_ends()]
    for last in ends:
        last.weight.data.mul_(len(ends) ** -0.5)
