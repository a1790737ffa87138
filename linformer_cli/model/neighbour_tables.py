"""Learned vectors for the values of several neighbours together, which a sum over single values cannot tell apart."""

import torch
from torch import Tensor, nn
from torch.nn import functional

# (rows up, columns to the left): left, above, above left, above right.
TABLE_PIXELS = ((0, 1), (1, 0), (1, 1), (1, -1))
# Rows of the table for the first two of them, of that for the first three, and of that for all four.
_ROWS = (2**16, 2**15, 2**14)
ROWS_OF_A_CHANNEL = sum(_ROWS)
# Numbers of a row.
WIDTH = 8
# What scatters keys: the golden ratio's fraction in 64 bits, as in Fibonacci hashing (Knuth, TAOCP 3, section 6.4), but
# for its highest, which is the sign of an int64; and the bits of the product that are kept.
_SCATTER, _KEPT = 0x1E3779B97F4A7C15, 2**61 - 1


class NeighbourTables(nn.Module):
    """Values int64 [..., 4] of `TABLE_PIXELS`, `levels` where there is none, to vectors [..., width].

    The values of two neighbours, of three and of four each pick a row of a table, and a linear layer reads the three
    rows, zeros at the start, side by side. Two values have a row of their own, but that none is taken for 255; of three
    and four some share one, as in hash embeddings (Svenstrup 2017, arXiv 1709.03933): few of all that there could be
    ever occur. Each channel has tables of its own.
    """

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(channels * ROWS_OF_A_CHANNEL, WIDTH))
        self.output = nn.Linear(len(_ROWS) * WIDTH, width)

    def forward(self, values: Tensor, channels: Tensor) -> Tensor:
        """`channels` int64 [...] says to which one the values belong; it is broadcast."""
        y: Tensor = self.output(functional.embedding(find_rows(values, channels), self.rows).flatten(-2))
        return y


def find_rows(values: Tensor, channels: Tensor) -> Tensor:
    """The rows that values int64 [..., 4] of channels [...] pick, one of each table: int64 [..., 3]."""
    first, second = values[..., 0].clamp(max=255), values[..., 1].clamp(max=255)
    keys = [first * 256 + second]
    key = torch.zeros_like(first)
    for index, value in enumerate(values.unbind(dim=-1)):
        # Whatever is beyond 64 bits is lost.
        key = (key * 257 + value + 1) * _SCATTER & _KEPT
        key = key ^ (key >> 31)
        if index >= 2:
            keys.append((key ^ (key >> 17)) & (_ROWS[index - 1] - 1))
    tables = channels * ROWS_OF_A_CHANNEL
    starts = (tables, tables + _ROWS[0], tables + _ROWS[0] + _ROWS[1])
    return torch.stack([start + key for start, key in zip(starts, keys, strict=True)], dim=-1)
