"""Compares the step of softmax attention over a cache with its reference form, with and without Triton."""

import pytest
import torch
from loops import loop_over
from machine import NO_TRITON, TRITON_DEVICE
from tolerances import assert_agree
from torch import Tensor

from linformer_cli.attention.base import AttentionShape
from linformer_cli.attention.kernels import registry
from linformer_cli.attention.parts.caches import FixedCache, step_fixed_cache
from linformer_cli.attention.softmax import SoftmaxAttention, SoftmaxOptions

FLOAT32, BFLOAT16 = 1e-5, 1e-2
POSITIONS = 11


@pytest.fixture(autouse=True, params=["torch", "triton", "parts"])
def _form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs every test in plain torch and in Triton, where a cache is one part, or four."""
    if request.param != "torch":
        triton_steps = pytest.importorskip("linformer_cli.attention.kernels.triton_steps", reason=NO_TRITON)
        monkeypatch.setattr(triton_steps, "BLOCK_ELEMENTS", 32)  # several blocks per cache
        monkeypatch.setattr(triton_steps, "LEAST_ROWS", 2)
    monkeypatch.setattr(registry, "has_triton", lambda device: request.param != "torch")
    monkeypatch.setattr(registry, "_fuses_steps", request.param == "parts")


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(TRITON_DEVICE, dtype)


def draw_inputs(key_width: int = 16, value_width: int = 16, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    widths = (key_width, key_width, value_width)
    return [draw(2, 2, POSITIONS, width, seed=seed, dtype=dtype) for seed, width in enumerate(widths)]


def attend(inputs: list[Tensor]) -> Tensor:
    """Return the outputs [B, H, T, V] of the parallel form."""
    shape = AttentionShape(2, inputs[1].shape[3], inputs[2].shape[3], POSITIONS, row=POSITIONS)
    with torch.no_grad():
        return SoftmaxAttention(SoftmaxOptions(), shape).attend(*inputs)[0]


def build_cache(inputs: list[Tensor], known: int = 0) -> FixedCache:
    """Build a cache that holds the first `known` positions. The places after them hold large numbers."""
    keys, values = (torch.full_like(part, 1e4) for part in inputs[1:])
    keys[:, :, :known], values[:, :, :known] = inputs[1][:, :, :known], inputs[2][:, :, :known]
    return FixedCache(keys, values, torch.tensor(known, device=TRITON_DEVICE))


def step_through(inputs: list[Tensor], state: FixedCache) -> Tensor:
    """Return the outputs [B, H, T, V] of the remaining positions."""
    outputs = []
    for position in range(int(state.place), POSITIONS):
        outputs.append(step_fixed_cache(*(part[:, :, position] for part in inputs), state))
        state.place.add_(1)
    return torch.stack(outputs, dim=2)


@loop_over(("key_width", "value_width", "known"), [(16, 32, 0), (32, 16, 6)])
def test_outputs_match_the_reference_form(key_width: int, value_width: int, known: int) -> None:
    inputs = draw_inputs(key_width, value_width)
    state = build_cache(inputs, known)
    assert_agree(step_through(inputs, state), attend(inputs)[:, :, known:], FLOAT32)
    assert torch.equal(state.keys, inputs[1]) and torch.equal(state.values, inputs[2])


def test_huge_scores_do_not_overflow() -> None:
    inputs = draw_inputs()
    inputs[0] *= 100  # the highest scores are above 200, where float32 overflows at an exponential of 89
    assert_agree(step_through(inputs, build_cache(inputs)), attend(inputs), 1e-4)


def test_strided_inputs_give_the_same_outputs_as_contiguous_ones() -> None:
    projected = draw(2, POSITIONS, 96, seed=0)
    parts = [part.unflatten(-1, (2, 16)).transpose(1, 2) for part in projected.split(32, dim=-1)]
    dense = [part.contiguous() for part in parts]
    assert torch.equal(step_through(parts, build_cache(dense)), step_through(dense, build_cache(dense)))


def test_bfloat16_outputs_match_those_of_float32() -> None:
    inputs = draw_inputs(dtype=torch.bfloat16)
    found = step_through(inputs, build_cache(inputs))
    assert found.dtype == torch.bfloat16
    assert (found.float() - attend([part.float() for part in inputs])).abs().max() < BFLOAT16
