"""Tests particular to log-linear attention; test_contract.py covers what all mechanisms share."""

import math
from typing import Any

import pytest
import torch
from attention.arguments import build_one, draw_for, step_through
from loops import loop_over
from tolerances import FLOAT32_DRIFT, FLOAT64, assert_agree

from linformer_cli.attention.log_linear import LogLinearAttention
from linformer_cli.model.mixers import build_attention

CPU = torch.device("cpu")
OVER = ("linear", "mamba2", "deltanet")
every_base = pytest.mark.parametrize("over", OVER)
# The softplus of this scalar is 2000, and its sigmoid is 1. For its negative, both are 0.
CERTAIN = 2000.0


def build(over: str, positions: int = 784, **rest: Any) -> LogLinearAttention:
    return build_one("log_linear", over=over, positions=positions, row=min(28, positions), **rest)


@every_base
@loop_over(("positions", "levels"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (784, 11), (1024, 11)])
def test_the_number_of_levels_is_one_plus_log2_of_the_positions(over: str, positions: int, levels: int) -> None:
    attention = build(over, positions)
    assert attention.extra_per_head == levels + OVER.index(over)
    assert len(attention.init_state(1, positions, CPU, torch.float32).s[0, 0]) == int(math.log2(positions)) + 1


@pytest.mark.parametrize("over", ["linear", "deltanet"])
def test_equal_weights_give_the_base_mechanism(over: str) -> None:
    attention = build(over)
    q, k, v, state, extra = draw_for(attention, 100)
    extra[..., OVER.index(over) :] = 0.7
    base = build_attention(over, {}, attention.shape).double()
    # With large values, the small numbers that are added to mean squares have no effect.
    inputs = q, k, 1e6 * v, state
    expected, _ = base.attend(*inputs, extra[..., : OVER.index(over)] if base.extra_per_head else None)
    assert_agree(attention.attend(*inputs, extra)[0], expected, FLOAT64)


@pytest.mark.parametrize("heads", [1, 3])
def test_initial_memories_range_from_an_image_to_a_row(heads: int) -> None:
    """A state decays to 1/e within the memory if the extra scalars are 0."""
    memories = torch.linspace(math.log(784), math.log(28), heads, dtype=torch.float64).exp()
    mamba2, deltanet = build("mamba2", heads=heads), build("deltanet", heads=heads)
    dt = torch.nn.functional.softplus(mamba2.dt_bias)
    assert_agree(1 / (mamba2.a_log.exp() * dt), memories, 1e-3)
    assert_agree(1 / (-deltanet.gate_bias).sigmoid(), memories + 1, 1e-3)


@every_base
def test_positions_after_the_last_level_share_its_weight(over: str) -> None:
    attention, larger = build(over, positions=16), build(over, positions=64)
    q, k, v, state, extra = draw_for(attention, 50)
    assert attention.levels == 5
    last = extra[..., -1:].expand(-1, -1, -1, larger.levels - attention.levels)
    larger.load_state_dict(attention.state_dict())
    expected, _ = larger.attend(q, k, v, state, torch.cat([extra, last], dim=-1))
    assert_agree(attention.attend(q, k, v, state, extra)[0], expected, FLOAT64)
    # The state has room for 16 positions and grows.
    y, state = step_through(attention, [q, k, v, None, extra], attention.init_state(2, 16, CPU, torch.float64))
    assert_agree(y, expected, FLOAT64)
    assert state.s.shape[2] == 6


@pytest.mark.parametrize("chunk", [32, 128])
def test_the_triangular_system_is_solved_accurately_for_a_repeated_key(chunk: int) -> None:
    """Beta is 1 and the gate is open, so no error decays."""
    attention = build("deltanet", chunk=chunk)
    q, k, v, _, extra = draw_for(attention, 130)
    extra[..., :2] += CERTAIN
    for keys in (k[:, :, :1].expand_as(k), k[:, :, :1] + 1e-4 * k, k[:, :, :2].repeat(1, 1, 65, 1)):
        inputs = [q, keys, v, None, extra]
        _, expected = step_through(attention, inputs)
        assert_agree(attention.attend(*inputs)[1].s, expected.s, FLOAT64)
        single = [None if part is None else part.float() for part in inputs]
        assert_agree(attention.attend(*single)[1].s, expected.s, FLOAT32_DRIFT)
