"""Multi-query associative recall (Arora 2023, arXiv 2312.04927): a sequence names values by keys, and asks for each.

It begins with pairs k v k v ... of different keys and values. Later, every key appears once more, followed by its
value, which a model must recall, so its state must hold all pairs.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from linformer_cli.errors import UsageError
from .copy_task import BATCH, SEPARATOR, CopySettings

# The first half of the symbols, without the separator, are keys. The second half are values.
RECALL_SYMBOLS = 128
# Queries are close: the n-th place has a probability of n ** (POWER - 1), as in the authors' released code.
POWER = 0.01
MOST_PAIRS = RECALL_SYMBOLS // 2 - 1


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
        if self.pairs > MOST_PAIRS or 4 * self.pairs > self.length:
            most = min(MOST_PAIRS, self.length // 4)
            raise UsageError(f"sequences of length {self.length} hold at most {most} pairs, found {self.pairs}")

    @property
    def title(self) -> str:
        return f"recall of {self.pairs} pairs, length {self.length}, width {self.width}"

    @property
    def reduced(self) -> bool:
        return False

    def draw(self, number: int, batch: int = BATCH) -> tuple[Tensor, Tensor]:
        return draw_recall(self, number, batch)

    def learning_rate_at(self, update: int) -> float:
        return self.learning_rate * (1 - update / self.updates)


@functools.lru_cache(maxsize=1)  # all models learn from the same batch in turn
def draw_recall(settings: RecallSettings, number: int, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """Draw sequences int64 [B, length] and the mask bool [B, length] of the values to be recalled."""
    pairs, half = settings.pairs, settings.symbols // 2
    generator = torch.Generator().manual_seed((settings.seed * 1_000_003 + number) % 2**63)
    keys, values = (torch.rand(batch, n, generator=generator).argsort(1)[:, :pairs] for n in (half - 1, half))
    named = torch.stack([keys + 1, values + half], dim=2).flatten(1)
    places = torch.arange(1, (settings.length - 2 * pairs) // 2 + 1)
    weights = (places.double() ** (POWER - 1)).expand(batch, -1)
    asked = 2 * pairs + 2 * torch.multinomial(weights, pairs, generator=generator)
    sequences = torch.full((batch, settings.length), SEPARATOR)
    sequences[:, : 2 * pairs] = named
    sequences.scatter_(1, torch.stack([asked, asked + 1], dim=2).flatten(1), named)
    recalled = torch.zeros(batch, settings.length, dtype=torch.bool).scatter_(1, asked + 1, True)
    return sequences.to(settings.device), recalled.to(settings.device)
