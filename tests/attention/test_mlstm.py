"""Tests particular to mLSTM; test_contract.py covers what all mechanisms share."""

import functools
import math

import pytest
import torch
from attention.arguments import build_one, draw_parts, step_through
from loops import loop_over
from tolerances import FLOAT32_DRIFT, FLOAT64, all_finite, assert_agree

from linformer_cli.attention.mlstm import MlstmState

CPU = torch.device("cpu")
every_forget_gate = pytest.mark.parametrize("forget_gate", ["sigmoid", "exponential"])


build = functools.partial(build_one, "mlstm", normalise=False)
draw = functools.partial(draw_parts, widths=(6, 6, 5, 2))


@every_forget_gate
@pytest.mark.parametrize(("heads", "memories"), [(1, [784]), (3, [784, math.sqrt(784 * 28), 28])])
def test_initial_memories_range_from_an_image_to_a_row(forget_gate: str, heads: int, memories: list[float]) -> None:
    """With a memory of n positions, a weight falls to n / (n + 1) at every position."""
    bias = build(heads=heads, forget_gate=forget_gate).gate_bias
    kept = bias.sigmoid() if forget_gate == "sigmoid" else bias.exp()
    assert_agree(1 / (1 - kept), torch.tensor(memories, dtype=torch.float64) + 1, 1e-5)


@every_forget_gate
def test_the_output_does_not_depend_on_the_stabiliser(forget_gate: str) -> None:
    """A state with a larger m and with sums scaled to match gives the same outputs."""
    attention, first, second = build(forget_gate=forget_gate), draw(20), draw(30)
    _, state = attention.attend(*first)
    second[3] = state
    expected, _ = attention.attend(*second)
    second[3] = MlstmState(state.s * math.exp(-7), state.m + 7)
    found, _ = attention.attend(*second)
    assert_agree(found, expected, FLOAT64)
    stepped, _ = step_through(attention, second, second[3])
    assert_agree(stepped, expected, FLOAT64)


@every_forget_gate
@loop_over("shift", [80.0, 2000.0, -80.0, -2000.0])
def test_huge_and_tiny_input_gates_give_finite_results(forget_gate: str, shift: float) -> None:
    """The square of exp(80) overflows float32. For queries of zeros, the numerator and the sum of weights are 0.

    No coordinate of a query or key is negative, so the terms of the sum of weights cannot cancel.
    """
    attention, (q, k, v, _, extra) = build(torch.float32, forget_gate=forget_gate), draw(40, torch.float32)
    q, k = q.abs(), k.abs()
    q[:, :, ::3] = 0
    for places in (slice(None), slice(10, 11)):
        scalars = extra.clone()
        scalars[:, :, places, 0] += shift
        leaves = [part.clone().requires_grad_() for part in (q, k, v, scalars)]
        y, _ = attention.attend(*leaves[:3], None, leaves[3])
        assert all_finite((y, *torch.autograd.grad(y.sum(), leaves)))
        empty = attention.init_state(2, 40, CPU, torch.float32)
        stepped, _ = step_through(attention, [q, k, v, None, scalars], empty)
        exact = [part.double() for part in (q, k, v, scalars)]
        expected, _ = build(forget_gate=forget_gate).attend(*exact[:3], None, exact[3])
        # Rounding a scalar near 2000 to float32 changes its exponential by 1e-4.
        for found in (y, stepped):
            assert_agree(found, expected, FLOAT32_DRIFT if abs(shift) < 100 else 1e-2)


def test_outputs_are_not_divided_by_a_small_sum_of_weights() -> None:
    """With small input gates, the denominator is 1, and the output is proportional to the gates."""
    attention, (q, k, v, _, extra) = build(), draw(20)
    extra[..., 0] = -10
    y, _ = attention.attend(q, k, v, None, extra)
    extra[..., 0] = -12
    assert_agree(attention.attend(q, k, v, None, extra)[0], y * math.exp(-2), 1e-12)
    # With large gates, the output is a quotient of sums, and a common factor cancels.
    extra[..., 0] = 50
    y, _ = attention.attend(q, k, v, None, extra)
    extra[..., 0] = 60
    assert_agree(attention.attend(q, k, v, None, extra)[0], y, FLOAT64)
