"""Tests of softmax attention's cache; test_contract.py covers what all mechanisms share."""

import functools

import pytest
import torch
from attention.arguments import build_one, draw_parts, step_through
from attention.cases.softmax import softmax
from tolerances import FLOAT64, assert_agree

from linformer_cli.attention.base import AttentionShape, measure_state_bytes
from linformer_cli.model.mixers import build_attention

CPU = torch.device("cpu")


build = functools.partial(build_one, "softmax")


@pytest.mark.parametrize("capacity", [1, 2, 10])
def test_a_full_cache_grows_without_loss(capacity: int) -> None:
    attention, inputs = build(), draw_parts(25)
    y, state = step_through(attention, inputs, attention.init_state(2, capacity, CPU, torch.float64))
    assert_agree(y, softmax(*inputs), FLOAT64)
    assert int(state.position) == 25
    assert 25 <= state.keys.shape[2] < 50, "the capacity must grow by doubling, and no further than needed"
    assert torch.equal(state.keys[:, :, :25], inputs[1])
    assert torch.equal(state.values[:, :, :25], inputs[2])


def test_steps_within_the_capacity_allocate_nothing() -> None:
    attention, inputs = build(), draw_parts(25)
    state = attention.init_state(2, 25, CPU, torch.float64)
    place, size = state.keys.data_ptr(), measure_state_bytes(state)
    _, state = step_through(attention, inputs, state)
    assert state.keys.data_ptr() == place
    assert measure_state_bytes(state) == size == attention.state_bytes(2, 25, torch.float64)


def test_unused_capacity_is_never_read() -> None:
    attention, inputs = build(), draw_parts(25)
    state = attention.init_state(2, 40, CPU, torch.float64)
    state.keys.fill_(torch.nan)
    state.values.fill_(torch.nan)
    y, state = attention.attend(*(part[:, :, :12] for part in inputs), state)
    assert state.keys.shape[2] == 40, "the requested capacity must be kept"
    rest, _ = step_through(attention, inputs, state, start=12)
    assert_agree(torch.cat([y, rest], dim=2), softmax(*inputs), FLOAT64)


@pytest.mark.parametrize(("inside", "outside"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_the_cache_and_the_inputs_may_have_different_types(inside: torch.dtype, outside: torch.dtype) -> None:
    """For example, a cache may be filled under autocast and then used by steps outside autocast."""
    attention, inputs = build(), draw_parts(9)
    expected, _ = attention.attend(*inputs)
    _, state = attention.attend(*(part[:, :, :5].to(inside) for part in inputs), None)
    rest = tuple(part[:, :, 5:].to(outside) for part in inputs)
    y, _ = attention.attend(*rest, state)
    stepped, _ = step_through(attention, rest, state)
    for found in (y, stepped):
        assert found.dtype == outside
        assert float((found - expected[:, :, 5:]).abs().max()) < 0.05


def test_huge_keys_as_wide_as_values_give_finite_gradients() -> None:
    """torch's fused form, which needs equal widths, would give NaN for these keys."""
    mechanism = build_attention("softmax", {}, AttentionShape(2, 6, 6, positions=784, row=28))
    q, k, v = (torch.randn(2, 2, 40, 6, generator=torch.Generator().manual_seed(part)) for part in range(3))
    k[:, :, 20:21] *= 1e20
    leaves = [part.requires_grad_() for part in (q, k, v)]
    y, _ = mechanism.attend(*leaves)
    assert all(bool(gradient.isfinite().all()) for gradient in torch.autograd.grad(y.sum(), leaves))
