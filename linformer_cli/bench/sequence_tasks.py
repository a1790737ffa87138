"""The sequences that `bench copy` and `bench recall` learn, the sizes of these tasks, and the models.

In the copy task of Katharopoulos 2020, section 4.1, a sequence is w 0 w 0 0 ...: a string w of random symbols, the
separator 0, the string again, then separators. In multi-query associative recall (Arora 2023, arXiv 2312.04927), it
begins with pairs k v k v ... of different keys and values. Later, every key appears once more, followed by its value,
which a model must recall, so its state must hold all pairs.
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

SYMBOLS, SEPARATOR, BATCH = 10, 0, 64
LEARNING_RATE, LOWER_LEARNING_RATE, LOWER_AFTER_UPDATES = 1e-3, 1e-4, 3_000
# The paper states the length; width and number of updates are those of the authors' released code.
PAPER_LENGTH, PAPER_WIDTH, PAPER_UPDATES = 128, 256, 10_000
REDUCED_LENGTH, REDUCED_WIDTH = 32, 128
# If the budget is shorter, the task is reduced.
FULL_SIZE_BUDGET_SECONDS = 3_600.0
SHORTEST_LENGTH = 8
# Of recall: the first half of the symbols, without the separator, are keys. The second half are values.
RECALL_SYMBOLS = 128
MOST_PAIRS = RECALL_SYMBOLS // 2 - 1
# Queries are close: the n-th place has a probability of n ** (POWER - 1), as in the authors' released code.
POWER = 0.01


@dataclass(frozen=True)
class CopySettings:
    """The settings that a user may choose, and fixed ones. Curves have a point every `points_every` updates."""

    symbols: ClassVar[int] = SYMBOLS + 1
    layers: ClassVar[int] = 4
    heads: ClassVar[int] = 8
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

    def learning_rate_at(self, update: int) -> float:
        return LEARNING_RATE if update < LOWER_AFTER_UPDATES else LOWER_LEARNING_RATE

    def draw(self, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw strings of random lengths. `draw_batch` explains the result."""
        length = self.length
        counts = torch.randint(length // 4, (length - 1) // 2, (batch, 1), generator=generator)
        symbols = torch.randint(1, SYMBOLS + 1, (batch, length), generator=generator)
        places = torch.arange(length)
        copied = (places > counts) & (places <= 2 * counts)
        sources = torch.where(copied, places - counts - 1, places)
        sequences = symbols.gather(1, sources.expand(batch, length))
        sequences[(places == counts) | (places > 2 * counts)] = SEPARATOR
        return sequences, copied


@dataclass(frozen=True)
class RecallSettings(CopySettings):
    """Sequences with `pairs` keys and values. The learning rate falls linearly from `learning_rate` to 0.

    The authors' code differs: 8,192 symbols, one head, no feed-forward layers, and a fixed training set. In its later
    experiments, as here, a short convolution lets a mechanism see pairs of neighbours.
    """

    symbols: ClassVar[int] = RECALL_SYMBOLS
    layers: ClassVar[int] = 2
    heads: ClassVar[int] = 2
    short_convolution: ClassVar[int] = 4

    pairs: int = 8
    learning_rate: float = 1e-2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pairs > (most := min(MOST_PAIRS, self.length // 4)):
            raise UsageError(f"sequences of length {self.length} hold at most {most} pairs, found {self.pairs}")

    @property
    def title(self) -> str:
        return f"recall of {self.pairs} pairs, length {self.length}, width {self.width}"

    @property
    def reduced(self) -> bool:
        return False

    def learning_rate_at(self, update: int) -> float:
        return self.learning_rate * (1 - update / self.updates)

    def draw(self, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        pairs, half = self.pairs, self.symbols // 2
        keys, values = (torch.rand(batch, n, generator=generator).argsort(1)[:, :pairs] for n in (half - 1, half))
        named = torch.stack([keys + 1, values + half], dim=2).flatten(1)
        places = torch.arange(1, (self.length - 2 * pairs) // 2 + 1)
        weights = (places.double() ** (POWER - 1)).expand(batch, -1)
        asked = 2 * pairs + 2 * torch.multinomial(weights, pairs, generator=generator)
        sequences = torch.full((batch, self.length), SEPARATOR)
        sequences[:, : 2 * pairs] = named
        sequences.scatter_(1, torch.stack([asked, asked + 1], dim=2).flatten(1), named)
        return sequences, torch.zeros(batch, self.length, dtype=torch.bool).scatter_(1, asked + 1, True)


def choose_size(budget_seconds: float | None, length: int | None, width: int | None) -> tuple[int, int]:
    """Length and width, by default the paper's, or smaller ones if the budget is below an hour."""
    small = budget_seconds is not None and budget_seconds < FULL_SIZE_BUDGET_SECONDS
    default_length, default_width = (REDUCED_LENGTH, REDUCED_WIDTH) if small else (PAPER_LENGTH, PAPER_WIDTH)
    return length or default_length, width or default_width


@functools.lru_cache(maxsize=1)  # all models learn from the same batch in turn
def draw_batch(settings: CopySettings, number: int, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """Draw sequences int64 [B, length], and the mask bool [B, length] of the symbols to be predicted."""
    generator = torch.Generator().manual_seed((settings.seed * 1_000_003 + number) % 2**63)
    sequences, predicted = settings.draw(batch, generator)
    return sequences.to(settings.device), predicted.to(settings.device)


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
        return draw_batch(self._settings, number, len(rows))

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
