"""Tests of the inputs from the values around a position, and of the two layers that read these inputs."""

import math

import pytest
import torch

from linformer_cli.model.neighbours import Surroundings, list_surroundings


def test_surroundings_are_the_known_pixels_of_four_rows() -> None:
    pixels = list_surroundings()
    assert len(pixels) == len(set(pixels)) == 4 + 3 * 9
    assert all(0 <= up <= 3 and abs(left) <= 4 and (up > 0 or left > 0) for up, left in pixels)


@pytest.mark.parametrize("levels", [2, 16, 256])
def test_a_vector_is_computed_by_two_layers_from_two_numbers_per_value(levels: int) -> None:
    torch.manual_seed(0)
    surroundings = Surroundings(4, 6, levels).double()
    values = torch.tensor([[0, 1, levels - 1, levels], [levels, levels, levels, levels]])
    numbers = [[-1.0, 2 / (levels - 1) - 1, 1.0, 0.0, 0.0, 1.0, 1.0, 0.5], [0.0] * 4 + [0.5] * 4]
    first, last = surroundings.input, surroundings.output
    hidden = torch.tensor(numbers, dtype=torch.float64) @ first.weight.T + first.bias
    hidden = hidden / 2 * (1 + torch.erf(hidden / math.sqrt(2)))
    expected = hidden @ last.weight.T + last.bias
    assert hidden.shape == (2, 12) and expected.shape == (2, 6)
    torch.testing.assert_close(surroundings(values), expected, rtol=0, atol=1e-12)
