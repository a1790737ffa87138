"""The layout of the weights of matrix products in the engine."""

import torch
from torch import Tensor
from torch.nn import functional

from .constants import LANES, TILE_ROWS


def pack(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return weights [rows, columns] in the layout of `project`: [rows / 16, words per row, 16] words of 32 bits.

    A word is one float, two bfloat16 numbers or four 8-bit integers. Zeros fill incomplete words and tiles. A row of
    integers has two more words: its scale as a float, and the sum of its integers.
    """
    missing_columns, missing_rows = -weight.shape[1] % (4 // dtype.itemsize), -len(weight) % TILE_ROWS
    weight = functional.pad(weight, (0, missing_columns, 0, missing_rows))
    if dtype != torch.int8:
        return _arrange(weight.to(dtype))
    integers, scales = quantise(weight)
    sums = integers.sum(dim=1, dtype=torch.int32)
    tail = torch.stack((scales.view(torch.int32), sums), dim=1)
    return torch.cat((_arrange(integers), _arrange(tail)), dim=1)


def count_words(weight: Tensor, dtype: torch.dtype) -> int:
    """The number of words that `pack` returns."""
    rows, columns = weight.shape
    numbers = 4 // dtype.itemsize
    return (rows + -rows % TILE_ROWS) * (-(-columns // numbers) + (2 if dtype == torch.int8 else 0))


def _arrange(rows: Tensor) -> Tensor:
    """Return rows that consist of whole words as int32 [rows / 16, words, 16]."""
    panels: Tensor = rows.contiguous().view(torch.int32).unflatten(0, (-1, LANES))
    return panels.transpose(1, 2).contiguous()


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers int8 [rows, columns] from -127 to 127, and the factor float32 [rows] of each row.

    The factor is NaN for a row that contains NaN or infinity.
    """
    weight = weight.float()
    scales = weight.abs().amax(dim=1) / 127
    scales = scales.where(scales.isfinite(), torch.nan)
    return (weight / scales.unsqueeze(1)).round().clamp(-127, 127).nan_to_num(0).to(torch.int8), scales
