"""Tests particular to gated linear attention; test_contract.py covers what all mechanisms share."""

import math
from typing import Any

import pytest
import torch
from loops import loop_over
from tolerances import FLOAT64, assert_agree

from linformer_cli.attention.base import AttentionShape
from linformer_cli.attention.gla import GlaAttention
from linformer_cli.errors import UsageError
from linformer_cli.model.blocks import AttentionLayer
from linformer_cli.model.mixers import build_attention, parse_options
from linformer_cli.native.library import reference_only

CPU = torch.device("cpu")
SHAPE = AttentionShape(heads=2, key_width=4, value_width=5, positions=784, row=28)
every_gate = pytest.mark.parametrize("gate", ["vector", "scalar"])


def build(gate: str = "vector", dtype: torch.dtype = torch.float64, **options: Any) -> GlaAttention:
    attention = build_attention("gla", {"gate": gate, **options}, SHAPE).to(dtype)
    assert isinstance(attention, GlaAttention)
    return attention


def draw(attention: GlaAttention, length: int = 40, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Draw q, k, v, no state, and the extra scalars."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, extra = (
        torch.randn(2, 2, length, width, generator=generator, dtype=torch.float64).to(dtype)
        for width in (4, 4, 5, attention.extra_per_head)
    )
    return [q, k, v, None, extra]


def test_extra_scalars_are_counted_for_the_gates_and_the_output_gate() -> None:
    assert build().extra_per_head == 4 + 5
    assert build(output_gate=False).extra_per_head == 4
    assert build("scalar").extra_per_head == 1 + 5
    assert build("scalar", output_gate=False).extra_per_head == 1


@pytest.mark.parametrize("temperature", [1.0, 16.0, 400.0])
def test_initial_memories_range_from_the_longest_to_the_shortest(temperature: float) -> None:
    """The memory is the number of positions after which a key of ones has decayed to 1/e if the extra scalars are 0."""
    attention = build(temperature=temperature, shortest_memory=10, longest_memory=640)
    q, k, v, _, extra = draw(attention, 641)
    k[:, :, 1:] = 0
    for place, memory in enumerate((640, 160, 40, 10)):
        one = [part[:, :, : memory + 1] for part in (q, k, v)]
        _, state = attention.attend(*one, None, torch.zeros_like(extra[:, :, : memory + 1]))
        whole = (k[:, :, 0, :, None] * v[:, :, 0, None])[:, :, place]
        assert_agree(state.s[:, :, place], whole / math.e, FLOAT64)


def test_initial_scalar_gates_equal_retention() -> None:
    attention = build("scalar", output_gate=False)
    q, k, v, _, extra = draw(attention)
    retention = build_attention("retention", {"output_gate": False}, SHAPE).double()
    expected, _ = retention.attend(q, k, v)
    assert_agree(attention.attend(q, k, v, None, 0 * extra)[0], expected, FLOAT64)
    assert (attention.attend(q, k, v, None, extra)[0] - expected).abs().max() > 1e-3


@every_gate
def test_casting_to_bfloat16_keeps_the_initial_gates(gate: str) -> None:
    inputs = draw(build(gate))
    assert torch.equal(build(gate).bfloat16().attend(*inputs)[0], build(gate).attend(*inputs)[0])


@every_gate
def test_the_projection_of_gates_has_no_initial_bias(gate: str, build_tiny_model: Any) -> None:
    model = build_tiny_model(attention="gla", attention_options={"gate": gate})
    layer = model.blocks[0].attention
    assert isinstance(layer, AttentionLayer)
    rows = layer.input_rows["extra"]
    assert rows.stop - rows.start == layer.heads * layer.inner.extra_per_head
    assert not layer.input.bias.any()
    assert set(layer.inner.state_dict()) == set()


@every_gate
def test_missing_gates_are_refused(gate: str) -> None:
    attention = build(gate, output_gate=False)
    q, k, v, *_ = draw(attention, 3)
    with pytest.raises(ValueError, match="extra scalars"):
        attention.attend(q, k, v)
    with pytest.raises(ValueError, match="extra scalars"):
        attention.step(q[:, :, 0], k[:, :, 0], v[:, :, 0], attention.init_state(2, 3, CPU, torch.float64))


def test_a_chunk_that_cannot_be_halved_is_refused(raises_one_line: Any) -> None:
    with raises_one_line(UsageError, "'gla': chunk", "power of two", "found 24"):
        parse_options("gla", {"chunk": 24})


@every_gate
@loop_over("dtype", [torch.float32, torch.float64])
@loop_over("open_by", [15.0, 60.0, 2000.0])
@loop_over("temperature", [1.0, 16.0])
def test_open_and_closed_gates_give_finite_results(
    gate: str, dtype: torch.dtype, open_by: float, temperature: float
) -> None:
    attention = build(gate, dtype, temperature=temperature, output_gate=False)
    q, k, v, state, extra = draw(attention, dtype=dtype)
    for shift in (open_by, -open_by):
        leaves = [part.detach().requires_grad_() for part in (q, k, v, extra + shift)]
        y, _ = attention.attend(*leaves[:3], state, leaves[3])
        for tensor in (y, *torch.autograd.grad(y.sum(), leaves)):
            assert bool(torch.isfinite(tensor).all())
        carried, outputs = attention.init_state(2, 40, CPU, dtype), []
        for t in range(40):
            y_t, carried = attention.step(*(part.detach()[:, :, t] for part in leaves[:3]), carried, leaves[3][:, :, t])
            outputs.append(y_t)
        torch.testing.assert_close(torch.stack(outputs, dim=2), y.detach(), rtol=1e-3, atol=1e-3)


@every_gate
def test_a_closed_gate_forgets(gate: str) -> None:
    attention = build(gate)
    q, k, v, state, extra = draw(attention)
    extra[:, :, 20, : attention.gates["decay"]] = -1e5
    changed = v.clone()
    changed[:, :, :20] += 100
    before, after = (attention.attend(q, k, part, state, extra)[0] for part in (v, changed))
    assert (after - before)[:, :, 19].abs().max() > 0.1
    assert_agree(after[:, :, 20:], before[:, :, 20:], FLOAT64)


@every_gate
@loop_over("chunk", [1, 2, 32, 64, 1024])
def test_the_result_does_not_depend_on_the_chunk(gate: str, chunk: int) -> None:
    attention = build(gate, chunk=16)
    inputs = draw(attention)
    expected, expected_state = attention.attend(*inputs)
    with reference_only():  # the compiled form has no chunks
        y, state = build(gate, chunk=chunk).attend(*inputs)
    assert_agree(y, expected, FLOAT64)
    assert_agree(state.s, expected_state.s, FLOAT64)
