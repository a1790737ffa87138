"""The copy task of Katharopoulos 2020, section 4.1: its sizes, its sequences and its models.

A sequence is w 0 w 0 0 ...: a string w of random symbols, the separator 0, the string again, then separators.
"""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.config import ImageShape, ModelConfig, TrainConfig
from linformer_cli.errors import UsageError
from linformer_cli.model.blocks import Block, initialise_weights
from linformer_cli.model.dropout import Vectors, exact
from linformer_cli.model.mixers import Variant, build_blocks, has_attention_layer
from linformer_cli.system.device import seeded
from linformer_cli.training.task import Task

SYMBOLS, SEPARATOR = 10, 0
LAYERS, HEADS, BATCH = 4, 8, 64
LEARNING_RATE, LOWER_LEARNING_RATE, LOWER_AFTER_UPDATES = 1e-3, 1e-4, 3_000
# The paper states the length; width and number of updates are those of the authors' released code.
PAPER_LENGTH, PAPER_WIDTH, PAPER_UPDATES = 128, 256, 10_000
REDUCED_LENGTH, REDUCED_WIDTH = 32, 128
# If the budget is shorter, the task is reduced.
FULL_SIZE_BUDGET_SECONDS = 3_600.0
SHORTEST_LENGTH = 8


@dataclass(frozen=True)
class CopySettings:
    """The settings that a user may choose, and fixed ones. Curves have a point every `points_every` updates."""

    symbols: ClassVar[int] = SYMBOLS + 1
    layers: ClassVar[int] = LAYERS
    heads: ClassVar[int] = HEADS
    # The width of a convolution of queries, keys and values, for mechanisms whose blocks have an attention layer.
    short_convolution: ClassVar[int] = 0

    length: int
    width: int
    updates: int = PAPER_UPDATES
    points_every: int = 25
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.length < SHORTEST_LENGTH:
            raise UsageError(f"the copy task needs sequences of length at least {SHORTEST_LENGTH}, found {self.length}")
        if self.width % self.heads or self.width < 2 * self.heads:
            wanted = f"a multiple of {self.heads}, at least {2 * self.heads}"
            raise UsageError(f"the width of the models must be {wanted}, found {self.width}")

    @property
    def title(self) -> str:
        """Describe the size of the task, and the paper's size if that is larger."""
        size = f"copy task, length {self.length}, width {self.width}"
        paper = f"length {PAPER_LENGTH}, width {PAPER_WIDTH}"
        return f"{size} (reduced from {paper})" if self.reduced else size

    @property
    def reduced(self) -> bool:
        return self.length < PAPER_LENGTH or self.width < PAPER_WIDTH

    def draw(self, number: int, batch: int = BATCH) -> tuple[Tensor, Tensor]:
        """Draw sequences int64 [B, length], and the mask bool [B, length] of the symbols to be predicted."""
        return draw_batch(self.length, self.seed, number, batch, self.device)

    def learning_rate_at(self, update: int) -> float:
        return LEARNING_RATE if update < LOWER_AFTER_UPDATES else LOWER_LEARNING_RATE


def choose_size(budget_seconds: float | None, length: int | None, width: int | None) -> tuple[int, int]:
    """Length and width, by default the paper's, or smaller ones if the budget is below an hour."""
    small = budget_seconds is not None and budget_seconds < FULL_SIZE_BUDGET_SECONDS
    default_length, default_width = (REDUCED_LENGTH, REDUCED_WIDTH) if small else (PAPER_LENGTH, PAPER_WIDTH)
    return length or default_length, width or default_width


@functools.lru_cache(maxsize=1)  # all models learn from the same batch in turn
def draw_batch(length: int, seed: int, number: int, batch: int = BATCH, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Sequences int64 [B, length] with strings of random lengths, and the mask bool [B, length] of copied symbols."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)
    counts = torch.randint(length // 4, (length - 1) // 2, (batch, 1), generator=generator)
    symbols = torch.randint(1, SYMBOLS + 1, (batch, length), generator=generator)
    places = torch.arange(length)
    copied = (places > counts) & (places <= 2 * counts)
    sources = torch.where(copied, places - counts - 1, places)
    sequences = symbols.gather(1, sources.expand(batch, length))
    sequences[(places == counts) | (places > 2 * counts)] = SEPARATOR
    return sequences.to(device), copied.to(device)


class CopyModel(nn.Module):
    """Embeddings of symbol and position, the blocks of a pixel model, a norm, and a linear layer for the logits."""

    def __init__(self, variant: Variant, settings: CopySettings) -> None:
        super().__init__()
        row = max(1, round(settings.length**0.5))
        config = ModelConfig(
            attention=variant.attention,
            attention_options=variant.options,
            layers=settings.layers,
            heads=settings.heads,
            width=settings.width,
            head_width=settings.width // settings.heads,
            feed_forward=4 * settings.width,
            short_convolution=settings.short_convolution if has_attention_layer(variant.attention) else 0,
            image=ImageShape(height=math.ceil(settings.length / row), width=row),
        )
        self.symbols = nn.Embedding(settings.symbols, settings.width)
        self.positions = nn.Embedding(settings.length, settings.width)
        for table in (self.symbols, self.positions):
            nn.init.normal_(table.weight, std=0.5)
        blocks = build_blocks(config)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, settings.symbols)
        initialise_weights(self, blocks)
        self.head.weight.data.mul_(0.1)
        self.state_bytes = sum(block.state_bytes(1, settings.length, torch.float32) for block in blocks)

    def forward(self, sequences: Tensor) -> Tensor:
        """Return the logits [B, T, symbols] of the next symbol, for sequences int64 [B, T]."""
        x: Vectors = self.symbols(sequences) + self.positions.weight[: sequences.shape[1]]
        for block in self.blocks:
            assert isinstance(block, Block)
            x, _ = block.attend(x, None)
        logits: Tensor = self.head(self.norm(exact(x)))
        return logits


class CopyTask(Task[CopyModel, tuple[Tensor, Tensor]]):
    """Trains a model to copy, or to recall. `accuracy` is the share of correct predictions in the newest batch."""

    def __init__(self, variant: Variant, settings: CopySettings) -> None:
        with seeded(settings.seed):
            model = CopyModel(variant, settings).to(settings.device)
        training = TrainConfig(steps=settings.updates, batch=BATCH, clip=0, seed=settings.seed)
        super().__init__(model, torch.optim.RAdam(model.parameters()), training, settings.device)
        self._settings, self.accuracy = settings, torch.zeros(())

    def load_batch(self, number: int, rows: range) -> tuple[Tensor, Tensor]:
        return self._settings.draw(number, len(rows))

    def measure_loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mean loss in nats per predicted symbol, twice."""
        sequences, copied = batch
        targets = copied[:, 1:]
        logits = self.model(sequences)[:, :-1][targets]
        wanted = sequences[:, 1:][targets]
        loss = functional.cross_entropy(logits, wanted)
        self.accuracy = (logits.argmax(dim=-1) == wanted).float().mean()
        return loss, loss

    def learning_rate_at(self, step: int, share: float) -> float:
        return self._settings.learning_rate_at(step)
