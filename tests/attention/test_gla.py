"""Tests particular to gated linear attention; test_contract.py covers what all mechanisms share."""

import math
from typing import Any

import pytest
import torch
from attention.arguments import build_one, draw_for
from tolerances import FLOAT64, assert_agree

from linformer_cli.attention.base import AttentionShape
from linformer_cli.attention.gla import GlaAttention
from linformer_cli.model.mixers import build_attention

SHAPE = AttentionShape(heads=2, key_width=4, value_width=5, positions=784, row=28)
every_gate = pytest.mark.parametrize("gate", ["vector", "scalar"])


def build(gate: str = "vector", dtype: torch.dtype = torch.float64, **options: Any) -> GlaAttention:
    return build_one("gla", dtype, key_width=4, gate=gate, **options)


@pytest.mark.parametrize("temperature", [1.0, 16.0, 400.0])
def test_initial_memories_range_from_the_longest_to_the_shortest(temperature: float) -> None:
    """The memory is the number of positions after which a key of ones has decayed to 1/e if the extra scalars are 0."""
    attention = build(temperature=temperature, shortest_memory=10, longest_memory=640)
    q, k, v, _, extra = draw_for(attention, 641)
    k[:, :, 1:] = 0
    for place, memory in enumerate((640, 160, 40, 10)):
        one = [part[:, :, : memory + 1] for part in (q, k, v)]
        _, state = attention.attend(*one, None, torch.zeros_like(extra[:, :, : memory + 1]))
        whole = (k[:, :, 0, :, None] * v[:, :, 0, None])[:, :, place]
        assert_agree(state.s[:, :, place], whole / math.e, FLOAT64)


def test_initial_scalar_gates_equal_retention() -> None:
    attention = build("scalar", output_gate=False)
    q, k, v, _, extra = draw_for(attention)
    retention = build_attention("retention", {"output_gate": False}, SHAPE).double()
    expected, _ = retention.attend(q, k, v)
    assert_agree(attention.attend(q, k, v, None, 0 * extra)[0], expected, FLOAT64)
    assert (attention.attend(q, k, v, None, extra)[0] - expected).abs().max() > 1e-3


@every_gate
def test_casting_to_bfloat16_keeps_the_initial_gates(gate: str) -> None:
    inputs = draw_for(build(gate))
    assert torch.equal(build(gate).bfloat16().attend(*inputs)[0], build(gate).attend(*inputs)[0])
