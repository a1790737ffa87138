"""Tests particular to Mamba; test_contract.py covers what all mechanisms share."""

import functools
import math

import pytest
import torch
from attention.arguments import build_one, draw_for, step_through
from loops import loop_over
from tolerances import FLOAT32_DRIFT, FLOAT64, all_finite, assert_agree

MAMBA_2 = {"trapezoidal": False, "rotation": False, "normalise": False, "rate": "head"}


build = functools.partial(build_one, "mamba")


@pytest.mark.parametrize("rate", ["input", "head"])
def test_initial_memories_range_from_an_image_to_a_row(rate: str) -> None:
    """The memory is the number of positions after which the state has decayed to 1/e if the extra scalars are 0."""
    attention = build(rate=rate, trapezoidal=False, rotation=False)
    q, k, v, _, extra = draw_for(attention, 785)
    v[:, :, 1:] = 0
    states = [attention.attend(*(x[:, :, :n] for x in (q, k, v)), None, 0 * extra[:, :, :n])[1].s for n in (1, 29, 785)]
    for head, kept in ((0, states[2]), (1, states[1])):
        assert_agree(kept[:, head], states[0][:, head] / math.e, 1e-6)


def test_a_lambda_of_one_gives_the_results_without_the_trapezoidal_rule() -> None:
    attention = build()
    q, k, v, _, extra = draw_for(attention, 30)
    extra[..., 2] = 2000.0
    expected, _ = build(trapezoidal=False).attend(q, k, v, None, extra[..., [0, 1, 3]])
    assert_agree(attention.attend(q, k, v, None, extra)[0], expected, FLOAT64)


def test_the_rotation_depends_on_the_difference_of_angles() -> None:
    """A quarter turn between a key and a query exchanges the coordinates of a pair."""
    attention = build(key_width=2, trapezoidal=False, normalise=False, rate="head")
    attention.skip.data.zero_()
    k = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(1, 2, 2, 2).clone()
    extra = torch.zeros(1, 2, 2, 2, dtype=torch.float64)
    # The step size is 1 / 2, and tanh of the second scalar is 1, so the second position adds a quarter of a turn.
    extra[..., 0] = math.log(math.expm1(0.5)) - attention.step_bias.detach()[:, None]
    extra[:, :, 1, 1] = 40
    k[:, :, 1] = 0
    v = torch.ones(1, 2, 2, 5, dtype=torch.float64)
    decay = math.exp(-0.5) / 2
    for q, expected in (([1.0, 0.0], 0.0), ([0.0, 1.0], -decay), ([0.0, -1.0], decay)):
        queries = torch.tensor(q, dtype=torch.float64).expand(1, 2, 2, 2)
        y, _ = attention.attend(queries, k, v, None, extra)
        assert_agree(y[:, :, 1], torch.full_like(y[:, :, 1], expected), FLOAT64)


@pytest.mark.slow
def test_angles_stay_accurate_over_thousands_of_positions() -> None:
    """The angles make about 1,000 turns, and the state has a memory of several thousand positions."""
    attention = build()
    inputs = draw_for(attention, 3000)
    inputs[4][..., 0] += 1 - attention.step_bias.detach().unsqueeze(-1)
    inputs[4][..., 1] = -2000
    inputs[4][..., 3:] += 1
    inputs = [None if part is None else part.float().double() for part in inputs]
    expected, exact = attention.attend(*inputs)
    assert exact.angle is not None and exact.angle.abs().max() <= 0.5
    single = build(torch.float32)
    inputs = [None if part is None else part.float() for part in inputs]
    for y, state in (single.attend(*inputs), step_through(single, inputs)):
        assert_agree(y, expected, FLOAT32_DRIFT)
        difference = state.angle.double() - exact.angle
        assert (difference - difference.round()).abs().max() < 1e-5


@loop_over("dtype", [torch.float32, torch.float64])
@loop_over("shift", [100.0, -100.0, 1e6, -1e6])
def test_extreme_scalars_give_finite_results(dtype: torch.dtype, shift: float) -> None:
    for options in ({}, MAMBA_2):
        attention = build(dtype, **options)
        q, k, v, state, extra = draw_for(attention, 40, dtype)
        for column in range(attention.extra_per_head):
            leaves = [part.clone().requires_grad_() for part in (q, k, v, extra)]
            scalars = leaves[3] + shift * torch.eye(attention.extra_per_head, dtype=dtype)[column]
            y, _ = attention.attend(*leaves[:3], state, scalars)
            assert all_finite((y, *torch.autograd.grad(y.sum(), leaves)))
            assert_agree(step_through(attention, [q, k, v, None, scalars.detach()])[0], y.detach(), 1e-3)
