"""Tests particular to log-linear attention; test_contract.py covers what all mechanisms share."""

import math
from typing import Any

import pytest
import torch
from attention.arguments import build_one, draw_for, step_through
from loops import loop_over
from tolerances import FLOAT32_DRIFT, FLOAT64, assert_agree

from linformer_cli.attention.log_linear import LogLinearAttention
from linformer_cli.attention.parts.level_sums import count_buckets, count_carries
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


@pytest.mark.parametrize("length", [1, 2, 12, 13, 40])
def test_bucket_b_holds_two_to_the_b_positions(length: int) -> None:
    """With linear attention as the base, a bucket is the sum of phi(k) v^T over its positions."""
    attention = build("linear", chunk=8)
    q, k, v, state, extra = draw_for(attention, length)
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
    q, k, v, state, extra = draw_for(attention, 14)
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


def test_a_position_is_merged_with_the_buckets_of_its_trailing_one_bits() -> None:
    buckets: set[int] = set()
    for position in range(200):
        carries = count_carries(position)
        assert buckets >= set(range(carries)) and carries not in buckets
        buckets = (buckets - set(range(carries))) | {carries}
        assert sum(2**bucket for bucket in buckets) == position + 1
        assert max(buckets) == count_buckets(position + 1) - 1
