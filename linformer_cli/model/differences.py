"""Values of an image as differences from neighbours, as in lossless image coders (LOCO-I, Weinberger 2000).

Neighbouring values of a photograph are close. A network that reads and predicts differences has small inputs and
outputs, and its noise, from rounding and from training, shrinks with them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from linformer_cli.native.constants import DIFFERENCE_SCALE


class Differences(NamedTuple):
    """The slots that differences are computed from: first `own` earlier channels of the pixel, then whole pixels.

    A pixel has one slot for each of `channels`. `left` and `up` are the numbers of the pixels to the left and above.
    The reference of a channel is the mean of its left and its upper value. If one of them is missing, it is the other;
    if both are, it is the middle of the levels.
    """

    levels: int
    channels: int
    own: int
    left: int
    up: int

    def arguments(self, values: int) -> dict[str, int]:
        """The integers of the native operations that read `values` values."""
        places = {"own": self.own, "left": self.left, "up": self.up}
        return {"values": values, "levels": self.levels, "channels": self.channels, **places}

    def numbers(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Numbers [..., slots + channels] for values int64 [..., slots]; `levels` stands for a missing value.

        They are the differences of all values from the references of their channels, with 0 for missing values, and
        then the references, scaled to [-1, 1].
        """
        references = self._double_references(values)
        pixels = (values.shape[-1] - self.own) // self.channels
        repeated = [references[..., : self.own], *[references] * pixels]
        differences = (2 * values - torch.cat(repeated, dim=-1)).to(dtype) * (DIFFERENCE_SCALE / (self.levels - 1))
        return torch.cat([differences.masked_fill(values == self.levels, 0), self._scale(references, dtype)], dim=-1)

    def predict(self, values: Tensor, channels: Tensor, dtype: torch.dtype) -> Tensor:
        """Predictions [..., n], on a scale from -1 to 1, of channels int64 [n] of pixels with values [..., n, slots].

        A channel's prediction is its reference plus the difference of the channel before, if there is one.
        """
        references = self._double_references(values)
        earlier = (2 * values[..., : self.own] - references[..., : self.own]).masked_fill(
            values[..., : self.own] == self.levels, 0
        )
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
