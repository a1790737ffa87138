"""Tests particular to Longformer attention; test_contract.py covers what all mechanisms share."""

import functools

import pytest
import torch
from attention.arguments import build_one, draw_parts
from attention.cases.longformer import longformer
from attention.inputs import Inputs
from attention.measures import measure_saved_bytes
from tolerances import FLOAT64, assert_agree

from linformer_cli.attention.longformer import LongformerOptions
from linformer_cli.errors import UsageError
from linformer_cli.model.mixers import parse_options

build = functools.partial(build_one, "longformer", key_width=4, value_width=4)
draw = functools.partial(draw_parts, widths=(4, 4, 4))


@pytest.mark.parametrize(
    ("dilation", "global_count", "seen"),
    [
        ("1,4", 0, [[17, 18, 19], [11, 15, 19]]),
        ("4,1", 2, [[0, 1, 11, 15, 19], [0, 1, 17, 18, 19]]),
        (9, 3, [[0, 1, 2, 10, 19], [0, 1, 2, 10, 19]]),  # 19 - 2 * 9 is also a global position and is seen only once
    ],
)
def test_a_query_sees_the_expected_positions(dilation: int | str, global_count: int, seen: list[list[int]]) -> None:
    """Equal keys give equal weights to all visible positions, and one-hot values identify these positions."""
    attention = build(value_width=20, window=3, dilation=dilation, globals=global_count)
    q, k, _ = draw(20)
    k[:] = 1.0
    v = torch.eye(20, dtype=torch.float64).expand(2, 2, 20, 20)
    expected = torch.zeros(2, 20, dtype=torch.float64)
    for head, positions in enumerate(seen):
        expected[head, positions] = 1 / len(positions)
    y, _ = attention.attend(q, k, v)
    assert_agree(y[0, :, -1], expected, FLOAT64)


@pytest.mark.parametrize("window", [1, 2])
def test_a_dilation_beyond_the_image_adds_no_padding(window: int) -> None:
    """With such a dilation, a query sees only itself."""
    q, k, v = (x.requires_grad_() for x in draw(784))
    attention = build(window=window, dilation=1_000_000, globals=0)
    assert_agree(attention.attend(q, k, v)[0], v, FLOAT64)
    assert measure_saved_bytes(attention.attend, q, k, v) < 10 * v.nbytes
    assert attention.state_bytes(1, 784, torch.float64) <= v.nbytes + 1000


def test_a_window_wider_than_a_block_matches_the_definition() -> None:
    """Here the first queries have hundreds of masked keys."""
    inputs = draw(600)
    y, _ = build(window=280, dilation="1,2", globals=0).attend(*inputs)
    assert_agree(y, longformer(Inputs(*inputs), 280, [1, 2], 0), FLOAT64)


def test_dilations_may_be_a_number_or_a_list_and_alternate_by_default() -> None:
    for given, expected in ((3, (3, 3, 3, 3)), ("2", (2, 2, 2, 2)), ("1, 6", (1, 6, 1, 6))):
        assert parse_options("longformer", {"dilation": given}).dilations(4) == expected
    assert [LongformerOptions().dilations(heads) for heads in (1, 2, 5)] == [(1,), (1, 4), (1, 4, 1, 4, 1)]


def test_an_invalid_dilation_or_one_that_does_not_fit_is_refused() -> None:
    for wrong in (0, -1, "1,x", "1,,2", "", "2,0", "1.5", "²"):
        with pytest.raises(UsageError, match=r"dilation: must be a number of 1 or more.*found"):
            parse_options("longformer", {"dilation": wrong})
    with pytest.raises(UsageError, match=r"dilation '1,2,3' lists 3 values for 4 heads"):
        build(heads=4, dilation="1,2,3")
    with pytest.raises(UsageError, match=r"a window of 1,000 with dilation 2,000 reaches 1,998,000 positions back"):
        build(window=1000, dilation=2000)
