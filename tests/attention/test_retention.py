"""Tests particular to retention; test_contract.py covers what all mechanisms share."""

import functools
import math
from typing import Any

import pytest
import torch
from attention.arguments import build_one, draw_parts
from torch import Tensor

from linformer_cli.errors import UsageError
from linformer_cli.model.mixers import parse_options

ROW, LENGTH = 6, 24
every_distance = pytest.mark.parametrize("distance", ["raster", "plane"])


build = functools.partial(build_one, "retention", key_width=4, positions=LENGTH, row=ROW)


def draw(length: int = 40) -> list[Any]:
    return draw_parts(length, widths=(4, 4, 5, 5))


def weigh_pairs(heads: int = 2, **options: Any) -> Tensor:
    """Return w(t, j) / w(t, t) for each head, [H, T, T], measured with equal queries and keys and one-hot values."""
    same = torch.ones(1, heads, LENGTH, 4, dtype=torch.float64)
    values = torch.eye(LENGTH, dtype=torch.float64).expand(1, heads, -1, -1)
    y, _ = build(heads=heads, value_width=LENGTH, output_gate=False, **options).attend(same, same, values)
    return (y / y.diagonal(dim1=-2, dim2=-1).unsqueeze(-1))[0]


def test_memories_range_from_an_image_to_a_row() -> None:
    weights = weigh_pairs(heads=3)
    for head, memory in enumerate((24, 12, 6)):
        for t, j in ((1, 0), (6, 0), (23, 2)):
            assert float(weights[head, t, j]) == pytest.approx(math.exp((j - t) / memory))
    assert float(weigh_pairs(heads=1)[0, 23, 0]) == pytest.approx(math.exp(-23 / 24))
    weights = weigh_pairs(shortest_memory=1.5, longest_memory=100)
    assert weights[:, 9, 8].tolist() == pytest.approx([math.exp(-1 / 100), math.exp(-1 / 1.5)])


@pytest.mark.parametrize("memories", [{"shortest_memory": 5}, {"longest_memory": 5}])
def test_one_head_uses_the_given_memory(memories: dict[str, float]) -> None:
    assert float(weigh_pairs(heads=1, **memories)[0, 9, 8]) == pytest.approx(math.exp(-1 / 5))


@pytest.mark.parametrize(("option", "memory"), [("longest_memory", 4), ("shortest_memory", 30)])
def test_a_given_memory_bounds_the_other_default(option: str, memory: float) -> None:
    """The default shortest memory is a row, and the default longest memory is an image.

    The given longest memory is shorter than a row; the given shortest memory is longer than an image.
    """
    assert weigh_pairs(**{option: memory})[:, 9, 8].tolist() == pytest.approx([math.exp(-1 / memory)] * 2)


@every_distance
def test_casting_to_bfloat16_does_not_round_the_decay(distance: str) -> None:
    inputs = draw()
    expected, _ = build(distance=distance).attend(*inputs)
    assert torch.equal(build(distance=distance).bfloat16().attend(*inputs)[0], expected)


@pytest.mark.parametrize("waves", [1, 2, 5])
def test_plane_weights_depend_on_rows_and_columns(waves: int) -> None:
    weights = weigh_pairs(heads=1, distance="plane", waves=waves)[0]
    for t, j in ((23, 22), (23, 17), (23, 0), (14, 8), (14, 9), (14, 7), (12, 11), (12, 17)):
        rows, columns = t // ROW - j // ROW, t % ROW - j % ROW
        expected = math.exp(-rows * ROW / 24) * math.cos(math.pi * columns / (2 * ROW)) ** (2 * waves)
        assert float(weights[t, j]) == pytest.approx(expected if j <= t else 0, abs=1e-12)
    # The pixels above left and above right are equally far away; the end of the previous row is farther.
    assert float(weights[14, 7]) == pytest.approx(float(weights[14, 9]))
    assert weights[12, 11] < weights[12, 6] / 2
    assert bool((weights.tril() > -1e-12).all())


def test_incompatible_options_are_refused(raises_one_line: Any) -> None:
    with raises_one_line(UsageError, "'waves' is for distance 'plane'"):
        parse_options("retention", {"waves": 2})
    with raises_one_line(UsageError, "shortest memory", "30", "20"):
        parse_options("retention", {"shortest_memory": 30, "longest_memory": 20})
