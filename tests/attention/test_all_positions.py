"""The contract of the bidirectional forms: every mechanism that has `attend_all` must pass these tests."""

import math
from typing import Any

import pytest
import torch
from attention.inputs import Case, mark_variants
from attention.measures import measure_saved_bytes
from attention.mechanisms import CASES, assert_gradients_agree, build, run_oracle
from loops import loop_over
from tolerances import BFLOAT16, CAUSALITY, FLOAT32_DRIFT, FLOAT64, all_finite, assert_agree
from torch import Tensor

from linformer_cli.attention.base import Attention
from linformer_cli.attention.catalogue import CATALOGUE
from linformer_cli.config import NetworkConfig
from linformer_cli.errors import UsageError
from linformer_cli.evaluation.contract import LENGTH, Inputs, draw, gradients, share
from linformer_cli.model.attention_layer import AttentionLayer
from linformer_cli.native.library import reference_only

BOTH_WAYS = {key: case for key, case in CASES.items() if case.oracle_all}
every_case = pytest.mark.parametrize("case", mark_variants(BOTH_WAYS, lambda case: case.attention))
# Mechanisms whose last position sees the same positions with the same weights in both forms.
SAME_AT_THE_END = ("softmax", "linear", "performer", "rfa")


def attend_all(mechanism: Attention, inputs: Inputs, lengths: list[int] | None = None) -> Tensor:
    ends = None if lengths is None else torch.tensor(lengths)
    return mechanism.attend_all(*inputs[:3], ends, inputs.extra)


def image(inputs: Inputs, number: int, length: int) -> Inputs:
    """Return the sequence of one image, without padding."""
    return inputs.map(lambda part: part[number : number + 1, :, :length])


@loop_over("key", CATALOGUE)
def test_a_case_has_an_oracle_if_the_mechanism_is_bidirectional(key: str) -> None:
    for case in CASES.values():
        if case.attention == key:
            mechanism = build(case)
            assert mechanism.bidirectional == (case.oracle_all is not None)
            if not mechanism.bidirectional:
                with pytest.raises(UsageError, match="has no bidirectional form"):
                    attend_all(mechanism, draw(mechanism, 3))
    assert CATALOGUE[key].bidirectional == any(case.attention == key for case in BOTH_WAYS.values())


@every_case
@loop_over("length", [1, 17, LENGTH])
def test_outputs_and_gradients_match_the_definition(case: Case, length: int) -> None:
    mechanism = build(case)
    inputs = draw(mechanism, length, seed=3)
    assert_agree(attend_all(mechanism, inputs), run_oracle(case, mechanism, inputs, case.oracle_all), FLOAT64)
    found = gradients(mechanism, inputs, lambda x: attend_all(mechanism, x))
    expected = gradients(mechanism, inputs, lambda x: run_oracle(case, mechanism, x, case.oracle_all))
    assert_gradients_agree(found, expected)


@every_case
def test_plain_torch_matches_the_definition(case: Case) -> None:
    mechanism = build(case)
    inputs = draw(mechanism, seed=3)
    with reference_only():
        found = attend_all(mechanism, inputs)
    assert_agree(found, run_oracle(case, mechanism, inputs, case.oracle_all), FLOAT64)


@pytest.mark.parametrize(
    "case", mark_variants({k: c for k, c in BOTH_WAYS.items() if c.attention in SAME_AT_THE_END}, lambda c: c.attention)
)
def test_the_last_position_equals_the_causal_form(case: Case) -> None:
    mechanism = build(case)
    inputs = draw(mechanism)
    causal = mechanism.attend(*inputs[:3], None, inputs.extra)[0]
    both = attend_all(mechanism, inputs)
    assert_agree(both[:, :, -1], causal[:, :, -1], FLOAT64)
    assert (both - causal)[:, :, :-1].abs().max() > 1e-3


LENGTHS = [LENGTH, 1, 65, 3, 0, 17]


