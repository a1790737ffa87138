"""Compares the fused step of linear attention with its reference form, on a GPU or in Triton's interpreter."""

import pytest
import torch
from loops import loop_over
from machine import NO_TRITON, TRITON_DEVICE
from tolerances import assert_agree
from torch import Tensor

from linformer_cli.attention.base import AttentionShape
from linformer_cli.attention.kernels import registry
from linformer_cli.attention.linear import LinearAttention, LinearOptions, LinearState
from linformer_cli.attention.parts.folded_sums import build_folded_state, step_folded

pytest.importorskip("triton", reason=NO_TRITON)

FLOAT32, BFLOAT16 = 1e-5, 1e-2
POSITIONS = 9


@pytest.fixture(autouse=True)
def _with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "has_triton", lambda device: True)


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(TRITON_DEVICE, dtype)


def build(feature_map: str, key_width: int, value_width: int) -> LinearAttention:
    shape = AttentionShape(heads=2, key_width=key_width, value_width=value_width, positions=784, row=28)
    return LinearAttention(LinearOptions.model_validate({"feature_map": feature_map}), shape)


def draw_state(key_width: int, value_width: int) -> LinearState:
    """Draw a state that holds the sums of some earlier positions."""
    return LinearState(draw(2, 2, key_width, value_width, seed=3), draw(2, 2, key_width, seed=4).abs() + 1)


def step_through(
    attention: LinearAttention, inputs: list[Tensor], state: LinearState, fold: int | None, first: int = 0
) -> Tensor:
    """Return the outputs [B, H, T, V]. Steps are counted from `first` and use the reference form if `fold` is None."""
    steps = torch.tensor(first, device=TRITON_DEVICE)
    summed = LinearState(*(part.clone() for part in state))
    folded = None if fold is None else build_folded_state(*summed, steps, inputs[0].dtype, fold)
    outputs = []
    for step in zip(*(part.unbind(dim=2) for part in inputs), strict=True):
        if folded is None:
            outputs.append(attention.step(*step, summed)[0])
        else:
            outputs.append(step_folded(*step, folded, attention.options.feature_map))
        steps += 1
    return torch.stack(outputs, dim=2)


@loop_over(
    ("feature_map", "key_width", "value_width", "fold"), [("elu", 16, 32, 1), ("elu", 16, 32, 4), ("relu", 16, 16, 2)]
)
def test_outputs_match_the_reference_form_for_any_number_of_pending_pairs(feature_map, fold, key_width, value_width):
    attention, state = build(feature_map, key_width, value_width), draw_state(key_width, value_width)
    widths = (key_width, key_width, value_width)
    inputs = [draw(2, 2, POSITIONS, width, seed=seed) for seed, width in enumerate(widths)]
    expected = step_through(attention, inputs, state, None)
    assert_agree(step_through(attention, inputs, state, fold), expected, FLOAT32)


@pytest.mark.parametrize("first", [1, 3])
def test_steps_may_start_at_any_number(first: int) -> None:
    attention, state = build("elu", 16, 16), draw_state(16, 16)
    inputs = [draw(2, 2, POSITIONS, 16, seed=seed) for seed in range(3)]
    expected = step_through(attention, inputs, state, None)
    assert_agree(step_through(attention, inputs, state, 4, first), expected, FLOAT32)


def test_the_sums_are_written_once_per_fold() -> None:
    attention, (s, z) = build("elu", 16, 16), draw_state(16, 16)
    steps = torch.zeros((), dtype=torch.int64, device=TRITON_DEVICE)
    state = build_folded_state(s, z, steps, torch.float32, 4)
    keys, values = draw(9, 2, 2, 16, seed=0), draw(9, 2, 2, 16, seed=1)
    expected = s.clone()
    for position in range(9):
        before = s.clone()
        step_folded(keys[position], keys[position], values[position], state, "elu")
        steps += 1
        expected += attention.feature_map(keys[position]).unsqueeze(-1) * values[position].unsqueeze(-2)
        if position % 4 == 3:
            assert_agree(state.s, expected, FLOAT32)
        else:
            assert torch.equal(state.s, before)
    assert_agree(state.z, draw_state(16, 16).z + attention.feature_map(keys).sum(dim=0), FLOAT32)


def test_strided_inputs_give_the_same_outputs_as_contiguous_ones() -> None:
    attention, state = build("elu", 16, 16), draw_state(16, 16)
    projected = draw(2, 96, seed=0)
    parts = [part.unflatten(-1, (2, 16)) for part in projected.split(32, dim=-1)]
    outputs = [
        step_through(attention, [part.unsqueeze(2) for part in inputs], state, 4)
        for inputs in (parts, [part.contiguous() for part in parts])
    ]
    assert torch.equal(*outputs)


def test_bfloat16_inputs_have_float32_sums() -> None:
    attention, state = build("elu", 16, 16), draw_state(16, 16)
    inputs = [draw(2, 2, POSITIONS, 16, seed=seed, dtype=torch.bfloat16) for seed in range(3)]
    expected = step_through(attention, [part.float() for part in inputs], state, None)
    found = step_through(attention, inputs, state, 4)
    assert found.dtype == torch.bfloat16
    # The outputs are rounded once, at the end.
    assert torch.equal(found, expected.bfloat16()) or (found.float() - expected).abs().max() < BFLOAT16


def test_outputs_without_weight_are_zero() -> None:
    attention = build("relu", 16, 16)
    state = LinearState(*(torch.zeros_like(part) for part in draw_state(16, 16)))
    inputs = [-draw(2, 2, 5, 16, seed=seed).abs() for seed in range(3)]
    assert not step_through(attention, inputs, state, 2).any()
