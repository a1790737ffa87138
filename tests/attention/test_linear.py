"""Tests particular to linear attention; test_contract.py covers what all mechanisms share."""

import functools
import re
import textwrap

import pytest
import torch
from attention.arguments import build_one, draw_parts
from attention.measures import measure_saved_bytes
from tolerances import FLOAT64, assert_agree

from linformer_cli.attention import linear
from linformer_cli.errors import UsageError
from linformer_cli.model.mixers import parse_options

CPU = torch.device("cpu")


build = functools.partial(build_one, "linear")


def test_the_definition_in_the_docstring_is_what_attend_computes() -> None:
    attention, (q, k, v) = build(), draw_parts(40)
    found = re.search(r"\n\n((?: {4}.*\n)+)", linear.__doc__)
    assert found
    names = {"q": q, "k": k, "v": v, "phi": lambda x: torch.where(x < 0, x.exp(), x + 1)}
    exec(textwrap.dedent(found.group(1)), names)
    assert_agree(attention.attend(q, k, v)[0], names["y"], FLOAT64)


def test_weights_of_zero_give_zero_outputs_and_finite_gradients() -> None:
    """With the relu map and negative keys up to position 20, weights are 0 at first and positive later."""
    attention = build(feature_map="relu", chunk=16)
    q, k, v = draw_parts(40)
    k = torch.cat([-k[:, :, :20].abs(), k[:, :, 20:].abs() + 0.1], dim=2)
    q = q.abs() + 0.1
    leaves = [part.requires_grad_() for part in (q, k, v)]
    y, _ = attention.attend(*leaves)
    assert torch.equal(y[:, :, :20], torch.zeros(2, 2, 20, 5, dtype=torch.float64))
    assert bool((y[:, :, 20:] != 0).all())
    for gradient in torch.autograd.grad(y.sum(), leaves):
        assert bool(torch.isfinite(gradient).all())
        assert gradient.any()
    state = attention.init_state(2, 40, CPU, torch.float64)
    for t in range(20):
        y_t, state = attention.step(q[:, :, t], k[:, :, t], v[:, :, t], state)
        assert torch.equal(y_t, torch.zeros(2, 2, 5, dtype=torch.float64))


def test_a_tiny_weight_is_not_treated_as_zero() -> None:
    """No epsilon is added to the denominator. With one key, the output equals its value, however small the weight."""
    attention = build(torch.float32, feature_map="elu")
    q, k, v = draw_parts(1, torch.float32)
    y, _ = attention.attend(torch.full_like(q, -20.0), torch.full_like(k, -20.0), v)
    torch.testing.assert_close(y, v)
    y_t, _ = attention.step(
        *(part[:, :, 0] for part in (torch.full_like(q, -20.0), torch.full_like(k, -20.0), v)),
        attention.init_state(2, 1, CPU, torch.float32),
    )
    torch.testing.assert_close(y_t, v[:, :, 0])


def test_training_saves_no_sum_per_position() -> None:
    attention = build(torch.float32)
    inputs = [part.requires_grad_() for part in draw_parts(2048, torch.float32)]
    # Per position and head, compiled kernels save 18 numbers and plain torch saves 90. Another sum for every position
    # would add K V = 30 numbers.
    assert measure_saved_bytes(attention.attend, *inputs) < 2048 * 2 * 2 * 4 * 100


@pytest.mark.parametrize("feature_map", ["elu", "relu", "poly2", "taylor2"])
def test_the_features_option_is_refused_for_a_map_of_fixed_width(feature_map: str) -> None:
    with pytest.raises(UsageError, match=f"'features' is for feature_map 'learned'.*'{feature_map}' is fixed"):
        parse_options("linear", {"feature_map": feature_map, "features": 8})
