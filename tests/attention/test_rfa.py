"""Tests particular to random feature attention; test_contract.py covers what all mechanisms share."""

import functools
from typing import Any

import pytest
import torch
from attention.arguments import build_one, draw_parts
from tolerances import FLOAT64, assert_agree

with_and_without_gate = pytest.mark.parametrize("gate", [True, False])


build = functools.partial(build_one, "rfa")


def draw(length: int, gate: bool = True, dtype: torch.dtype = torch.float64) -> list[Any]:
    parts = draw_parts(length, dtype, widths=(6, 6, 5, 1))
    return parts if gate else [*parts[:4], None]


@with_and_without_gate
def test_directions_are_saved_and_only_sigma_is_learned(gate: bool) -> None:
    attention = build(gate=gate)
    before = attention.directions.clone()
    attention.on_training_step(0, seed=0)
    y, _ = attention.attend(*draw(40, gate))
    y.square().sum().backward()
    assert torch.equal(attention.directions, before)
    assert [name for name, _ in attention.named_parameters()] == ["sigma"]
    assert attention.sigma.shape == (2, 6)
    assert bool((attention.sigma == 1).all())
    assert bool((attention.sigma.grad != 0).all())
    assert set(attention.state_dict()) == {"sigma", "directions"}


@with_and_without_gate
def test_the_denominator_is_at_least_a_tenth_of_the_weight(gate: bool) -> None:
    """There is one direction, and queries and keys are opposite, so all similarities are -1."""
    attention = build(gate=gate, frequencies=1)
    with torch.no_grad():
        direction = attention.directions[0]
        attention.sigma.fill_(torch.pi / 2 / float(direction.norm()))
    along = (direction / direction.norm()).expand(2, 2, 30, 6)
    _, _, v, state, extra = draw(30, gate)
    y, _ = attention.attend(along, -along, torch.ones_like(v), state, extra)
    assert_agree(y, torch.full_like(y, -10.0), FLOAT64)
