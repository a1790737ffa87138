"""Learned vectors for combinations of neighbouring values, which sums over single values cannot distinguish."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.native.constants import (
    HASH_BASE,
    HASH_LAST_SHIFT,
    HASH_MASK,
    HASH_MULTIPLIER,
    HASH_SHIFT,
    PAIR_BASE,
    ROW_WIDTH,
    TABLE_ROWS,
)

# The (rows up, columns to the left) of the left, above, above left and above right pixels.
TABLE_PIXELS = ((0, 1), (1, 0), (1, 1), (1, -1))
ROWS_OF_A_CHANNEL = sum(TABLE_ROWS)


class NeighbourTables(nn.Module):
    """Maps values int64 [..., 4] of `TABLE_PIXELS` to vectors [..., width]; `levels` stands for a missing value.

    There is one table for the first two values, one for the first three, and one for all four. Each combination of
    values selects a row of its table, and a linear layer reads the three rows concatenated. Rows are initialised to 0.
    Each pair of values has its own row, except that a missing value counts as 255. Triples and quadruples are hashed,
    so some of them share a row, as in hash embeddings (Svenstrup 2017, arXiv 1709.03933). Each channel has its own
    tables.
    """

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(channels * ROWS_OF_A_CHANNEL, ROW_WIDTH))
        self.output = nn.Linear(len(TABLE_ROWS) * ROW_WIDTH, width)

    def forward(self, values: Tensor, channels: Tensor) -> Tensor:
        """The vectors [..., width] for `values`; `channels` int64 [...], the channels of the values, are broadcast."""
        y: Tensor = self.output(functional.embedding(find_rows(values, channels), self.rows).flatten(-2))
        return y


def find_rows(values: Tensor, channels: Tensor) -> Tensor:
    """The rows selected by values int64 [..., 4] of channels [...], one per table: int64 [..., 3]."""
    first, second = values[..., :2].clamp(max=PAIR_BASE - 1).unbind(dim=-1)
    keys = [first * PAIR_BASE + second]
    key = torch.zeros_like(first)
    for index, value in enumerate(values.unbind(dim=-1)):
        # An int64 product keeps only its lower 64 bits.
        key = (key * HASH_BASE + value + 1) * HASH_MULTIPLIER & HASH_MASK
        key = key ^ (key >> HASH_SHIFT)
        if index >= 2:
            keys.append((key ^ (key >> HASH_LAST_SHIFT)) & (TABLE_ROWS[index - 1] - 1))
    tables = channels * ROWS_OF_A_CHANNEL
    starts = (tables, tables + TABLE_ROWS[0], tables + TABLE_ROWS[0] + TABLE_ROWS[1])
    return torch.stack([start + key for start, key in zip(starts, keys, strict=True)], dim=-1)
