"""Tests of differences and predictions, against plain Python."""

import pytest
import torch
from loops import loop_over
from torch import Tensor

from linformer_cli.model.neighbours import Differences
from linformer_cli.native.constants import DIFFERENCE_SCALE

# Two earlier channels of the pixel, then three pixels of three channels. The last two are those to the left and above.
THREE = Differences(levels=16, channels=3, own=2, left=1, up=2)


def draw_slots(levels: int, slots: int, share_missing: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(levels, (50, slots), generator=generator)
    return values.masked_fill(torch.rand(50, slots, generator=generator) < share_missing, levels)


def find_reference(found: Differences, row: list[int], channel: int) -> float:
    known = [
        row[found.own + pixel * found.channels + channel]
        for pixel in (found.left, found.up)
        if row[found.own + pixel * found.channels + channel] != found.levels
    ]
    return sum(known) / len(known) if known else (found.levels - 1) / 2


@loop_over("share_missing", [0.0, 0.5])
@loop_over("found", [THREE, THREE._replace(levels=256), Differences(2, 1, 0, 0, 1)])
def test_numbers_are_differences_then_references(found: Differences, share_missing: float) -> None:
    values = draw_slots(found.levels, found.own + 3 * found.channels, share_missing)
    for row, numbers in zip(values.tolist(), found.numbers(values, torch.float64).tolist(), strict=True):
        references = [find_reference(found, row, channel) for channel in range(found.channels)]
        expected = []
        for slot, value in enumerate(row):
            channel = slot if slot < found.own else (slot - found.own) % found.channels
            difference = 0 if value == found.levels else value - references[channel]
            expected.append(DIFFERENCE_SCALE * 2 * difference / (found.levels - 1))
        expected += [2 * reference / (found.levels - 1) - 1 for reference in references]
        assert numbers == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("share_missing", [0.0, 0.5])
def test_a_prediction_continues_the_difference_of_the_channel_before(share_missing: float) -> None:
    values = draw_slots(16, 11, share_missing)
    channels = torch.arange(len(values)) % 3
    found = THREE.predict(values, channels, torch.float64).tolist()
    for row, channel, prediction in zip(values.tolist(), channels.tolist(), found, strict=True):
        expected = find_reference(THREE, row, channel)
        if channel and row[channel - 1] != 16:
            expected += row[channel - 1] - find_reference(THREE, row, channel - 1)
        assert prediction == pytest.approx(2 * expected / 15 - 1, abs=1e-12)
