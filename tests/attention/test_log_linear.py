"""Tests particular to log-linear attention; test_contract.py covers what all mechanisms share."""

import math
from typing import Any

import pytest
import torch
from loops import loop_over
from tolerances import FLOAT32_DRIFT, FLOAT64, assert_agree
from torch import Tensor

from linformer_cli.attention.base import AttentionShape
from linformer_cli.attention.log_linear import LogLinearAttention, LogLinearState
from linformer_cli.errors import UsageError
from linformer_cli.model.blocks import AttentionLayer
from linformer_cli.model.mixers import build_attention, parse_options

CPU = torch.device("cpu")
OVER = ("linear", "mamba2", "deltanet")
every_base = pytest.mark.parametrize("over", OVER)
# The softplus of this scalar is 2000, and its sigmoid is 1. For its negative, both are 0.
CERTAIN = 2000.0


def build(over: str, positions: int = 784, heads: int = 2, **options: Any) -> LogLinearAttention:
    shape = AttentionShape(heads, key_width=6, value_width=5, positions=positions, row=min(28, positions))
    attention = build_attention("log_linear", {"over": over, **options}, shape).double()
    assert isinstance(attention, LogLinearAttention)
    return attention


def draw(attention: LogLinearAttention, length: int) -> list[Any]:
    """Draw q, k, v, no state, and the extra scalars."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, extra = (
        torch.randn(2, attention.shape.heads, length, width, generator=generator, dtype=torch.float64)
        for width in (6, 6, 5, attention.extra_per_head)
    )
    return [q, k, v, None, extra]


def step_through(attention: LogLinearAttention, inputs: list[Any], capacity: int) -> tuple[Tensor, LogLinearState]:
    q, k, v, _, extra = (None if part is None else part.detach() for part in inputs)
    state, outputs = attention.init_state(len(v), capacity, CPU, v.dtype), []
    for t in range(v.shape[2]):
        y_t, state = attention.step(q[:, :, t], k[:, :, t], v[:, :, t], state, extra[:, :, t])
        outputs.append(y_t)
    return torch.stack(outputs, dim=2), state


@every_base
@loop_over(("positions", "levels"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (784, 11), (1024, 11)])
def test_the_number_of_levels_is_one_plus_log2_of_the_positions(over: str, positions: int, levels: int) -> None:
    attention = build(over, positions)
    assert attention.extra_per_head == levels + OVER.index(over)
    assert len(attention.init_state(1, positions, CPU, torch.float32).s[0, 0]) == int(math.log2(positions)) + 1


@every_base
def test_the_layer_projects_the_weights(over: str, build_tiny_model: Any) -> None:
    layer = build_tiny_model(attention="log_linear", attention_options={"over": over}).blocks[0].attention
    assert isinstance(layer, AttentionLayer)
    assert layer.widths[-1] == layer.inner.extra_per_head
    assert not layer.input.bias.any()


@every_base
def test_a_wrong_number_of_scalars_is_refused(over: str) -> None:
    attention = build(over)
    q, k, v, _, extra = draw(attention, 3)
    for wrong in (None, extra[..., 1:]):
        with pytest.raises(ValueError, match=rf"needs extra scalars \[B, H, T, {attention.extra_per_head}\]"):
            attention.attend(q, k, v, None, wrong)


def test_a_chunk_that_is_not_a_power_of_two_is_refused(raises_one_line: Any) -> None:
    with raises_one_line(UsageError, "'log_linear': chunk", "power of two", "found 24"):
        parse_options("log_linear", {"chunk": 24})


@pytest.mark.parametrize("length", [1, 2, 12, 13, 40])
def test_bucket_b_holds_two_to_the_b_positions(length: int) -> None:
    """With linear attention as the base, a bucket is the sum of phi(k) v^T over its positions."""
    attention = build("linear", chunk=8)
    q, k, v, state, extra = draw(attention, length)
    s = attention.attend(q, k, v, state, extra)[1].s
    terms = torch.where(k > 0, k + 1, k.exp()).unsqueeze(-1) * torch.nn.functional.pad(v, (0, 1), value=1).unsqueeze(-2)
    end = 0
    for bucket in reversed(range(s.shape[2])):
        start, end = end, end + (length & 1 << bucket)
        assert_agree(s[:, :, bucket], terms[:, :, start:end].sum(dim=2), FLOAT64)
    assert end == length


@every_base
def test_only_the_buckets_of_levels_with_a_weight_are_read(over: str) -> None:
    """Position 13 reads itself at level 0, position 12 at level 1, 8 to 11 at level 3, and 0 to 7 at level 4."""
    attention = build(over, chunk=4)
    q, k, v, state, extra = draw(attention, 14)
    for level, seen in {0: range(13, 14), 1: range(12, 13), 3: range(8, 12), 4: range(8)}.items():
        scales = torch.full_like(extra[..., OVER.index(over) :], -CERTAIN)
        scales[..., level] = 0
        only = torch.cat([extra[..., : OVER.index(over)], scales], dim=-1)
        v.requires_grad_()
        y, _ = attention.attend(q, k, v, state, only)
        (gradient,) = torch.autograd.grad(y[:, :, 13].sum(), v)
        # Over linear attention, the smallest weight is exp(-64), not 0.
        assert (gradient.abs().sum(dim=(0, 1, 3)) > 1e-20).nonzero().flatten().tolist() == list(seen)


@pytest.mark.parametrize("over", ["linear", "deltanet"])
def test_equal_weights_give_the_base_mechanism(over: str) -> None:
    attention = build(over)
    q, k, v, state, extra = draw(attention, 100)
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
    q, k, v, state, extra = draw(attention, 50)
    assert attention.levels == 5
    last = extra[..., -1:].expand(-1, -1, -1, larger.levels - attention.levels)
    larger.load_state_dict(attention.state_dict())
    expected, _ = larger.attend(q, k, v, state, torch.cat([extra, last], dim=-1))
    assert_agree(attention.attend(q, k, v, state, extra)[0], expected, FLOAT64)
    # The state has room for 16 positions and grows.
    y, state = step_through(attention, [q, k, v, None, extra], 16)
    assert_agree(y, expected, FLOAT64)
    assert state.s.shape[2] == 6


@every_base
@loop_over("chunk", [1, 2, 32, 1024])
def test_the_result_does_not_depend_on_the_chunk(over: str, chunk: int) -> None:
    inputs = draw(build(over), 40)
    expected, expected_state = build(over, chunk=16).attend(*inputs)
    y, state = build(over, chunk=chunk).attend(*inputs)
    assert_agree(y, expected, FLOAT64)
    assert_agree(state.s, expected_state.s, FLOAT64)


@pytest.mark.parametrize("over", ["mamba2", "deltanet"])
@pytest.mark.parametrize("shift", [60.0, CERTAIN])
def test_open_and_closed_gates_give_finite_results(over: str, shift: float) -> None:
    attention = build(over).float()
    q, k, v, state, extra = (None if part is None else part.float() for part in draw(attention, 80))
    for sign in (torch.ones(80), -torch.ones(80), torch.ones(80).index_fill(0, torch.arange(0, 80, 7), -1)):
        shifted = extra.clone()
        shifted[..., OVER.index(over) - 1] += shift * sign
        leaves = [part.detach().requires_grad_() for part in (q, k, v, shifted)]
        y, _ = attention.attend(*leaves[:3], state, leaves[3])
        for tensor in (y, *torch.autograd.grad(y.sum(), leaves)):
            assert bool(torch.isfinite(tensor).all())
        assert_agree(y, step_through(attention, [*leaves[:3], None, leaves[3]], 80)[0], 1e-3)


@pytest.mark.parametrize("chunk", [32, 128])
def test_the_triangular_system_is_solved_accurately_for_a_repeated_key(chunk: int) -> None:
    """Beta is 1 and the gate is open, so no error decays."""
    attention = build("deltanet", chunk=chunk)
    q, k, v, _, extra = draw(attention, 130)
    extra[..., :2] += CERTAIN
    for keys in (k[:, :, :1].expand_as(k), k[:, :, :1] + 1e-4 * k, k[:, :, :2].repeat(1, 1, 65, 1)):
        inputs = [q, keys, v, None, extra]
        _, expected = step_through(attention, inputs, 130)
        assert_agree(attention.attend(*inputs)[1].s, expected.s, FLOAT64)
        single = [None if part is None else part.float() for part in inputs]
        assert_agree(attention.attend(*single)[1].s, expected.s, FLOAT32_DRIFT)
