"""Tests particular to Performer; test_contract.py covers what all mechanisms share."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention.arguments import build_one, draw_parts
from attention.cases.performer import by_logarithms, hyperbolic, positive
from attention.inputs import Inputs
from attention.measures import measure_saved_bytes
from loops import loop_over
from tolerances import CAUSALITY, FLOAT64, assert_agree, assert_all_agree
from torch import Tensor

from linformer_cli.attention.parts import random_features
from linformer_cli.errors import UsageError
from linformer_cli.model.mixers import parse_options

CPU = torch.device("cpu")
FEATURE_MAPS = ["positive", "hyperbolic", "trig", "relu"]
every_map = pytest.mark.parametrize("feature_map", FEATURE_MAPS)
with_a_maximum = pytest.mark.parametrize("feature_map", ["positive", "hyperbolic"])


build = functools.partial(build_one, "performer")
# Options


def test_an_odd_number_of_paired_features_is_refused() -> None:
    for feature_map in ("hyperbolic", "trig"):
        with pytest.raises(UsageError, match=f"'{feature_map}' makes two features.*even number.*found 9"):
            parse_options("performer", {"feature_map": feature_map, "features": 9})


@pytest.mark.parametrize(("width", "features"), [(1, 8), (6, 16), (32, 112), (64, 272)])
def test_the_default_number_of_features_is_about_k_ln_k(width: int, features: int) -> None:
    attention = build(key_width=width)
    assert attention.features == features
    assert 0 <= features - width * math.log(width) <= 8
    assert attention.init_state(1, 1, CPU, torch.float32).s.shape == (1, 2, features, 6)


# Directions


@every_map
def test_directions_are_saved_and_fixed_in_a_forward_pass(feature_map: str) -> None:
    attention = build(feature_map=feature_map).train()
    before = attention.state_dict()["directions"].clone()
    attention.attend(*draw_parts(40))
    assert torch.equal(attention.directions, before)


@loop_over("orthogonal", [True, False])
@every_map
def test_directions_are_redrawn_at_the_interval(feature_map: str, orthogonal: bool) -> None:
    attention = build(feature_map=feature_map, orthogonal=orthogonal, redraw_every=3)
    changed, last = [], attention.directions.clone()
    random_state = torch.get_rng_state()
    for step in range(8):
        attention.on_training_step(step, seed=5)
        if not torch.equal(last, attention.directions):
            changed.append(step)
        last = attention.directions.clone()
    assert changed == [0, 3, 6]
    assert torch.equal(torch.get_rng_state(), random_state)


def test_directions_are_not_redrawn_by_default() -> None:
    attention = build()
    before = attention.directions.clone()
    for step in range(4):
        attention.on_training_step(step, seed=5)
    assert torch.equal(attention.directions, before)


def test_a_redraw_depends_only_on_seed_step_and_layer() -> None:
    def redrawn(seed: int = 5, step: int = 6, layer: int = 1, history: tuple[int, ...] = ()) -> Tensor:
        attention = build(layer=layer, redraw_every=3)
        for earlier in history:
            attention.on_training_step(earlier, seed)
        torch.manual_seed(len(history))
        attention.on_training_step(step, seed)
        return attention.directions

    assert torch.equal(redrawn(), redrawn(history=(0, 3)))
    for other in ({"seed": 6}, {"step": 9}, {"layer": 2}):
        assert not torch.isclose(redrawn(), redrawn(**other)).any()


# The running maximum


@pytest.fixture
def pairwise_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the number of (image, head) pairs of every pairwise computation."""
    rows: list[int] = []
    attend_pairwise = random_features.attend_pairwise

    def count(a: Tensor, *rest: Any) -> Tensor:
        rows.append(len(a))
        return attend_pairwise(a, *rest)

    monkeypatch.setattr(random_features, "attend_pairwise", count)
    return rows


@with_a_maximum
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ordinary_inputs_are_not_computed_pair_by_pair(feature_map, dtype, pairwise_rows) -> None:
    attention = build(dtype, feature_map=feature_map)
    q, k, v = draw_parts(784, dtype)
    attention.attend(2 * q, 2 * k, v)
    assert pairwise_rows == []


@with_a_maximum
def test_only_heads_with_huge_keys_are_computed_pair_by_pair(feature_map: str, pairwise_rows: list[int]) -> None:
    attention = build(feature_map=feature_map)
    q, k, v = draw_parts(60)
    hard = k.clone()
    hard[1, 0] *= 40
    expected, _ = attention.attend(q, k, v)
    found, _ = attention.attend(q, hard, v)
    assert pairwise_rows == [1]
    untouched = torch.tensor([[True, True], [False, True]])
    assert torch.equal(found[untouched], expected[untouched])


ORACLES = {"positive": by_logarithms(positive), "hyperbolic": by_logarithms(hyperbolic)}


@pytest.fixture(params=["huge keys", "always"])
def pairwise_inputs(
    request: pytest.FixtureRequest, pairwise_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Tensor]]:
    """Inputs that are computed pair by pair: huge keys, or ordinary inputs with the pairwise computation forced."""
    q, k, v = draw_parts(77)
    if request.param == "always":
        monkeypatch.setattr(random_features, "smallest_weight", lambda _: 1e10)
    else:
        k = 200 * k
    yield [q, k, v]
    assert sum(pairwise_rows) >= 4