@every_case
def test_sequences_of_a_padded_batch_equal_sequences_alone(case: Case) -> None:
    mechanism = build(case)
    inputs = draw(mechanism, batch=len(LENGTHS))
    with torch.no_grad():
        found = attend_all(mechanism, inputs, LENGTHS)
        for number, length in enumerate(LENGTHS):
            assert not found[number, :, length:].any()
            if length:
                alone = attend_all(mechanism, image(inputs, number, length))
                assert_agree(found[number : number + 1, :, :length], alone, FLOAT64)


@every_case
@loop_over("value", [1e20, math.nan, math.inf])
def test_padding_changes_no_output_and_no_gradient(case: Case, value: float) -> None:
    mechanism = build(case)
    inputs = draw(mechanism, batch=len(LENGTHS))
    filled = inputs.map(Tensor.clone)
    for number, length in enumerate(LENGTHS):
        for part in filled.leaves():
            part[number, :, length:] = value
    filled = share(mechanism, filled)
    assert torch.equal(attend_all(mechanism, filled, LENGTHS), attend_all(mechanism, inputs, LENGTHS))
    found, expected = (gradients(mechanism, x, lambda x: attend_all(mechanism, x, LENGTHS)) for x in (filled, inputs))
    assert_gradients_agree(found, expected)
    for name in found.keys() & set(Inputs._fields):
        for number, length in enumerate(LENGTHS):
            assert not found[name][number, :, length:].any()


@every_case
def test_lengths_of_all_positions_change_nothing(case: Case) -> None:
    mechanism = build(case)
    inputs = draw(mechanism)
    assert torch.equal(attend_all(mechanism, inputs, [LENGTH] * 2), attend_all(mechanism, inputs))


@every_case
def test_images_of_a_batch_are_independent(case: Case) -> None:
    """The order of images does not matter, and a NaN stays in its image."""
    mechanism = build(case)
    inputs = draw(mechanism, batch=3)
    order = [2, 0, 1]
    expected = attend_all(mechanism, inputs, [LENGTH, 40, 90])
    permuted = share(mechanism, inputs.map(lambda part: part[order]))
    assert_agree(attend_all(mechanism, permuted, [90, LENGTH, 40]), expected[order], CAUSALITY)
    for part in inputs.leaves():
        part[1] *= math.nan
    found = attend_all(mechanism, share(mechanism, inputs), [LENGTH, 40, 90])
    assert_agree(found[::2], expected[::2], CAUSALITY)


@every_case
def test_every_position_depends_on_later_positions(case: Case) -> None:
    mechanism = build(case)
    found = gradients(mechanism, draw(mechanism), lambda x: attend_all(mechanism, x)[:, :, :20])
    assert found["v"][:, :, 20:].abs().max() > 1e-6


@every_case
def test_float32_and_bfloat16_are_as_accurate_as_their_inputs(case: Case) -> None:
    mechanism = build(case)
    lengths = [LENGTH, 70]
    for dtype, tolerance in ((torch.float32, FLOAT32_DRIFT), (torch.bfloat16, BFLOAT16)):
        inputs = draw(mechanism, dtype=dtype)
        mechanism = mechanism.to(dtype)
        with torch.no_grad():
            found = attend_all(mechanism, inputs, lengths)
            expected = attend_all(mechanism.double(), inputs.map(Tensor.double), lengths)
        assert found.dtype == dtype
        assert_agree(found, expected, tolerance)


