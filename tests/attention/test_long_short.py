"""Tests particular to Transformer-LS; test_contract.py covers what all mechanisms share."""

from typing import Any

import pytest
import torch
from attention.arguments import build_one, step_through
from attention.cases.long_short import joint_norm, long_short
from attention.inputs import Inputs
from loops import loop_over
from tolerances import FLOAT64, assert_agree
from torch import Tensor

from linformer_cli.attention.long_short import LongShortAttention

CPU = torch.device("cpu")


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
def test_the_state_is_a_ring_buffer_rows_and_the_unfinished_chunk(run: Any) -> None:
    attention = build(chunk=8, rank=2, window=5)
    inputs = draw(19, 2)
    _, state = run(attention, inputs)
    window_norm = attention.window_norm.weight, attention.window_norm.bias
    row_norm = attention.row_norm.weight, attention.row_norm.bias
    for cached, x in ((state.keys, inputs.k), (state.values, inputs.v)):
        normal = joint_norm(x, *window_norm)
        for position in range(14, 19):
            assert_agree(cached[:, :, 4 - position % 5], normal[:, :, position], FLOAT64)
        for chunk in (0, 1):
            own = slice(8 * chunk, 8 * chunk + 8)
            rows = joint_norm(inputs.extra[:, :, own].softmax(dim=2).transpose(-1, -2) @ x[:, :, own], *row_norm)
            assert_agree(cached[:, :, 5 + 2 * chunk : 7 + 2 * chunk], rows, FLOAT64)
        assert cached.shape[2] == 5 + 4
    scores = inputs.extra[:, :, 16:]
    assert_agree(state.largest, scores.amax(dim=2), FLOAT64)
    weights = (scores - state.largest.unsqueeze(2)).exp().transpose(-1, -2)
    content = torch.cat([torch.ones_like(inputs.k[..., :1]), inputs.k, inputs.v], dim=-1)[:, :, 16:]
    assert_agree(state.sums, weights @ content, FLOAT64)
    assert int(state.position) == 19


def test_the_defaults_are_a_window_of_56_chunks_of_16_and_rank_1() -> None:
    attention = build()
    assert (attention.window, attention.options.chunk, attention.options.rank) == (56, 16, 1)
    assert attention.extra_per_head == 1
    assert build(rank=3).extra_per_head == 3


@pytest.mark.parametrize("key_width", [4, 5, 6])
def test_keys_and_values_share_a_norm(key_width: int) -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in build(key_width=key_width).named_parameters()}
    width = max(key_width, 5)
    assert shapes == {
        f"{norm}.{part}": (2, width) for norm in ("window_norm", "row_norm") for part in ("weight", "bias")
    }


@both_ways
def test_keys_are_normalised_even_if_their_squares_overflow(run: Any) -> None:
    """Without rescaling, the variance of the keys would be infinite, and every normalised key would be the bias."""
    attention, inputs = build(torch.float32, chunk=7, window=9), draw(40, dtype=torch.float32)
    inputs = inputs._replace(k=1e20 * inputs.k)
    with torch.no_grad():
        found, _ = run(attention, inputs)
        expected, _ = attend(attention.double(), inputs.map(Tensor.double))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
