"""Compares the rows that neighbours select with a computation in Python integers, and tests the resulting vectors."""

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch

from linformer_cli.config import ModelConfig
from linformer_cli.model.neighbours import ROWS_OF_A_CHANNEL, TABLE_PIXELS, NeighbourTables, find_rows
from linformer_cli.model.pixel_model import PixelModel

BITS = {2: 16, 3: 15, 4: 14}


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


def test_pairs_have_separate_rows_and_hashes_are_spread() -> None:
    pairs = torch.tensor([[*pair, 0, 0] for pair in itertools.product(range(256), repeat=2)])
    assert len(find_rows(pairs, torch.tensor(0))[:, 0].unique()) == 2**16
    # The keys are similar: eight adjacent values in each place give 512 combinations of three and 4,096 of four.
    near = torch.tensor(list(itertools.product(range(100, 108), repeat=4)))
    rows = find_rows(near, torch.tensor(0))
    for table, combinations in ((1, 8**3), (2, 8**4)):
        size = 2 ** BITS[table + 2]
        by_chance = size * (1 - math.exp(-combinations / size))
        assert len(rows[:, table].unique()) > 0.97 * by_chance


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