@every_case
def test_autocast_accepts_bfloat16_inputs(case: Case) -> None:
    mechanism = build(case, torch.float32)
    inputs = draw(mechanism, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = attend_all(mechanism, inputs.map(Tensor.float))
        with torch.autocast("cpu", torch.bfloat16):
            found = attend_all(mechanism, inputs)
    assert found.dtype == torch.bfloat16
    assert_agree(found, expected, BFLOAT16)


@every_case
@loop_over("lengths", [None, [LENGTH, 70]])
def test_autocast_rounds_nothing(case: Case, lengths: list[int] | None) -> None:
    mechanism = build(case, torch.float32)
    inputs = draw(mechanism, dtype=torch.float32)
    with torch.no_grad():
        expected = attend_all(mechanism, inputs, lengths)
        with torch.autocast("cpu", torch.bfloat16):
            found = attend_all(mechanism, inputs, lengths)
    assert found.dtype == torch.float32 and torch.equal(found, expected)


@every_case
@loop_over("scale", [30.0, 1e20])
def test_large_keys_give_finite_outputs_and_gradients(case: Case, scale: float) -> None:
    mechanism = build(case, torch.float32)
    if mechanism.gated and scale > 1e10:
        return  # the weights are squares of scores without normalisation, so they overflow too
    inputs = draw(mechanism, 40, dtype=torch.float32)
    inputs = share(mechanism, inputs._replace(k=scale * inputs.k))
    assert bool(attend_all(mechanism, inputs, [40, 33]).isfinite().all())
    assert all_finite(gradients(mechanism, inputs, lambda x: attend_all(mechanism, x, [40, 33])).values())


@every_case
def test_saved_bytes_grow_linearly(case: Case) -> None:
    """With four times the positions, autograd saves about four times the bytes. Images are square."""
    quadratic = case.keeps_pairs == "always"
    saved = []
    for length in (256, 1024) if quadratic else (1024, 4096):
        mechanism = build(case, torch.float32, 6, 6, positions=length, row=round(length**0.5))
        inputs = draw(mechanism, length, batch=1, dtype=torch.float32).map(Tensor.requires_grad_)
        saved.append(measure_saved_bytes(attend_all, mechanism, inputs, [length - 1]))
    assert saved[0] > inputs.v.nbytes / 16, "saved bytes are not measured"
    assert (saved[1] > 8 * saved[0]) if quadratic else (saved[1] < 4.5 * saved[0]), saved


@pytest.mark.parametrize("lengths", [torch.tensor([3]), torch.tensor([3.0, 2.0]), torch.tensor([-1, 2]), [4, 2]])
def test_wrong_lengths_are_refused(lengths: Any) -> None:
    mechanism = build(CASES["softmax"])
    with pytest.raises(ValueError, match="lengths must be"):
        mechanism.attend_all(*draw(mechanism, 3)[:3], torch.as_tensor(lengths))


PARTS = {"plain": {}, "parts": {"normalise_keys": True, "norm_heads": True, "output_gate": True}}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("key", ["softmax", "linear-elu"])
def test_a_layer_ignores_padding_and_projects_as_in_its_causal_form(key: str, parts: dict[str, bool]) -> None:
    layer = build_layer(key, parts)
    x = torch.randn(2, 20, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = layer.attend_all(x)
    assert_agree(whole[:, -1], layer.attend(x, None)[0][:, -1], FLOAT64)
    x[1, 13:] = math.nan
    found = layer.attend_all(x, torch.tensor([20, 13]))
    assert_agree(found[0], whole[0], FLOAT64)
    assert_agree(found[1:, :13], layer.attend_all(x[1:, :13]), FLOAT64)
    assert not found[1, 13:].any()
    gradients = torch.autograd.grad(found.sum(), list(layer.parameters()))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_the_short_convolution_of_a_layer_stays_causal() -> None:
    layer = build_layer("softmax", {"short_convolution": 3})
    torch.nn.init.normal_(layer.convolution.weight)
    x = torch.randn(2, 20, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert_agree(layer.attend_all(x)[:, -1], layer.attend(x, None)[0][:, -1], FLOAT64)
    found = layer.attend_all(x, torch.tensor([20, 13]))
    assert_agree(found[1:, :13], layer.attend_all(x[1:, :13]), FLOAT64)


def build_layer(key: str, parts: dict[str, Any]) -> AttentionLayer:
    inner = build(CASES[key])
    config = NetworkConfig(width=12, heads=inner.shape.heads, **parts)
    return AttentionLayer(config, inner).double()
