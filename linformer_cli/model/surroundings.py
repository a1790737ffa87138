"""A small network whose numeric inputs are the known values in a wide window around a position."""

import torch
from torch import Tensor, nn
from torch.nn import functional

# How many rows above the position and how many columns to either side are read.
ROWS_ABOVE, SIDE = 3, 4


def list_surroundings() -> list[tuple[int, int]]:
    """The offset (rows up, columns to the left) of each pixel that is read: above, or to the left in the same row."""
    left = [(0, left) for left in range(1, SIDE + 1)]
    return left + [(up, left) for up in range(1, ROWS_ABOVE + 1) for left in range(SIDE, -SIDE - 1, -1)]


class Surroundings(nn.Module):
    """Maps values int64 [..., slots] to vectors [..., width]; `levels` stands for a missing value.

    Each value becomes two numbers: the value scaled to [-1, 1], and 1 if the value is above 0 (the usual background),
    else 0. A missing value becomes 0 and 1/2. Two layers with a gelu between them read all numbers together. Unlike a
    sum of embeddings, each looked up from one value, these layers can recognise the edge of a stroke by its shape.
    """

    def __init__(self, slots: int, width: int, levels: int) -> None:
        super().__init__()
        self.levels = levels
        self.input = nn.Linear(2 * slots, 2 * width)
        self.output = nn.Linear(2 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        missing = values == self.levels
        numbers = (values.to(self.input.weight.dtype) * (2 / (self.levels - 1)) - 1).masked_fill(missing, 0)
        above = (values > 0).to(numbers.dtype).masked_fill(missing, 0.5)
        y: Tensor = self.output(functional.gelu(self.input(torch.cat([numbers, above], dim=-1))))
        return y
