"""A block without attention, for comparison: an LSTM with a very small state."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linformer_cli.attention.base import Memory
from linformer_cli.config import NetworkConfig
from linformer_cli.documents import Config, setting
from linformer_cli.native.program import Builder
from .blocks import Block
from .dropout import Vectors, exact


class LstmOptions(Config):
    parses_text = True

    hidden: int | None = setting(
        None,
        "width of h and c (default: the width that gives about as many parameters as a transformer block)",
        gt=0,
        le=65_536,
    )


class LstmState(NamedTuple):
    """The output h and the cell c, each [B, hidden]."""

    h: Tensor
    c: Tensor


class LstmBlock(Block):
    """x + W_o LSTM(x): one layer of long short-term memory instead of attention and feed-forward.

    The gates are the source's and a forget gate, whose bias starts at 1. By default, the block has about as many
    parameters as a transformer block. h and c have the type of the weights, without autocast: a cell is a running sum.
    """

    name = "lstm"
    source = "Hochreiter 1997, Neural Computation 9(8)"
    family = "recurrent baseline"
    method = "no attention: one cell per block"
    memory = Memory.CONSTANT
    options_type = LstmOptions
    looks_ahead = False

    @staticmethod
    def count_state_traffic(positions: int) -> float:
        return 2.0

    def __init__(self, config: NetworkConfig, options: LstmOptions) -> None:
        super().__init__(config)
        self.hidden = options.hidden or choose_hidden(config)
        self.lstm = nn.LSTM(config.width, self.hidden, batch_first=True)
        self.output = nn.Linear(self.hidden, config.width)
        self.norm = nn.LayerNorm(config.width)
        # The weights start at N(0, 1 / inputs), like every linear layer of the model.
        input_weight, hidden_weight, input_bias, hidden_bias = self.lstm.all_weights[0]
        nn.init.normal_(input_weight, std=config.width**-0.5)
        nn.init.normal_(hidden_weight, std=self.hidden**-0.5)
        nn.init.zeros_(input_bias)
        nn.init.zeros_(hidden_bias)
        # The gates are ordered input, forget, cell, output.
        nn.init.ones_(input_bias.data[self.hidden : 2 * self.hidden])

    def attend(self, x: Vectors, state: Any) -> tuple[Vectors, LstmState]:
        def branch(x: Tensor) -> tuple[Tensor, LstmState]:
            start = None if state is None else (state.h.unsqueeze(0), state.c.unsqueeze(0))
            with torch.autocast(x.device.type, enabled=False), _in_float32():
                y, (h, c) = self.lstm(x.to(self.output.weight.dtype), start)
            # These are copies, because torch may return views of a larger tensor.
            return self.output(y), LstmState(h[0].clone(), c[0].clone())

        return self.add_branch(x, self.norm, branch, reads_copy=False)

    @torch.no_grad()
    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, LstmState]:
        def branch(x_t: Tensor) -> tuple[Tensor, LstmState]:
            with torch.autocast(x_t.device.type, enabled=False):
                h, c = torch.lstm_cell(x_t.to(self.output.weight.dtype), (state.h, state.c), *self.lstm.all_weights[0])
            return self.output(h), LstmState(h, c)

        y_t, state = self.add_branch(x_t, self.norm, branch, reads_copy=False)
        return exact(y_t), state

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> LstmState:
        h, c = (torch.zeros(batch, self.hidden, device=device, dtype=dtype) for _ in range(2))
        return LstmState(h, c)

    def branch_ends(self) -> Sequence[nn.Linear]:
        return (self.output,)

    def emit(self, builder: Builder, name: str) -> None:
        input_weight, hidden_weight, input_bias, hidden_bias = self.lstm.all_weights[0]

        def branch(x: int) -> int:
            h, c = (builder.state(self.hidden) for _ in range(2))
            from_input = builder.project_by(input_weight, input_bias + hidden_bias, x, "gates")
            from_h = builder.project_by(hidden_weight, torch.zeros_like(hidden_bias), h, "hidden gates")
            builder.emit("lstm", from_input=from_input, from_h=from_h, h=h, c=c, hidden=self.hidden)
            return builder.project(self.output, h, "branch")

        builder.add_branch(self.norm, self.pre, branch)

    def list_states(self, state: Any) -> list[Tensor]:
        return [state.h, state.c]


def _in_float32() -> AbstractContextManager[None]:
    """Return a context in which cuDNN multiplies in float32, like `step`. torch's default for sequences is TF32."""
    cudnn = torch.backends.cudnn
    return cudnn.flags(cudnn.enabled, cudnn.benchmark, deterministic=cudnn.deterministic, allow_tf32=False)


def choose_hidden(config: NetworkConfig) -> int:
    """Choose the width of h for which an LSTM block has about as many parameters as a transformer block."""
    width, heads_width, feed_forward = config.width, config.heads * config.head_width, config.feed_forward
    attention = 3 * heads_width * (width + 1) + width * (heads_width + 1)
    narrowing = 0 if config.feed_forward_kind == "boom" else width * (feed_forward + 1)
    wanted = attention + feed_forward * (width + 1) + narrowing + 2 * 2 * width

    def count(hidden: int) -> int:
        # The parameters are four gates with two biases each, the output projection and one norm.
        return 4 * hidden * (width + hidden + 2) + width * (hidden + 1) + 2 * width

    # Try the integers around the root of count(hidden) = wanted.
    linear = 5 * width + 8
    root = int((-linear + (linear**2 + 16 * (wanted - 3 * width)) ** 0.5) / 8)
    return min((max(1, root), root + 1), key=lambda hidden: abs(count(hidden) - wanted))
