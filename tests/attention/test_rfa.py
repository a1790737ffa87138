"""Tests particular to random feature attention; test_contract.py covers what all mechanisms share."""

from typing import Any

import pytest
import torch
from loops import loop_over
from tolerances import FLOAT64, assert_agree

from linformer_cli.attention.base import AttentionShape
from linformer_cli.attention.rfa import RfaAttention
from linformer_cli.model.blocks import AttentionLayer
from linformer_cli.model.mixers import build_attention
from linformer_cli.native.library import reference_only

CPU = torch.device("cpu")
with_and_without_gate = pytest.mark.parametrize("gate", [True, False])


def build(dtype: torch.dtype = torch.float64, width: int = 6, **options: Any) -> RfaAttention:
    torch.manual_seed(2)
    shape = AttentionShape(heads=2, key_width=width, value_width=5, positions=784, row=28)
    attention = build_attention("rfa", options, shape).to(dtype)
    assert isinstance(attention, RfaAttention)
    return attention


def draw(length: int, gate: bool = True, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Draw q, k, v, no state, and the scalar of the gate."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, extra = (
        torch.randn(2, 2, length, width, generator=generator, dtype=torch.float64).to(dtype) for width in (6, 6, 5, 1)
    )
    return [q, k, v, None, extra if gate else None]


def test_the_defaults_are_a_gate_and_2_k_frequencies() -> None:
    attention = build(width=8)
    assert (attention.extra_per_head, attention.extra_bias, attention.frequencies) == (1, 5.0, 16)
    assert attention.directions.shape == (16, 8)
    assert attention.init_state(1, 1, CPU, torch.float32).s.shape == (1, 2, 32, 6)
    assert build(gate=False).extra_per_head == 0
    assert build(frequencies=7).init_state(1, 1, CPU, torch.float32).s.shape == (1, 2, 14, 6)


@with_and_without_gate
def test_the_layer_projects_a_gate_that_starts_nearly_open(gate: bool, build_tiny_model: Any) -> None:
    model = build_tiny_model(attention="rfa", attention_options={"gate": gate})
    layer = model.blocks[0].attention
    assert isinstance(layer, AttentionLayer)
    bias = layer.input.bias
    assert (bias[-2:] == 5).all() == gate
    assert not bias[:-2].any()


def test_a_gate_without_its_scalar_is_refused() -> None:
    attention = build()
    q, k, v, *_ = draw(3)
    with pytest.raises(ValueError, match="rfa needs extra scalars"):
        attention.attend(q, k, v)
    with pytest.raises(ValueError, match="rfa needs extra scalars"):
        attention.step(q[:, :, 0], k[:, :, 0], v[:, :, 0], attention.init_state(2, 3, CPU, torch.float64))


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
def test_outputs_do_not_depend_on_the_norms_of_queries_and_keys(gate: bool) -> None:
    attention = build(gate=gate)
    q, k, v, state, extra = draw(40, gate)
    expected, _ = attention.attend(q, k, v, state, extra)
    found, _ = attention.attend(1e-3 * q, 1e3 * k, v, state, extra)
    assert_agree(found, expected, FLOAT64)


@with_and_without_gate
def test_zero_queries_and_keys_give_finite_results(gate: bool) -> None:
    attention = build(gate=gate)
    q, k, v, state, extra = draw(40, gate)
    q[:, :, ::3], k[:, :, ::2] = 0, 0
    leaves = [part.requires_grad_() for part in (q, k, v)]
    y, _ = attention.attend(q, k, v, state, extra)
    for tensor in (y, *torch.autograd.grad(y.sum(), leaves)):
        assert bool(torch.isfinite(tensor).all())


def test_without_a_gate_the_total_weight_counts_positions() -> None:
    attention = build(gate=False)
    q, k, v, *_ = draw(40)
    _, state = attention.attend(q[:, :, :15], k[:, :, :15], v[:, :, :15])
    assert bool((state.n == 15).all())
    _, state = attention.attend(q[:, :, 15:39], k[:, :, 15:39], v[:, :, 15:39], state)
    assert bool((state.n == 39).all())
    _, state = attention.step(q[:, :, 39], k[:, :, 39], v[:, :, 39], state)
    assert bool((state.n == 40).all())


def test_with_a_gate_the_total_weight_follows_its_recurrence() -> None:
    attention = build()
    inputs = draw(40)
    gate = inputs[4][..., 0].sigmoid()
    total = torch.zeros(2, 2, dtype=torch.float64)
    for t in range(40):
        total = gate[:, :, t] * total + 1 - gate[:, :, t]
    assert_agree(attention.attend(*inputs)[1].n, total, FLOAT64)


@loop_over("dtype", [torch.float32, torch.float64])
@loop_over("open_by", [15.0, 60.0, 2000.0])
def test_open_and_closed_gates_give_finite_results(dtype: torch.dtype, open_by: float) -> None:
    attention = build(dtype)
    q, k, v, state, extra = draw(40, dtype=dtype)
    for shift in (open_by, -open_by):
        leaves = [part.detach().requires_grad_() for part in (q, k, v, extra + shift)]
        y, _ = attention.attend(*leaves[:3], state, leaves[3])
        for tensor in (y, *torch.autograd.grad(y.sum(), leaves)):
            assert bool(torch.isfinite(tensor).all())
        carried, outputs = attention.init_state(2, 40, CPU, dtype), []
        for t in range(40):
            y_t, carried = attention.step(*(part.detach()[:, :, t] for part in leaves[:3]), carried, leaves[3][:, :, t])
            outputs.append(y_t)
        # With open gates, the first sums are tiny but no less accurate.
        torch.testing.assert_close(torch.stack(outputs, dim=2), y.detach(), rtol=1e-3, atol=1e-3)
    # Closed gates keep nothing, so every position sees only itself.
    for t in range(0, 40, 7):
        single, _ = attention.attend(*(part[:, :, t : t + 1] for part in leaves[:3]), None, leaves[3][:, :, t : t + 1])
        torch.testing.assert_close(y[:, :, t : t + 1], single, rtol=1e-4, atol=1e-4)


def test_a_half_open_gate_forgets() -> None:
    attention = build()
    q, k, v, state, extra = draw(60)
    changed = v.clone()
    changed[:, :, :10] += 100
    before, after = (attention.attend(q, k, part, state, torch.zeros_like(extra))[0] for part in (v, changed))
    change = (after - before).abs().amax(dim=(0, 1, 3))
    assert change[10] > 1
    assert change[59] < 1e-8
    before, after = (build(gate=False).attend(q, k, part)[0] for part in (v, changed))
    assert (after - before)[:, :, 59].abs().max() > 1


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


@with_and_without_gate
@loop_over("chunk", [1, 7, 40, 41, 1000])
def test_the_result_does_not_depend_on_the_chunk(gate: bool, chunk: int) -> None:
    inputs = draw(40, gate)
    expected, expected_state = build(gate=gate, chunk=16).attend(*inputs)
    with reference_only():  # the compiled form has no chunks
        y, state = build(gate=gate, chunk=chunk).attend(*inputs)
    assert_agree(y, expected, FLOAT64)
    for found, other in zip(state, expected_state, strict=True):
        assert_agree(found, other, FLOAT64)
