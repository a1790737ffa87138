"""Compares whole mechanisms with compiled kernels to their reference forms, including one sequence on many threads."""

from typing import Any

import pytest
import torch
from machine import needs_library, use_threads
from tolerances import BFLOAT16, FLOAT64, assert_all_agree
from torch import Tensor

from linformer_cli.attention.base import Attention, AttentionShape, state_tensors
from linformer_cli.attention.kernels.registry import SCALED_OUTPUTS, kernel_for
from linformer_cli.model.mixers import build_attention
from linformer_cli.native.library import reference_only

pytestmark = needs_library

MECHANISMS: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}),
    *(("performer", {"feature_map": name}) for name in ("positive", "hyperbolic")),
    ("rfa", {}),
    ("retention", {}),
    *(("gla", {"gate": gate}) for gate in ("vector", "scalar")),
    ("mlstm", {}),
    ("mamba", {}),
    ("mesa", {"iterations": 12}),
]
every_mechanism = pytest.mark.parametrize(("name", "options"), MECHANISMS)


def build(name: str, options: dict[str, Any], heads: int) -> Attention:
    torch.manual_seed(2)
    return build_attention(name, options, AttentionShape(heads, 7, 5, positions=784, row=28)).double()


def draw(attention: Attention, batch: int, length: int) -> list[Tensor]:
    """q, k, v and, if the mechanism has extra scalars, those."""
    generator = torch.Generator().manual_seed(0)
    widths = [7, 7, 5, *([attention.extra_per_head] if attention.extra_per_head else [])]
    size = batch, attention.shape.heads, length
    q, k, v, *extra = (torch.randn(*size, width, generator=generator, dtype=torch.float64) for width in widths)
    # Most gates are nearly open, and mamba's step sizes are small, so that states have a long memory.
    return [q, k, v, *(x + (-4 if attention.name == "mamba" else 4) for x in extra)]


def differentiate(attention: Attention, inputs: list[Tensor], split: int) -> list[Tensor]:
    """Return the outputs, the final state and all input gradients; positions from `split` on continue from a state."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs, state = [], None
    for piece in (slice(0, split), slice(split, None)):
        q, k, v, *extra = (x[:, :, piece] for x in leaves)
        y, state = attention.attend(q, k, v, state, *(extra or [None]))
        outputs.append(y)
    results = [*outputs, *(x for x in state_tensors(state) if x.requires_grad)]
    generator = torch.Generator().manual_seed(9)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in results]
    return [*results, *torch.autograd.grad(results, leaves, weights)]


@every_mechanism
def test_results_match_the_reference(name: str, options: dict[str, Any]) -> None:
    attention = build(name, options, heads=3)
    inputs = draw(attention, 2, 75)
    found = differentiate(attention, inputs, 40)
    with reference_only():
        expected = differentiate(attention, inputs, 40)
    assert not torch.equal(found[0], expected[0]), "both results come from the same form"
    assert_all_agree(found, expected, FLOAT64)


@every_mechanism
def test_threads_share_the_positions_of_one_sequence(name: str, options: dict[str, Any]) -> None:
    attention = build(name, options, heads=1)
    inputs = draw(attention, 1, 1500)
    with use_threads(1):
        expected = differentiate(attention, inputs, 30)
    for count in (2, 5):
        with use_threads(count):
            found, again = (differentiate(attention, inputs, 30) for _ in range(2))
        assert not torch.equal(found[1], expected[1]), "the positions were not divided"
        assert all(map(torch.equal, found, again))
        assert_all_agree(found, expected, FLOAT64)


@every_mechanism
def test_bfloat16_matches_float32_from_the_same_inputs(name: str, options: dict[str, Any]) -> None:
    attention = build(name, options, heads=3).float()
    inputs = [x.bfloat16() for x in draw(attention, 2, 75)]
    found = differentiate(attention, inputs, 40)
    expected = differentiate(attention, [x.float() for x in inputs], 40)
    assert_all_agree(found, expected, BFLOAT16)


def test_scaled_outputs_keep_nan() -> None:
    values, gate = (torch.ones(1, 2, 3, 5) for _ in range(2))
    for bad in (values, gate):
        bad[0, 1, 2, 3] = torch.nan
    scale = kernel_for(SCALED_OUTPUTS, values, gate)
    y = scale(values, torch.ones_like(gate), 1e-6)
    assert y[0, 1, 2].isnan().all() and y.isnan().sum() == 5
    assert scale(torch.ones_like(values), gate, 1e-6).isnan().sum() == 1
