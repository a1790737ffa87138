"""Compares the compiled sums, linear attention and the delta rule with their reference forms, which have own tests."""

import functools
import math
from collections.abc import Callable

import pytest
import torch
from attention.measures import measure_saved_bytes
from loops import loop_over
from machine import needs_library, use_threads
from tolerances import FLOAT32_DRIFT, FLOAT64, assert_agree, assert_all_agree
from torch import Tensor
from torch.nn import functional

from linformer_cli.attention.base import AttentionShape
from linformer_cli.attention.linear import LinearAttention, LinearOptions, LinearState
from linformer_cli.attention.parts.delta_rule import Updates, delta_sums
from linformer_cli.attention.parts.sums import causal_sums, decayed_causal_sums, featurewise_decayed_causal_sums
from linformer_cli.model.mixers import build_attention
from linformer_cli.native.constants import COMPILED_MAPS
from linformer_cli.native.library import reference_only

pytestmark = needs_library

CPU = torch.device("cpu")
CHUNK = 16


def attend_linear(
    feature_map: str, q: Tensor, k: Tensor, v: Tensor, s: Tensor | None, z: Tensor | None
) -> tuple[Tensor, ...]:
    shape = AttentionShape(q.shape[1], k.shape[3], v.shape[3], positions=784, row=28)
    attention = LinearAttention(LinearOptions.model_validate({"feature_map": feature_map, "chunk": CHUNK}), shape)
    y, state = attention.attend(q, k, v, None if s is None or z is None else LinearState(s, z))
    return y, *state


# Each form takes the inputs from `draw` and returns the outputs and the last sums.
FORMS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    **{f"linear {name}": functools.partial(attend_linear, name) for name in COMPILED_MAPS},
    "no decay": lambda q, k, v, carried: causal_sums(q, k, v, carried, CHUNK),
    "one decay": lambda q, k, v, logs, carried: decayed_causal_sums(q, k, v, logs, carried, CHUNK),
    "featurewise": lambda q, k, v, logs, carried: featurewise_decayed_causal_sums(q, k, v, logs, carried, CHUNK),
    "delta rule": lambda q, k, v, beta, logs, carried: delta_sums(q, Updates(k, v, beta, logs), carried, CHUNK),
    "separate erasing": lambda q, k, v, beta, d, logs, carried: delta_sums(
        q, Updates(k, v, beta, logs, d), carried, CHUNK
    ),
}
DELTA_RULES = ("delta rule", "separate erasing")
every_form = pytest.mark.parametrize("form", FORMS)


def draw(
    form: str, length: int, key_width: int, value_width: int, carry: bool = True, seed: int = 0
) -> list[Tensor | None]:
    """Draw the float64 inputs of a form for 2 images and 4 heads. If `carry` is false, the carried sums are None.

    There are enough heads for one thread to visit several of them at the same time.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(2, 4, *sizes, generator=generator, dtype=torch.float64)

    q, k, v = normal(length, key_width), normal(length, key_width), normal(length, value_width)
    logs = {
        "one decay": [length],
        "featurewise": [length, key_width],
        "delta rule": [length, 1],
        "separate erasing": [length, key_width],
    }
    parts = [functional.logsigmoid(normal(*logs[form]) + 2)] if form in logs else []
    if form in DELTA_RULES:
        q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
        parts.insert(0, 2 * normal(length, 1).sigmoid())
    if form == "separate erasing":
        parts.insert(1, k * normal(length, key_width).sigmoid())
    sums = [normal(key_width, value_width)]
    if form.startswith("linear"):
        sums.append(normal(key_width).abs())
    return [q, k, v, *parts, *(sums if carry else [None] * len(sums))]


def differentiate(form: str, inputs: list[Tensor | None]) -> list[Tensor]:
    """Return the outputs, the last sums, and the gradients of all inputs for random gradients of these results."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    results = FORMS[form](*leaves)
    generator = torch.Generator().manual_seed(9)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in results]
    return [*results, *torch.autograd.grad(results, [x for x in leaves if x is not None], weights)]


# Lengths are near multiples of 4 (a group) and 32 (a block); widths are near multiples of 8 and 16 (a vector).
SIZES = [
    *((length, 6, 5) for length in (1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 257)),
    *((130, *widths) for widths in ((1, 1), (8, 9), (7, 16), (17, 3), (16, 17), (32, 33), (33, 32), (40, 48))),
]


@every_form
@loop_over("carry", [False, True])
@loop_over(("length", "key_width", "value_width"), SIZES)
def test_results_match_the_reference_form(form, length, key_width, value_width, carry) -> None:
    inputs = draw(form, length, key_width, value_width, carry)
    found = differentiate(form, inputs)
    with reference_only():
        expected = differentiate(form, inputs)
    assert not torch.equal(found[0], expected[0]) or length == 1, "both results come from the same form"
    assert_all_agree(found, expected, FLOAT64)


@every_form
def test_float32_does_not_drift(instruction_set, form: str) -> None:
    inputs = draw(form, 784, 32, 33)
    expected = differentiate(form, inputs)
    found = differentiate(form, [None if x is None else x.float() for x in inputs])
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        assert_agree(ours, theirs, FLOAT32_DRIFT)


@pytest.mark.parametrize("form", ["one decay", "featurewise", *DELTA_RULES])
def test_closed_and_fully_open_gates_match_the_reference_form(form: str) -> None:
    """Some decays are 1, one is exp(-90), and one is exp(-800), which underflows to 0."""
    inputs = draw(form, 70, 6, 5)
    logs = inputs[-2]
    logs[:, :, 10:20] = 0
    logs[:, :, 30] = -90
    logs[:, :, 50] = -800
    found = differentiate(form, inputs)
    with reference_only():
        expected = differentiate(form, inputs)
    assert_all_agree(found, expected, FLOAT64)


