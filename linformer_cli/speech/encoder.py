"""Encoders from features to the log-probabilities of symbols: with attention, and the bidirectional LSTM."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.config import Fraction, ImageShape, Layers, ModelConfig, Size
from linformer_cli.errors import UsageError
from linformer_cli.model.blocks import InnerBlock, initialise_weights
from linformer_cli.model.embedding import sinusoidal_table
from linformer_cli.model.mixers import build_blocks
from .waves import BANDS

BLANK = 0
BI_LSTM = "bi-lstm"
# Mechanisms are built for an image. A square image of this side has more positions than any utterance should.
_LONGEST_SIDE = 64


@dataclass(frozen=True)
class EncoderSettings:
    """The sizes of an encoder: `stack` frames are joined to one position; heads are `width / heads` wide."""

    layers: Layers
    heads: Size
    width: Size
    stack: Size
    lstm_layers: Layers
    lstm_cells: Size
    dropout: Fraction = 0.1


# The paper states 9 layers, 6 heads and, for images, 32 columns per head. It has a prediction for every frame.
PRESETS: dict[str, EncoderSettings] = {
    "small": EncoderSettings(layers=2, heads=4, width=128, stack=3, lstm_layers=3, lstm_cells=80),
    "paper": EncoderSettings(layers=9, heads=6, width=192, stack=1, lstm_layers=3, lstm_cells=320),
}


class Encoder(nn.Module, ABC):
    """Stacks frames, lets a subclass `encode` the positions, and returns log-probabilities of blank and symbols."""

    def __init__(self, settings: EncoderSettings, symbols: int, width: int) -> None:
        super().__init__()
        self.settings = settings
        self.head = nn.Linear(width, symbols + 1)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities [B, P, symbols + 1] and the number of positions [B], for features [B, T, 40]."""
        stack = self.settings.stack
        stacked = functional.pad(features, (0, 0, 0, -features.shape[1] % stack)).unflatten(1, (-1, stack)).flatten(2)
        positions = (lengths + stack - 1) // stack
        return self.head(self.encode(stacked, positions)).log_softmax(dim=-1), positions

    @abstractmethod
    def encode(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Return vectors [B, P, width] for stacked features x [B, P, 40 stack]."""


class AttentionEncoder(Encoder):
    """A linear layer, sinusoidal positions, and transformer blocks whose positions see the whole utterance."""

    def __init__(self, attention: str, options: Mapping[str, Any], settings: EncoderSettings, symbols: int) -> None:
        super().__init__(settings, symbols, settings.width)
        if settings.width % settings.heads:
            raise UsageError(f"the width must be a multiple of {settings.heads} heads, found {settings.width}")
        config = ModelConfig(
            attention=attention,
            attention_options=dict(options),
            layers=settings.layers,
            heads=settings.heads,
            width=settings.width,
            head_width=settings.width // settings.heads,
            feed_forward=4 * settings.width,
            dropout=settings.dropout,
            image=ImageShape(height=_LONGEST_SIDE, width=_LONGEST_SIDE),
        )
        blocks = build_blocks(config)
        if not all(isinstance(block, InnerBlock) and block.inner.bidirectional for block in blocks):
            raise UsageError(f"'{attention}' with these options has no bidirectional form; use another, such as linear")
        self.input = nn.Linear(BANDS * settings.stack, settings.width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(settings.width)
        initialise_weights(self, blocks)

    def encode(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.input(x)
        x = x + sinusoidal_table(x.shape[1], x.shape[2]).to(x)
        for block in self.blocks:
            assert isinstance(block, InnerBlock)
            x = block.attend_all(x, lengths)
        return self.norm(x)


class LstmEncoder(Encoder):
    """Layers of LSTM cells in both directions, each an unpacked `torch.nn.LSTM`, which has a fast CPU kernel."""

    def __init__(self, settings: EncoderSettings, symbols: int) -> None:
        super().__init__(settings, symbols, 2 * settings.lstm_cells)
        cells = settings.lstm_cells
        widths = [BANDS * settings.stack, *(2 * cells for _ in range(settings.lstm_layers - 1))]
        pair = (nn.ModuleList(nn.LSTM(width, cells, batch_first=True) for width in widths) for _ in range(2))
        self.ahead, self.back = pair
        self.dropout = nn.Dropout(settings.dropout)

    def encode(self, x: Tensor, lengths: Tensor) -> Tensor:
        for number, (ahead, back) in enumerate(zip(self.ahead, self.back, strict=True)):
            x = self.dropout(x) if number else x
            x = torch.cat([ahead(x)[0], _turn(back(_turn(x, lengths))[0], lengths)], dim=-1)
        return x


def _turn(x: Tensor, lengths: Tensor) -> Tensor:
    """Reverse the first `lengths` [B] positions of x [B, P, width]. The padding stays where it is."""
    places = torch.arange(x.shape[1], device=x.device)
    sources = torch.where(places < lengths[:, None], lengths[:, None] - 1 - places, places)
    return x.gather(1, sources.unsqueeze(-1).expand_as(x))


def build_encoder(attention: str, options: Mapping[str, Any], settings: EncoderSettings, symbols: int) -> Encoder:
    """Build the encoder of `attention`: a mechanism, or `bi-lstm`."""
    if attention == BI_LSTM:
        return LstmEncoder(settings, symbols)
    return AttentionEncoder(attention, options, settings, symbols)


def ctc_loss(log_probabilities: Tensor, positions: Tensor, symbols: Tensor, counts: Tensor) -> Tensor:
    """Return the CTC loss (Graves 2006): nats per true symbol of each utterance, averaged over the batch."""
    logs = log_probabilities.transpose(0, 1)
    return functional.ctc_loss(logs, symbols, positions, counts, blank=BLANK, reduction="mean")
