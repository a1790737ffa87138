"""Tests of the comparison of attend and step: a correct model passes, and each kind of damage makes a row fail."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import loop_over

from linformer_cli.attention.linear import LinearAttention
from linformer_cli.evaluation.agreement import (
    CAUSALITY_TOLERANCE,
    FLOAT32_TOLERANCE,
    FLOAT64_TOLERANCE,
    Agreement,
    build_row,
    measure_agreement,
)
from linformer_cli.model.pixel_model import PixelModel

STEP64, SPLIT64, CAUSAL64, STEP32 = ROWS = (
    "parallel against step, float64",
    "split invariance, float64",
    "causality, float64",
    "parallel against step, float32",
)


def failed(agreement: Agreement) -> set[str]:
    assert tuple(row.name for row in agreement.rows) == ROWS
    return {row.name for row in agreement.rows if not row.passed}


def damage(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[..., Any]) -> None:
    """Replace a method of linear attention by `change(original method, self, *arguments)`."""
    right = getattr(LinearAttention, name)
    monkeypatch.setattr(LinearAttention, name, lambda self, *rest, **named: change(right, self, *rest, **named))


# Correct models


@pytest.mark.parametrize("head", ["categorical", "mixture"])
@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_a_good_model_passes(build_tiny_model, attention, head) -> None:
    model = build_tiny_model(attention=attention, head=head)
    agreement = measure_agreement(model, images=3)
    assert failed(agreement) == set()
    assert agreement.passed
    assert (agreement.positions, agreement.images) == (64, 3)
    assert agreement.state_bytes == agreement.predicted_state_bytes > 0
    # The errors are not 0, so no result was compared with itself.
    errors = {row.name: row.error for row in agreement.rows}
    assert 0 < errors[STEP64] < 1e-12
    assert 0 < errors[STEP32] < 1e-4


def test_the_tolerances_never_change() -> None:
    assert (FLOAT64_TOLERANCE, FLOAT32_TOLERANCE, CAUSALITY_TOLERANCE) == (1e-9, 1e-3, 1e-12)


@loop_over(("wanted", "positions"), [(None, 64), (20, 20), (1000, 64), (1, 1), (2, 2)])
def test_fewer_positions_can_be_compared(build_tiny_model, wanted, positions) -> None:
    agreement = measure_agreement(build_tiny_model(), positions=wanted)
    assert agreement.positions == positions
    assert agreement.passed


def test_the_given_model_is_not_changed(build_tiny_model) -> None:
    model = build_tiny_model(dropout=0.5).train()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    assert measure_agreement(model).passed  # dropout is off in the copy
    assert model.training
    assert model.dtype == torch.float32
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


# Damaged models


def times(part: int, factor: Callable[[torch.Tensor], float]) -> Callable[..., Any]:
    """A mechanism whose argument number `part` (q, k, v) is multiplied by `factor`."""

    def damaged(right: Any, self: Any, *given: Any, **named: Any) -> Any:
        return right(self, *given[:part], given[part] * factor(given[part]), *given[part + 1 :], **named)

    return damaged


def forget(right: Any, self: Any, q: Any, k: Any, v: Any, state: Any = None, extra: Any = None) -> Any:
    return right(self, q, k, v, None, extra)


def look_ahead(right: Any, self: Any, q: Any, k: Any, v: Any, state: Any = None, extra: Any = None) -> Any:
    y, state = right(self, q, k, v, state, extra)
    # This adds a small share of every value, including later ones, as if the triangular mask were missing.
    return y + 1e-6 * v.mean(dim=2, keepdim=True), state


@loop_over(
    ("form", "change", "least", "most"),
    [
        ("step", times(2, lambda v: 1.001), {STEP64}, {STEP64, STEP32}),
        ("step", times(2, lambda v: -1.0), {STEP64, STEP32}, {STEP64, STEP32}),
        ("step", times(0, lambda q: 1 + 1e-6), {STEP64}, {STEP64}),
        ("step", times(2, lambda v: 1.5 if v.dtype == torch.float32 else 1.0), {STEP32}, {STEP32}),
        ("attend", forget, {SPLIT64}, {SPLIT64}),
        ("attend", look_ahead, {CAUSAL64}, set(ROWS)),
    ],
)
def test_damaged_forms_fail_where_they_differ(build_tiny_model, form, change, least, most) -> None:
    model = build_tiny_model()
    with pytest.MonkeyPatch.context() as patch:
        damage(patch, form, change)
        agreement = measure_agreement(model, positions=40)
    assert least <= failed(agreement) <= most and not agreement.passed


def test_a_step_that_loses_its_state_near_the_end_fails(build_tiny_model, monkeypatch) -> None:
    count = 0

    def step(
        right: Any, self: Any, q_t: torch.Tensor, k_t: torch.Tensor, v_t: torch.Tensor, state: Any, *_: Any
    ) -> Any:
        nonlocal count
        count += 1
        if count % 128 > 120:  # two layers of 64 positions
            state = type(state)(*(torch.zeros_like(part) for part in state))
        return right(self, q_t, k_t, v_t, state)

    model = build_tiny_model()
    damage(monkeypatch, "step", step)
    assert failed(measure_agreement(model)) >= {STEP64, STEP32}


@pytest.mark.parametrize("form", ["step", "attend"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_fail(build_tiny_model, monkeypatch, form, value) -> None:
    def spoilt(right: Any, self: Any, *rest: Any, **named: Any) -> Any:
        y, state = right(self, *rest, **named)
        y = y.clone()
        y[0, 0, ..., 0] = value
        return y, state

    model = build_tiny_model()
    damage(monkeypatch, form, spoilt)
    agreement = measure_agreement(model)
    assert {STEP64, STEP32} <= failed(agreement)
    assert agreement.rows[0].error is None


def test_a_wrong_prediction_of_state_bytes_fails(build_tiny_model, monkeypatch) -> None:
    model, right = build_tiny_model(), PixelModel.state_bytes
    monkeypatch.setattr(PixelModel, "state_bytes", lambda *given: right(*given) + 1)
    agreement = measure_agreement(model)
    assert failed(agreement) == set()
    assert agreement.predicted_state_bytes == agreement.state_bytes + 1
    assert not agreement.passed


def test_a_row_passes_if_its_error_is_at_most_its_tolerance() -> None:
    assert build_row("row", 1e-9, 1e-9).passed
    assert not build_row("row", 1.01e-9, 1e-9).passed
    for error in (math.nan, math.inf):
        row = build_row("row", error, 1e-9)
        assert not row.passed and row.error is None
        assert str(row) == "row differs by NaN or infinity, allowed 1e-09"


def test_the_seed_changes_the_images_that_are_compared(build_tiny_model) -> None:
    model = build_tiny_model()
    errors = [tuple(row.error for row in measure_agreement(model, positions=20, seed=seed).rows) for seed in (0, 0, 1)]
    assert errors[0] == errors[1] != errors[2]


def test_errors_are_relative_to_the_largest_output(build_tiny_model, monkeypatch) -> None:
    def step(right: Any, self: Any, q_t: torch.Tensor, *rest: Any) -> Any:
        return right(self, q_t * (1 + 1e-6), *rest)

    damage(monkeypatch, "step", step)
    model = build_tiny_model()
    small = measure_agreement(model, positions=20).rows[0].error
    model.head.projection.weight.data.mul_(2)
    model.head.projection.bias.data.mul_(2)
    # Outputs and differences are twice as large, so relative errors stay similar. They are not equal, because the
    # sampled images differ.
    assert measure_agreement(model, positions=20).rows[0].error == pytest.approx(small, rel=0.9)
