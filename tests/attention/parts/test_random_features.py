"""Tests of random directions: their distribution, their angles, and what they depend on."""

import math

import pytest
import torch
from torch import Tensor

from linformer_cli.attention.parts.random_features import (
    draw_directions,
    seeded_normal,
)


def draw(count: int, width: int, orthogonal: bool, seed: int = 0) -> Tensor:
    return draw_directions(count, width, orthogonal, seeded_normal(seed, 0, 0))


@pytest.mark.parametrize("orthogonal", [True, False])
def test_every_direction_is_normal(orthogonal: bool) -> None:
    drawn = torch.stack([draw(20, 8, orthogonal, seed) for seed in range(2000)])
    assert drawn.mean(0).abs().max() < 5 / math.sqrt(2000)
    assert (drawn.square().mean(0) - 1).abs().max() < 5 * math.sqrt(2 / 2000)
    # If w is a normal vector, |w|^2 has mean K and variance 2 K.
    squares = drawn.square().sum(-1)
    assert abs(squares.mean() - 8) < 0.1
    assert abs(squares.var() - 16) < 1


def test_directions_are_orthogonal_within_blocks() -> None:
    drawn = torch.nn.functional.normalize(draw(20, 8, True), dim=-1)
    products = drawn @ drawn.T
    for start, stop in ((0, 8), (8, 16), (16, 20)):
        block = products[start:stop, start:stop]
        torch.testing.assert_close(block, torch.eye(stop - start, dtype=block.dtype), rtol=0, atol=1e-12)
    assert products[:8, 8:16].abs().max() > 0.1


def test_independent_directions_are_not_orthogonal() -> None:
    products = torch.nn.functional.normalize(draw(8, 8, False), dim=-1)
    assert (products @ products.T - torch.eye(8)).abs().max() > 0.1


def test_seeded_numbers_never_change() -> None:
    numbers = seeded_normal(3, 1, 200)(1, 2, 2)
    expected = [[[0.3623335285760487, -0.001491672665347493], [0.1325460710072927, 0.5056575565830741]]]
    torch.testing.assert_close(numbers, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
