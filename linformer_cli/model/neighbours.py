"""How a model reads the values around a position: as differences from neighbours, by a network, or by tables."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.config import ImageShape
from linformer_cli.native.constants import (
    DIFFERENCE_SCALE,
    HASH_BASE,
    HASH_LAST_SHIFT,
    HASH_MASK,
    HASH_MULTIPLIER,
    HASH_SHIFT,
    LEFT_PLACE,
    PAIR_BASE,
    ROW_WIDTH,
    TABLE_ROWS,
    UP_PLACE,
)

# How many rows above the position and how many columns to either side are read.
ROWS_ABOVE, SIDE = 3, 4
# The (rows up, columns to the left) of the left, above, above left and above right pixels.
TABLE_PIXELS = ((0, 1), (1, 0), (1, 1), (1, -1))
ROWS_OF_A_CHANNEL = sum(TABLE_ROWS)


class Differences(NamedTuple):
    """Values as differences from neighbours, as in lossless image coders (LOCO-I, Weinberger 2000).

    Neighbouring values of a photograph are close, so a network that reads and predicts differences has small inputs,
    outputs and noise. The slots are first `own` earlier channels of the pixel, then whole pixels with a slot for each
    of `channels`, of which `left` and `up` have these numbers. The reference of a channel is the mean of its left and
    its upper value, the only one of them, or the middle of the levels.
    """

    levels: int
    channels: int
    own: int
    left: int
    up: int

    def arguments(self, values: int) -> dict[str, int]:
        places = {"own": self.own, "left": self.left, "up": self.up}
        return {"values": values, "levels": self.levels, "channels": self.channels, **places}

    def numbers(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Return numbers [..., slots + channels] for values int64 [..., slots]; `levels` stands for a missing value.

        They are differences from references (0 if missing), and then the references, scaled to [-1, 1].
        """
        references = self._double_references(values)
        pixels = (values.shape[-1] - self.own) // self.channels
        repeated = [references[..., : self.own], *[references] * pixels]
        differences = (2 * values - torch.cat(repeated, dim=-1)).to(dtype) * (DIFFERENCE_SCALE / (self.levels - 1))
        return torch.cat([differences.masked_fill(values == self.levels, 0), self._scale(references, dtype)], dim=-1)

    def predict(self, values: Tensor, channels: Tensor, dtype: torch.dtype) -> Tensor:
        """Predict, [..., n] in [-1, 1], channels int64 [n]: reference plus difference of the channel before."""
        references = self._double_references(values)
        own, references_of_own = values[..., : self.own], references[..., : self.own]
        earlier = (2 * own - references_of_own).masked_fill(own == self.levels, 0)
        predictions = references + torch.cat([torch.zeros_like(earlier[..., :1]), earlier], dim=-1)
        return self._scale(predictions.gather(-1, channels.expand(values.shape[:-1]).unsqueeze(-1)).squeeze(-1), dtype)

    def _scale(self, doubled: Tensor, dtype: torch.dtype) -> Tensor:
        return doubled.to(dtype) / (self.levels - 1) - 1

    def _double_references(self, values: Tensor) -> Tensor:
        """Twice the references, int64 [..., channels]."""
        pixels = values[..., self.own :].unflatten(-1, (-1, self.channels))
        left, up = pixels[..., self.left, :], pixels[..., self.up, :]
        sums = torch.where(left == self.levels, up, left) + torch.where(up == self.levels, left, up)
        return torch.where(sums == 2 * self.levels, self.levels - 1, sums)


def list_surroundings() -> list[tuple[int, int]]:
    """List the offset (rows up, columns to the left) of each pixel that is read: above, or left in the same row."""
    left = [(0, left) for left in range(1, SIDE + 1)]  # (0, 1) is at LEFT_PLACE, and (1, 0) at UP_PLACE
    return left + [(up, left) for up in range(1, ROWS_ABOVE + 1) for left in range(SIDE, -SIDE - 1, -1)]


def scale_values(values: Tensor, levels: int, dtype: torch.dtype) -> Tensor:
    """Return two numbers [..., 2 slots] for each of values int64 [..., slots]; `levels` stands for a missing value.

    They are the values scaled to [-1, 1] (missing: 0), and whether they are above 0, the usual background (1/2).
    """
    missing = values == levels
    numbers = (values.to(dtype) * (2 / (levels - 1)) - 1).masked_fill(missing, 0)
    return torch.cat([numbers, (values > 0).to(dtype).masked_fill(missing, 0.5)], dim=-1)


def scale_colours(image: ImageShape) -> Tensor:
    """Return the numbers [levels + 1, 4] of the colours of a palette: red, green, blue and opacity, scaled to [-1, 1].

    A transparent colour counts as black, as far as it is transparent. The last row, for a missing value, is 0.
    """
    colours = torch.tensor(image.colours, dtype=torch.float32) / 255
    colours[:, :3] *= colours[:, 3:]
    return functional.pad(2 * colours - 1, (0, 0, 0, 1))


class Surroundings(nn.Module):
    """A small network whose numeric inputs are the known values in a wide window around a position.

    It maps values int64 [..., slots] to vectors [..., width]; `levels` stands for a missing value. Two layers read the
    numbers of all values together (see `scale_values`), so unlike a sum of embeddings they can recognise the edge of a
    stroke by its shape. With a palette, they read colours instead (see `scale_colours`), each with flags for whether it
    is that of the left and of the upper pixel, and with `differences` those of all values.
    """

    colours: Tensor | None

    def __init__(self, slots: int, width: int, image: ImageShape, differences: Differences | None = None) -> None:
        super().__init__()
        self.levels, self.differences = image.levels, differences
        colours = scale_colours(image) if image.palette else None
        self.register_buffer("colours", colours, persistent=False)
        numbers = slots * (2 if colours is None else colours.shape[1] + 2)
        self.input = nn.Linear(numbers if differences is None else slots + differences.channels, 2 * width)
        self.output = nn.Linear(2 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        dtype = self.input.weight.dtype
        if self.differences is not None:
            numbers = self.differences.numbers(values, dtype)
        elif self.colours is not None:
            same = [(values == values[..., place, None]).to(dtype).unsqueeze(-1) for place in (LEFT_PLACE, UP_PLACE)]
            numbers = torch.cat([functional.embedding(values, self.colours), *same], dim=-1).flatten(-2)
        else:
            numbers = scale_values(values, self.levels, dtype)
        return self.output(functional.gelu(self.input(numbers)))


class NeighbourTables(nn.Module):
    """Learned vectors for combinations of neighbouring values, which sums over single values cannot distinguish.

    It maps values int64 [..., 4] of `TABLE_PIXELS` to vectors [..., width]; `levels` stands for a missing value. In
    each channel, there is a table for the first two values, one for three, and one for all four. A combination selects
    a row, initially 0, and a linear layer reads the three rows. Each pair has its own row, except that a missing value
    counts as 255. Longer ones are hashed and may share rows (hash embeddings, Svenstrup 2017, arXiv 1709.03933).
    """

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(channels * ROWS_OF_A_CHANNEL, ROW_WIDTH))
        self.output = nn.Linear(len(TABLE_ROWS) * ROW_WIDTH, width)

    def forward(self, values: Tensor, channels: Tensor) -> Tensor:
        """Return vectors [..., width] of `values`; `channels` int64 [...], the values' channels, are broadcast."""
        return self.output(functional.embedding(find_rows(values, channels), self.rows).flatten(-2))


def find_rows(values: Tensor, channels: Tensor) -> Tensor:
    """Find the rows selected by values int64 [..., 4] of channels [...], one per table: int64 [..., 3]."""
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
