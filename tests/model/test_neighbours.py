"""Compares differences, predictions and the rows of tables with plain Python, and tests the resulting vectors."""

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
from loops import loop_over
from torch import Tensor
from torch.nn import functional

from linformer_cli.config import ImageShape, ModelConfig
from linformer_cli.model.neighbours import (
    ROWS_OF_A_CHANNEL,
    TABLE_PIXELS,
    Differences,
    NeighbourTables,
    Surroundings,
    find_rows,
    list_surroundings,
)
from linformer_cli.model.pixel_model import PixelModel
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


@pytest.mark.parametrize("levels", [2, 16, 256])
def test_a_vector_is_computed_by_two_layers_from_two_numbers_per_value(levels: int) -> None:
    torch.manual_seed(0)
    surroundings = Surroundings(4, 6, ImageShape(height=1, width=1, levels=levels)).double()
    values = torch.tensor([[0, 1, levels - 1, levels], [levels, levels, levels, levels]])
    numbers = [[-1.0, 2 / (levels - 1) - 1, 1.0, 0.0, 0.0, 1.0, 1.0, 0.5], [0.0] * 4 + [0.5] * 4]
    first, last = surroundings.input, surroundings.output
    hidden = torch.tensor(numbers, dtype=torch.float64) @ first.weight.T + first.bias
    hidden = hidden / 2 * (1 + torch.erf(hidden / math.sqrt(2)))
    expected = hidden @ last.weight.T + last.bias
    assert hidden.shape == (2, 12) and expected.shape == (2, 6)
    torch.testing.assert_close(surroundings(values), expected, rtol=0, atol=1e-12)


def test_the_colours_of_a_palette_are_read_as_four_numbers_and_two_flags() -> None:
    """Red, green and blue are those of a colour on black; a missing value has zeros. The left pixel is a 2, the upper
    one is missing."""
    torch.manual_seed(0)
    colours = ("#00000000", "#ff8000", "#ffffff80")
    values = torch.tensor([2, 3, 1, 0, 2, 2, 1, 3, 3])
    around = list_surroundings()
    assert (around.index((0, 1)), around.index((1, 0))) == (0, 8)
    surroundings = Surroundings(len(values), 6, ImageShape(height=1, width=1, levels=3, palette=colours)).double()
    half = 2 * 0x80 / 255 - 1
    of_value = [[-1.0] * 4 + [0, 0], [1.0, half, -1.0, 1.0, 0, 0], [half] * 4 + [1, 0], [0.0] * 4 + [0, 1]]
    numbers = torch.tensor([of_value[value] for value in values.tolist()], dtype=torch.float64)
    expected = surroundings.output(functional.gelu(surroundings.input(numbers.flatten())))
    torch.testing.assert_close(surroundings(values), expected, rtol=0, atol=1e-6)


def hash_values(values: list[int], bits: int) -> int:
    key = 0
    for value in values:
        key = (key * 257 + value + 1) * 0x1E3779B97F4A7C15 % 2**61
        key ^= key >> 31
    return (key ^ (key >> 17)) % 2**bits


@pytest.mark.parametrize("channel", [0, 2])
def test_rows_match_pairs_and_hashes(channel: int) -> None:
    draw = random.Random(0)
    values = [[draw.randrange(257) for _ in range(4)] for _ in range(500)] + [[256] * 4, [0] * 4, [255] * 4]
    start = channel * (2**16 + 2**15 + 2**14)
    expected = [
        [
            start + min(a, 255) * 256 + min(b, 255),
            start + 2**16 + hash_values([a, b, c], 15),
            start + 2**16 + 2**15 + hash_values([a, b, c, d], 14),
        ]
        for a, b, c, d in values
    ]
    assert find_rows(torch.tensor(values), torch.full((len(values),), channel)).tolist() == expected


def test_a_vector_is_a_linear_function_of_three_rows() -> None:
    torch.manual_seed(0)
    tables = NeighbourTables(6, 3).double()
    torch.nn.init.normal_(tables.rows)
    assert tables.rows.shape == (3 * ROWS_OF_A_CHANNEL, 8) and len(TABLE_PIXELS) == 4
    values, channels = torch.randint(257, (2, 5, 4)), torch.arange(5) % 3
    rows = find_rows(values, channels)
    expected = tables.output.bias.expand(2, 5, 6).clone()
    for image, place, table, number in itertools.product(range(2), range(5), range(3), range(8)):
        row = tables.rows[rows[image, place, table]]
        expected[image, place] += row[number] * tables.output.weight[:, 8 * table + number]
    torch.testing.assert_close(tables(values, channels), expected, rtol=0, atol=1e-12)


def test_initial_tables_do_not_change_the_output(build_config: Callable[..., ModelConfig]) -> None:
    torch.manual_seed(0)
    plain, hashed = (PixelModel(build_config(context=context)).eval() for context in ("wide", "hashed"))
    left = hashed.load_state_dict(plain.state_dict(), strict=False)
    assert not left.unexpected_keys and all("tables" in name for name in left.missing_keys) and left.missing_keys
    tokens = plain.shift_values(torch.randint(256, (2, 20)))
    with torch.no_grad():
        assert torch.equal(plain.attend(tokens)[0], hashed.attend(tokens)[0])
