"""Tests particular to the delta rule; test_contract.py covers what all mechanisms share."""

import functools
import math
from typing import Any

import pytest
import torch
from attention.arguments import build_one, draw_parts, step_through
from loops import loop_over
from tolerances import FLOAT32_DRIFT, FLOAT64, all_finite, assert_agree
from torch import Tensor

from linformer_cli.attention.parts.delta_rule import DeltaState

every_largest_beta = pytest.mark.parametrize(("negative", "largest"), [(False, 1.0), (True, 2.0)])
# The sigmoid of this scalar is 1 in every type, and the sigmoid of its negative is 0.
CERTAIN = 2000.0


build = functools.partial(build_one, "deltanet")


def draw(length: int, gate: bool = True, dtype: torch.dtype = torch.float64) -> list[Any]:
    return draw_parts(length, dtype, widths=(6, 6, 5, 1 + gate))


@pytest.mark.parametrize(("heads", "memories"), [(1, [784]), (2, [784, 28]), (3, [784, math.sqrt(784 * 28), 28])])
def test_initial_memories_range_from_an_image_to_a_row(heads: int, memories: list[float]) -> None:
    """With a memory of n positions, a value has decayed to 1/e after n positions."""
    attention = build(heads=heads)
    forgotten = (-attention.gate_bias).sigmoid()
    assert_agree(1 / forgotten, torch.tensor(memories, dtype=torch.float64) + 1, 1e-5)


def held_for(state: DeltaState, k_t: Tensor) -> Tensor:
    """Return the value [B, H, V] that a state [B, H, K, V] holds for a key [B, H, K]."""
    direction = torch.nn.functional.normalize(torch.nn.functional.silu(k_t), dim=-1)
    return (direction.unsqueeze(-2) @ state.s).squeeze(-2)


@every_largest_beta
def test_a_repeated_key_replaces_its_value(negative: bool, largest: float) -> None:
    attention = build(gate=False, negative_eigenvalues=negative)
    q, k, v, _, extra = draw(2, gate=False)
    k[:, :, 1] = k[:, :, 0]
    _, state = attention.attend(q, k, v, None, torch.full_like(extra, CERTAIN))
    # Beta 1 removes the first value; beta 2 negates it.
    expected = (1 - largest) * largest * v[:, :, 0] + largest * v[:, :, 1]
    assert_agree(held_for(state, k[:, :, 0]), expected, 1e-5)


def repeat(k: Tensor) -> Tensor:
    return k[:, :, :1].expand_as(k)


# These keys are the hardest for the triangular system: all products of two keys are 1, nearly 1, or alternate in sign.
ADVERSARIES = {
    "one key": repeat,
    "nearly one key": lambda k: repeat(k) + 1e-4 * k,
    "two alternating keys": lambda k: k[:, :, :2].repeat(1, 1, k.shape[2] // 2, 1),
    "opposite keys": lambda k: repeat(k) * torch.tensor([1.0, -1.0]).repeat(k.shape[2] // 2).unsqueeze(-1).to(k.dtype),
    "long and short keys": lambda k: repeat(k) * torch.tensor([1e4, 1e-4]).repeat(k.shape[2] // 2).unsqueeze(-1),
}


@loop_over("adversary", ADVERSARIES)
@every_largest_beta
@loop_over("chunk", [32, 100])
def test_the_triangular_system_is_solved_accurately_for_any_keys(adversary, negative, largest, chunk) -> None:
    """Compare the states of attend and step. Beta is at its limit and the gate is open, so no error decays."""
    attention = build(negative_eigenvalues=negative, chunk=chunk)
    q, k, v, _, extra = draw(100)
    inputs = [q, ADVERSARIES[adversary](k), v, None, extra + CERTAIN]
    _, expected = step_through(attention, inputs)
    assert expected.s.abs().max() < largest * v.norm(dim=-1).sum(dim=2).max()
    leaves = [part.detach().requires_grad_() for part in (*inputs[:3], inputs[4])]
    y, state = attention.attend(*leaves[:3], None, leaves[3])
    assert_agree(state.s, expected.s, FLOAT64)
    assert all_finite(torch.autograd.grad(y.sum(), leaves))
    single = [None if part is None else part.float() for part in inputs]
    for found in (attention.float().attend(*single)[1], step_through(attention, single)[1]):
        assert_agree(found.s, expected.s, FLOAT32_DRIFT)
