"""Tests particular to Mamba; test_contract.py covers what all mechanisms share."""

import math
from typing import Any

import pytest
import torch
from loops import loop_over
from tolerances import FLOAT32_DRIFT, FLOAT64, assert_agree
from torch import Tensor

from linformer_cli.attention.base import AttentionShape
from linformer_cli.attention.mamba import MambaAttention, MambaState
from linformer_cli.model.mixers import build_attention

CPU = torch.device("cpu")
MAMBA_2 = {"trapezoidal": False, "rotation": False, "normalise": False, "rate": "head"}


def build(dtype: torch.dtype = torch.float64, heads: int = 2, width: int = 6, **options: Any) -> MambaAttention:
    shape = AttentionShape(heads, key_width=width, value_width=5, positions=784, row=28)
    attention = build_attention("mamba", options, shape).to(dtype)
    assert isinstance(attention, MambaAttention)
    return attention


def draw(attention: MambaAttention, length: int, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Draw q, k, v, no state, and the extra scalars."""
    generator, width = torch.Generator().manual_seed(0), attention.shape.key_width
    q, k, v, extra = (
        torch.randn(2, 2, length, columns, generator=generator, dtype=torch.float64).to(dtype)
        for columns in (width, width, 5, attention.extra_per_head)
    )
    return [q, k, v, None, extra]


def step_through(attention: MambaAttention, inputs: list[Any]) -> tuple[Tensor, MambaState]:
    q, k, v, _, extra = inputs
    state, outputs = attention.init_state(len(v), v.shape[2], CPU, v.dtype), []
    for t in range(v.shape[2]):
        y_t, state = attention.step(q[:, :, t], k[:, :, t], v[:, :, t], state, extra[:, :, t])
        outputs.append(y_t)
    return torch.stack(outputs, dim=2), state


@pytest.mark.parametrize(("width", "angles"), [(1, 0), (2, 1), (7, 1), (8, 2), (32, 8)])
def test_a_quarter_of_the_key_width_is_the_number_of_angles(width: int, angles: int) -> None:
    """The other extra scalars are those of the step size, the rate of decay and the trapezoidal rule."""
    assert build(width=width).extra_per_head == 3 + angles
    assert build(width=width, **MAMBA_2).extra_per_head == 1


@pytest.mark.parametrize("options", [{}, MAMBA_2], ids=["mamba-3", "mamba-2"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_number_of_scalars_is_refused(options: dict[str, Any], change: int) -> None:
    attention = build(**options)
    q, k, v, *_ = draw(attention, 3)
    wrong = torch.zeros(2, 2, 3, attention.extra_per_head + change, dtype=torch.float64)
    for extra in (None, wrong):
        with pytest.raises(ValueError, match=rf"extra scalars \[B, H, T, {attention.extra_per_head}\], found"):
            attention.attend(q, k, v, None, extra)


@pytest.mark.parametrize("rate", ["input", "head"])
def test_initial_memories_range_from_an_image_to_a_row(rate: str) -> None:
    """The memory is the number of positions after which the state has decayed to 1/e if the extra scalars are 0."""
    attention = build(rate=rate, trapezoidal=False, rotation=False)
    q, k, v, _, extra = draw(attention, 785)
    v[:, :, 1:] = 0
    states = [attention.attend(*(x[:, :, :n] for x in (q, k, v)), None, 0 * extra[:, :, :n])[1].s for n in (1, 29, 785)]
    for head, kept in ((0, states[2]), (1, states[1])):
        assert_agree(kept[:, head], states[0][:, head] / math.e, 1e-6)


def test_a_lambda_of_one_gives_the_results_without_the_trapezoidal_rule() -> None:
    attention = build()
    q, k, v, _, extra = draw(attention, 30)
    extra[..., 2] = 2000.0
    expected, _ = build(trapezoidal=False).attend(q, k, v, None, extra[..., [0, 1, 3]])
    assert_agree(attention.attend(q, k, v, None, extra)[0], expected, FLOAT64)


def test_the_rotation_depends_on_the_difference_of_angles() -> None:
    """A quarter turn between a key and a query exchanges the coordinates of a pair."""
    attention = build(width=2, trapezoidal=False, normalise=False, rate="head")
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


def test_angles_stay_accurate_over_thousands_of_positions() -> None:
    """The angles make about 1,000 turns, and the state has a memory of several thousand positions."""
    attention = build()
    inputs = draw(attention, 3000)
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
        assert state.angle is not None
        difference = state.angle.double() - exact.angle
        assert (difference - difference.round()).abs().max() < 1e-5


@loop_over("dtype", [torch.float32, torch.float64])
@loop_over("shift", [100.0, -100.0, 1e6, -1e6])
def test_extreme_scalars_give_finite_results(dtype: torch.dtype, shift: float) -> None:
    for options in ({}, MAMBA_2):
        attention = build(dtype, **options)
        q, k, v, state, extra = draw(attention, 40, dtype)
        for column in range(attention.extra_per_head):
            leaves = [part.clone().requires_grad_() for part in (q, k, v, extra)]
            scalars = leaves[3] + shift * torch.eye(attention.extra_per_head, dtype=dtype)[column]
            y, _ = attention.attend(*leaves[:3], state, scalars)
            for tensor in (y, *torch.autograd.grad(y.sum(), leaves)):
                assert bool(torch.isfinite(tensor).all())
            assert_agree(step_through(attention, [q, k, v, None, scalars.detach()])[0], y.detach(), 1e-3)