@every_form
def test_unused_results_have_no_gradient(form: str) -> None:
    inputs = [None if x is None else x.requires_grad_() for x in draw(form, 150, 6, 5)]

    def gradients() -> list[Tensor | None]:
        results = FORMS[form](*inputs)
        squares = [result.square().sum() for result in results]
        return [x for y in squares for x in torch.autograd.grad(y, inputs, retain_graph=True, allow_unused=True)]

    found = gradients()
    with reference_only():
        expected = gradients()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is not None
        assert_agree(ours, torch.zeros_like(ours) if theirs is None else theirs, FLOAT64)


@every_form
def test_inputs_and_gradients_may_have_any_strides(form: str) -> None:
    inputs = [x for x in draw(form, 40, 8, 8) if x is not None]
    expected = differentiate(form, inputs)
    for change in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),  # heads side by side, as in a projection
        lambda x: torch.stack([x, x + 1], dim=-1)[..., 0],  # a strided last dimension
    ):
        for ours, theirs in zip(differentiate(form, [change(x) for x in inputs]), expected, strict=True):
            assert torch.equal(ours, theirs)
    shared = [x[:, :1].expand_as(x) for x in inputs]
    assert all(map(torch.equal, FORMS[form](*shared), FORMS[form](*(x.contiguous() for x in shared))))
    inputs = [x.requires_grad_() for x in inputs]
    y, *_ = FORMS[form](*inputs)
    for spread in (torch.rand(8, 40, 4, 2).double().permute(3, 2, 1, 0), torch.ones(()).double().expand_as(y)):
        found = torch.autograd.grad(y, inputs, spread, retain_graph=True)
        expected = torch.autograd.grad(y, inputs, spread.contiguous(), retain_graph=True)
        assert all(map(torch.equal, found, expected))


@every_form
def test_results_do_not_depend_on_threads_or_other_images(form: str) -> None:
    inputs = draw(form, 140, 6, 5)
    expected = differentiate(form, inputs)
    for count in (1, 2, 5):
        with use_threads(count):
            assert all(map(torch.equal, differentiate(form, inputs), expected))
    alone = FORMS[form](*(None if x is None else x[1:, 3:] for x in inputs))
    for ours, theirs in zip(alone, expected, strict=False):
        assert torch.equal(ours[0, 0], theirs[1, 3])


@every_form
@loop_over("value", [math.nan, math.inf])
def test_nan_and_infinity_reach_no_earlier_output_or_other_head(form: str, value: float) -> None:
    """If NaN became a finite number, a damaged model could give plausible results."""
    inputs = draw(form, 40, 8, 17)
    expected, *_ = FORMS[form](*inputs)
    for place, part in enumerate(inputs):
        if part.shape[2] != 40:
            continue  # it has no positions
        bad = [x.clone() for x in inputs]
        bad[place][1, 1, 21] = value  # position 21 is not the first of its group
        found, *_ = FORMS[form](*bad)
        assert torch.equal(found[1, 1, :21], expected[1, 1, :21])
        assert torch.equal(found[:, 0], expected[:, 0]) and torch.equal(found[0], expected[0])
        if math.isnan(value):
            assert found[1, 1, 21].isnan().all()
            assert place == 0 or found[1, 1, 22:].isnan().all()  # a query affects no later position


@every_form
def test_training_saves_a_few_numbers_per_position(form: str) -> None:
    inputs = [None if x is None else x.float().requires_grad_() for x in draw(form, 1024, 32, 32, carry=False)]
    given = sum(x.nbytes for x in inputs if x is not None)
    kept = measure_saved_bytes(FORMS[form], *inputs)
    values = inputs[2].nbytes
    # The delta rule also saves its errors, and linear attention its denominators.
    assert kept <= given + (values if form in DELTA_RULES else values / 32 if form.startswith("linear") else 0)


@loop_over(
    ("attention", "options"),
    [
        *(("linear", {"feature_map": name}) for name in ("elu", "poly2", "learned")),
        *(("performer", {"feature_map": name}) for name in ("positive", "hyperbolic", "trig", "relu")),
        *(("retention", {"distance": name}) for name in ("raster", "plane")),
        *(("gla", {"gate": name}) for name in ("vector", "scalar")),
        *((name, {"gate": gate}) for name in ("rfa", "deltanet") for gate in (True, False)),
    ],
)
def test_mechanisms_report_that_they_are_compiled_on_the_cpu(attention: str, options: dict[str, str | bool]) -> None:
    mechanism = build_attention(attention, options, AttentionShape(3, 6, 5, positions=784, row=28))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert mechanism.is_compiled(CPU, dtype)
        with reference_only():
            assert not mechanism.is_compiled(CPU, dtype)
    assert not mechanism.is_compiled(torch.device("meta"), torch.float32)


@every_form
def test_mismatched_sizes_and_types_are_refused(form: str) -> None:
    inputs = draw(form, 9, 8, 5)
    FORMS[form](*inputs)
    for place in range(1, len(inputs)):
        part = inputs[place]
        others = [] if form.startswith("linear") else [part.float()]  # plain torch takes mixed types
        for wrong in (part[:, :2], part[..., :-1], *others):
            changed = [*inputs[:place], wrong, *inputs[place + 1 :]]
            with pytest.raises((ValueError, RuntimeError), match=r"do not match|expand"):
                FORMS[form](*changed)
