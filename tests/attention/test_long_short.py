"""Tests particular to Transformer-LS; test_contract.py covers what all mechanisms share."""

from typing import Any

import pytest
import torch
from attention.arguments import build_one, step_through
from attention.cases.long_short import long_short
from attention.inputs import Inputs
from loops import loop_over
from tolerances import FLOAT64, assert_agree
from torch import Tensor

from linformer_cli.attention.long_short import LongShortAttention


def build(dtype: torch.dtype = torch.float64, **options: Any) -> LongShortAttention:
    attention = build_one("long_short", dtype, **options)
    with torch.no_grad():  # replace the initial ones and zeros of the norms
        for parameter in attention.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, dtype=torch.float64).to(dtype)
    return attention


def draw(length: int, rank: int = 1, dtype: torch.dtype = torch.float64) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    parts = (torch.randn(2, 2, length, width, generator=generator, dtype=torch.float64) for width in (6, 6, 5, rank))
    return Inputs(*parts).map(lambda part: part.to(dtype))


def attend(attention: LongShortAttention, inputs: Inputs, state: Any = None) -> tuple[Tensor, Any]:
    return attention.attend(*inputs[:3], state, inputs.extra)


both_ways = pytest.mark.parametrize("run", [attend, step_through])


@both_ways
@pytest.mark.parametrize("rank", [1, 3])
def test_norms_with_changed_weights_match_the_definition(run: Any, rank: int) -> None:
    """With their initial weights, all norms are equal, so swapping the norms of window and rows would go unnoticed."""
    attention = build(chunk=7, rank=rank, window=9)
    inputs = draw(40, rank)
    expected = long_short(inputs, dict(attention.named_parameters()), 7, 9)
    assert_agree(run(attention, inputs)[0], expected, FLOAT64)


@both_ways
@loop_over("window", [1, 2, 40, 41, 60])
def test_windows_of_one_position_and_unfilled_windows_match_the_definition(run: Any, window: int) -> None:
    attention = build(chunk=7, window=window)
    inputs = draw(40)
    expected = long_short(inputs, dict(attention.named_parameters()), 7, window)
    assert_agree(run(attention, inputs)[0], expected, FLOAT64)


@both_ways
def test_chunk_scores_may_be_shifted_or_huge(run: Any) -> None:
    attention = build(chunk=7, rank=2, window=3)
    inputs = draw(40, 2)
    expected, _ = run(attention, inputs)
    for shift in (-1000.0, 1000.0):
        assert_agree(run(attention, inputs._replace(extra=inputs.extra + shift))[0], expected, FLOAT64)
    # From one position to the next, these scores rise or fall by more than exp can represent.
    for factor in (-1000.0, 1000.0):
        extreme = inputs._replace(
            extra=factor * torch.arange(80.0, dtype=torch.float64).view(1, 1, 40, 2).expand(2, 2, -1, -1)
        )
        expected_extreme = long_short(extreme, dict(attention.named_parameters()), 7, 3)
        assert_agree(run(attention, extreme)[0], expected_extreme, FLOAT64)


@both_ways
def test_keys_are_normalised_even_if_their_squares_overflow(run: Any) -> None:
    """Without rescaling, the variance of the keys would be infinite, and every normalised key would be the bias."""
    attention, inputs = build(torch.float32, chunk=7, window=9), draw(40, dtype=torch.float32)
    inputs = inputs._replace(k=1e20 * inputs.k)
    with torch.no_grad():
        found, _ = run(attention, inputs)
        expected, _ = attend(attention.double(), inputs.map(Tensor.double))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