@with_a_maximum
def test_pairwise_results_match_the_definition(feature_map: str, pairwise_inputs: list[Tensor]) -> None:
    attention = build(feature_map=feature_map, chunk=16)
    results = []
    for run in (attention.attend, None):
        leaves = [part.detach().requires_grad_() for part in pairwise_inputs]
        if run is not None:
            y, _ = run(*leaves)
        else:
            y = ORACLES[feature_map](Inputs(*leaves), dict(attention.named_buffers()))
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        results.append((y, *torch.autograd.grad((y * weights).sum(), leaves)))
    assert_all_agree(*results, FLOAT64)


@with_a_maximum
@loop_over("cut", [1, 7, 8, 9, 31])
def test_pairwise_results_are_split_invariant(feature_map: str, cut: int, pairwise_inputs: list[Tensor]) -> None:
    attention = build(feature_map=feature_map, chunk=16)
    results = []
    for cuts in ([77], [cut, 77 - cut]):
        leaves = [part.detach().requires_grad_() for part in pairwise_inputs]
        state, outputs = None, []
        for block in zip(*(part.split(cuts, dim=2) for part in leaves), strict=True):
            y, state = attention.attend(*block, state)
            outputs.append(y)
        y = torch.cat(outputs, dim=2)
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        results.append((y, *torch.autograd.grad((y * weights).sum(), leaves)))
    assert_all_agree(*results, FLOAT64)
    state, outputs = attention.init_state(2, 77, CPU, torch.float64), []
    for t in range(77):
        y_t, state = attention.step(*(part[:, :, t] for part in pairwise_inputs), state)
        outputs.append(y_t)
    assert_agree(torch.stack(outputs, dim=2), results[0][0], FLOAT64)


@with_a_maximum
@loop_over("place", [1, 7, 8, 9, 64, 76])
def test_pairwise_results_are_causal(feature_map: str, place: int, pairwise_inputs: list[Tensor]) -> None:
    attention = build(feature_map=feature_map, chunk=16)
    before, _ = attention.attend(*pairwise_inputs)
    for factor in (-1.0, 1e-3, 30.0):
        changed = [torch.cat([part[:, :, :place], factor * part[:, :, place:]], dim=2) for part in pairwise_inputs]
        after, _ = attention.attend(*changed)
        assert_agree(after[:, :, :place], before[:, :, :place], CAUSALITY)
        if factor == 1e-3:  # the smallest keys have the largest features
            assert (after - before).abs().max() > 1e-3


# The kernels


@loop_over("orthogonal", [True, False])
@loop_over("feature_map", ["positive", "hyperbolic", "trig"])
def test_many_features_approximate_softmax(feature_map: str, orthogonal: bool) -> None:
    q, k, v = draw_parts(30)
    q, k = q / 2, k / 2
    scores = q @ k.transpose(-1, -2) / math.sqrt(6)
    future = torch.ones_like(scores).triu(1) == 1
    expected = scores.masked_fill(future, -math.inf).softmax(-1) @ v
    errors = []
    for features in (48, 20_000):
        attention = build(feature_map=feature_map, features=features, orthogonal=orthogonal)
        y, _ = attention.attend(q, k, v)
        errors.append(float((y - expected).square().mean()))
    assert errors[1] < 1e-3
    assert errors[0] > 10 * errors[1]


def test_the_kernel_method_is_the_product_of_features() -> None:
    q, k, _ = draw_parts(7)
    x, y = 6**-0.25 * q, 6**-0.25 * k[:, :, :3]
    for feature_map in FEATURE_MAPS:
        attention = build(feature_map=feature_map, features=8)
        w = attention.directions
        kernel = torch.zeros(2, 2, 7, 3, dtype=torch.float64)
        for direction in w:
            a, b = (part @ direction for part in (x, y))
            sizes = (x.square().sum(-1).unsqueeze(3) + y.square().sum(-1).unsqueeze(2)) / 2
            if feature_map == "relu":
                kernel += (a.relu() + 1e-3).unsqueeze(3) * (b.relu() + 1e-3).unsqueeze(2) / len(w)
            elif feature_map == "trig":
                kernel += (a.unsqueeze(3) - b.unsqueeze(2)).cos() * sizes.exp() / len(w)
            else:
                both = a.unsqueeze(3) + b.unsqueeze(2)
                grow = both.exp() if feature_map == "positive" else both.cosh()
                kernel += grow * (-sizes).exp() / len(w)
        assert_agree(attention.kernel(q, k[:, :, :3]), kernel, FLOAT64)


def test_a_denominator_that_cancels_is_raised_to_a_tenth_of_the_weight() -> None:
    attention = build(feature_map="trig", features=2)  # with one direction, the kernel is a cosine
    direction = attention.directions[0]
    step = math.pi * direction / direction.square().sum() * 6**0.25  # this step changes the phase by pi
    k = torch.zeros(1, 2, 3, 6, dtype=torch.float64)
    q = step.expand(1, 2, 3, 6)
    v = torch.ones(1, 2, 3, 5, dtype=torch.float64)
    y, _ = attention.attend(q, k, v)
    assert_agree(y, torch.full_like(v, -10.0), FLOAT64)


@with_a_maximum
def test_saved_bytes_of_the_pairwise_computation_grow_linearly(feature_map: str, pairwise_rows: list[int]) -> None:
    attention = build(torch.float32, feature_map=feature_map)
    saved = []
    for length in (512, 2048):
        q, k, v = draw_parts(length, torch.float32)
        inputs = [part.requires_grad_() for part in (q, 30 * k, v)]
        saved.append(measure_saved_bytes(attention.attend, *inputs))
    assert len(pairwise_rows) == 2
    assert saved[1] < 4.5 * saved[0], saved
