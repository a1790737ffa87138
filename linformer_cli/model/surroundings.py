"""A small network whose numeric inputs are the known values in a wide window around a position."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from .differences import Differences

# How many rows above the position and how many columns to either side are read.
ROWS_ABOVE, SIDE = 3, 4


def list_surroundings() -> list[tuple[int, int]]:
    """The offset (rows up, columns to the left) of each pixel that is read: above, or to the left in the same row."""
    left = [(0, left) for left in range(1, SIDE + 1)]
    return left + [(up, left) for up in range(1, ROWS_ABOVE + 1) for left in range(SIDE, -SIDE - 1, -1)]


def scale_values(values: Tensor, levels: int, dtype: torch.dtype) -> Tensor:
    """Two numbers [..., 2 slots] for each of values int64 [..., slots]; `levels` stands for a missing value.

    They are the values scaled to [-1, 1], followed by flags that are 1 if the value is above 0 (the usual background),
    else 0. A missing value becomes 0 and 1/2.
    """
    missing = values == levels
    numbers = (values.to(dtype) * (2 / (levels - 1)) - 1).masked_fill(missing, 0)
    above = (values > 0).to(dtype).masked_fill(missing, 0.5)
    return torch.cat([numbers, above], dim=-1)


class Surroundings(nn.Module):
    """Maps values int64 [..., slots] to vectors [..., width]; `levels` stands for a missing value.

    Two layers with a gelu between them read the numbers of all values together (see `scale_values`). Unlike a sum of
    embeddings, each looked up from one value, these layers can recognise the edge of a stroke by its shape. With
    `differences`, they read the differences of all values instead.
    """

    def __init__(self, slots: int, width: int, levels: int, differences: Differences | None = None) -> None:
        super().__init__()
        self.levels, self.differences = levels, differences
        self.input = nn.Linear(2 * slots if differences is None else slots + differences.channels, 2 * width)
        self.output = nn.Linear(2 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        dtype = self.input.weight.dtype
        if self.differences is None:
            numbers = scale_values(values, self.levels, dtype)
        else:
            numbers = self.differences.numbers(values, dtype)
        y: Tensor = self.output(functional.gelu(self.input(numbers)))
        return y
