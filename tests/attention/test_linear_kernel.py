"""Compares the compiled form of linear attention with its reference form."""

import pytest
import torch
from attention.measures import measure_saved_bytes
from loops import loop_over
from machine import needs_library, use_threads
from tolerances import BFLOAT16, FLOAT32_DRIFT, FLOAT64, assert_agree, assert_all_agree
from torch import Tensor

from linformer_cli.attention.base import AttentionShape
from linformer_cli.attention.kernels import cpu_linear as kernels
from linformer_cli.attention.kernels.registry import LINEAR_ATTENTION, find_kernel
from linformer_cli.attention.linear import LinearAttention, LinearOptions
from linformer_cli.native.constants import COMPILED_MAPS
from linformer_cli.native.library import reference_only

pytestmark = needs_library


CPU = torch.device("cpu")


def build(key_width: int, value_width: int, feature_map: str = "elu", heads: int = 3) -> LinearAttention:
    shape = AttentionShape(heads=heads, key_width=key_width, value_width=value_width, positions=784, row=28)
    return LinearAttention(LinearOptions.model_validate({"feature_map": feature_map, "chunk": 16}), shape)


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("feature_map", COMPILED_MAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_stays_nan(feature_map: str, dtype: torch.dtype) -> None:
    """If NaN became a finite feature, a damaged model could give plausible results."""
    attention = build(32, 32, feature_map)
    for place in range(2):
        q, k, v = (draw(1, 3, 20, 32, seed=seed).detach().to(dtype) for seed in range(3))
        (q, k)[place][:, 1, 7, 3] = torch.nan
        y, state = attention.attend(q, k, v)
        damaged = y.isnan().any(dim=-1)[0]
        assert damaged[1].tolist() == [t == 7 if place == 0 else t >= 7 for t in range(20)]
        assert not damaged[0].any() and not damaged[2].any()
        assert bool(state.s[0, 1].isnan().any()) == (place == 1)


@loop_over("feature_map", COMPILED_MAPS)
def test_bfloat16_inputs_have_float32_sums(instruction_set, feature_map: str) -> None:
    attention = build(32, 32, feature_map)
    exact = [draw(2, 3, 300, 32, seed=seed).detach().bfloat16() for seed in range(3)]
    weights = draw(2, 3, 300, 32, seed=3).detach().bfloat16()
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [part.to(dtype).requires_grad_() for part in exact]
        y, state = attention.attend(*inputs)
        assert y.dtype == dtype and state.s.dtype == state.z.dtype == torch.float32
        results.append([y, *state, *torch.autograd.grad(y, inputs, weights.to(dtype))])
    assert_all_agree(*results, BFLOAT16)
    # Only the output is rounded; everything before it is computed in the same way.
    assert torch.equal(results[0][0], results[1][0].bfloat16())


def test_results_match_if_the_reciprocal_of_a_denominator_overflows() -> None:
    """Features are near exp(-46), so their products are among the smallest floats."""
    attention = build(6, 5)
    exact = [draw(2, 3, 150, width, seed=seed) for seed, width in enumerate((6, 6, 5))]
    exact = [x.detach() for x in (0.1 * exact[0] - 46, 0.1 * exact[1] - 46, exact[2])]
    # The output's gradient must be small too: divided by such denominators, a larger one would overflow float32.
    weights = 1e-3 * draw(2, 3, 150, 5, seed=3).detach()
    results = []
    for dtype in (torch.float32, torch.float64):
        inputs = [part.to(dtype).requires_grad_() for part in exact]
        y, _ = attention.attend(*inputs)
        results.append([y, *torch.autograd.grad(y, inputs, weights.to(dtype))])
    for found, expected in zip(*results, strict=True):
        assert_agree(found / expected.abs().max(), expected / expected.abs().max(), FLOAT32_DRIFT)


@loop_over("feature_map", COMPILED_MAPS)
@loop_over(("length", "threads"), [(1, 1), (37, 1), (600, 5)])
def test_the_bidirectional_form_matches_its_reference_form(feature_map: str, length: int, threads: int) -> None:
    """With more threads than heads, a sequence is cut into parts."""
    attention = build(6, 5, feature_map)
    inputs = [draw(2, 3, length, width, seed=seed) for seed, width in enumerate((6, 6, 5))]
    weights, lengths = draw(2, 3, length, 5, seed=4).detach(), torch.tensor([length, length // 2])

    def run() -> list[Tensor]:
        y = attention.attend_all(*inputs, lengths)
        return [y, *torch.autograd.grad(y, inputs, weights)]

    with use_threads(threads):
        found = run()
    with reference_only():
        expected = run()
    assert_all_agree(found, expected, FLOAT64)
    saved = [measure_saved_bytes(attention.attend_all, *inputs)]
    with reference_only():
        saved.append(measure_saved_bytes(attention.attend_all, *inputs))
    assert saved[0] < saved[1], "no compiled kernel was used"


def test_unsupported_maps_devices_and_types_are_not_compiled() -> None:
    def found(feature_map: str, device: torch.device, dtype: torch.dtype) -> bool:
        return find_kernel(LINEAR_ATTENTION, device, dtype, (6, 5), feature_map) is not None

    assert found("elu", CPU, torch.float64)
    assert not found("poly2", CPU, torch.float64)
    assert not found("elu", torch.device("cuda"), torch.float32)
    assert not found("elu", CPU, torch.float16)
    assert not build(6, 5).is_compiled(torch.device("cuda"), torch.float32)


def test_mixed_types_use_the_reference_form() -> None:
    attention = build(8, 8)
    q, k, v = (draw(2, 3, 40, 8, seed=seed).detach() for seed in range(3))
    expected, _ = attention.attend(q, k, v)
    assert_agree(attention.attend(q, k, v.float())[0], expected, 1e-6)
    with pytest.raises(ValueError, match="sizes or types do not match"):
        kernels.attend(q, k, v.float(), None, None, "elu")


@pytest.mark.parametrize("wrong", ["sums", "maxima"])
def test_a_state_of_another_type_is_refused(wrong: str) -> None:
    q, k, v = (torch.randn(2, 3, 9, 8) for _ in range(3))
    before = {"sums": torch.zeros(2, 3, 5, 9), "maxima": torch.zeros(2, 3, 5)}
    kernels.attend_exponential(q, k, v, torch.randn(8, 5), (before["sums"], before["maxima"]))
    before[wrong] = before[wrong].double()
    with pytest.raises(ValueError, match="the state does not match"):
        kernels.attend_exponential(q, k, v, torch.randn(8, 5), (before["sums"], before["maxima"]))
