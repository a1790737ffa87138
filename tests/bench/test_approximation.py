"""Compares random features with softmax and with each other, to test what docs/notes/katharopoulos-2020.md says."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from loops import loop_over

from linformer_cli.bench.approximation import Approximation, Draws, Spread, measure_approximation, summarise
from linformer_cli.errors import UsageError

KEY_WIDTH = 16
DRAWS = 32
FEATURES = (8, 32, 8 * KEY_WIDTH)
SMALL_NORMS, MIDDLE_NORM, LARGE_NORMS = (0.125, 0.25), 0.5, (1.0, 2.0)
NORMS = (*SMALL_NORMS, MIDDLE_NORM, *LARGE_NORMS)
KINDS = ("positive", "hyperbolic", "trig")

Find = Callable[[str, bool, int, float], Approximation]


@pytest.fixture(scope="module")
def measured() -> list[Approximation]:
    draws = Draws(positions=48, head_width=KEY_WIDTH, draws=DRAWS)
    return list(measure_approximation(FEATURES, NORMS, draws=draws).rows)


@pytest.fixture(scope="module")
def find(measured: list[Approximation]) -> Find:
    by_kind = {(entry.feature_map, entry.orthogonal, entry.features, entry.norm): entry for entry in measured}
    return lambda *kind: by_kind[kind]


@pytest.mark.slow
def test_every_combination_is_measured_in_order(measured: list[Approximation]) -> None:
    kinds = [(entry.feature_map, entry.orthogonal, entry.features, entry.norm) for entry in measured]
    assert kinds == list(itertools.product(KINDS, (True, False), FEATURES, NORMS))
    for entry in measured:
        assert entry.draws == DRAWS
        for spread in (entry.output, entry.bounded_output, entry.kernel, entry.small_kernel):
            assert 0 < spread.first_quartile < spread.median < spread.third_quartile


@pytest.mark.slow
@loop_over("orthogonal", [True, False])
@loop_over("kind", KINDS)
def test_the_error_falls_with_the_number_of_features_at_every_norm(kind: str, orthogonal: bool, find: Find) -> None:
    for norm, (fewer, more) in itertools.product(NORMS, itertools.pairwise(FEATURES)):
        errors = [find(kind, orthogonal, features, norm).bounded_output for features in (fewer, more)]
        assert errors[1].mean < errors[0].mean
        assert errors[1].median < errors[0].median
    # At small norms no weight dominates, and four times the features give about a quarter of the error or less.
    assert find(kind, orthogonal, 128, 0.25).output.mean < 0.35 * find(kind, orthogonal, 32, 0.25).output.mean


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_orthogonal_directions_have_a_lower_error_at_small_norms_and_a_similar_error_at_others(
    kind: str, find: Find
) -> None:
    for features, norm in itertools.product(FEATURES, NORMS):
        orthogonal, independent = (find(kind, choice, features, norm) for choice in (True, False))
        if norm in (0.25, MIDDLE_NORM):
            assert orthogonal.output.mean < 0.9 * independent.output.mean
            assert orthogonal.kernel.mean < 0.9 * independent.kernel.mean
        assert orthogonal.bounded_output.mean < 1.1 * independent.bounded_output.mean
    if kind != "positive":  # for small inputs, positive features are nearly constant
        assert find(kind, True, 32, 0.125).output.mean < 0.2 * find(kind, False, 32, 0.125).output.mean


@pytest.mark.slow
def test_positive_is_better_than_trig_at_large_norms_and_worse_at_small_ones(find: Find) -> None:
    for orthogonal, features, norm in itertools.product((True, False), FEATURES, NORMS):
        positive, trig = (find(kind, orthogonal, features, norm) for kind in ("positive", "trig"))
        if norm in LARGE_NORMS:
            assert trig.output.mean > 100 * positive.output.mean and trig.output.median > 30 * positive.output.median
            # Most of the error of trig disappears if its denominator is bounded.
            assert trig.bounded_output.mean < 0.01 * trig.output.mean
            assert positive.small_kernel.mean < 0.1 * trig.small_kernel.mean
        if norm in (MIDDLE_NORM, *LARGE_NORMS):
            assert positive.small_kernel.median < 0.7 * trig.small_kernel.median
        elif orthogonal:
            assert trig.output.mean < 0.7 * positive.output.mean and trig.kernel.mean < 0.7 * positive.kernel.mean


@pytest.mark.slow
def test_the_mechanism_computes_the_same_as_a_table_of_all_pairs(measured: list[Approximation]) -> None:
    """Rows of trig in which the bound on the denominator has an effect are left out."""
    for entry in measured:
        if entry.feature_map != "trig" or (entry.norm in SMALL_NORMS and entry.features >= 32):
            for side in ("mean", "median"):
                bounded, plain = getattr(entry.bounded_output, side), getattr(entry.output, side)
                assert bounded == pytest.approx(plain, rel=1e-9)


# measure_approximation


def measure(draws: int = 3, seed: int = 0, **changes: object) -> list[Approximation]:
    settings = Draws(positions=9, draws=draws, seed=seed)
    given = {"features": [8], "norms": [0.5], "draws": settings, **changes}
    return list(measure_approximation(**given).rows)  # type: ignore[arg-type]


def test_results_depend_only_on_the_seed_and_the_settings() -> None:
    torch.manual_seed(1)
    first = measure()
    state = torch.get_rng_state()
    assert measure() == first
    assert torch.equal(torch.get_rng_state(), state)
    assert not {entry.output for entry in measure(seed=1)} & {entry.output for entry in first}
    # A row does not depend on the other rows.
    assert set(first) <= set(measure(features=[16, 8], norms=[2.0, 0.5]))
    assert measure(feature_maps=["trig"], orthogonal=[False])[0] in first


def test_a_spread_has_the_mean_and_the_quartiles() -> None:
    assert summarise([9.0, 1.0, 2.0, 3.0, 5.0]) == Spread(4.0, 2.0, 3.0, 5.0)
    alone = measure(draws=1)[0].output
    assert alone.mean == alone.first_quartile == alone.median == alone.third_quartile > 0


def test_settings_that_cannot_be_measured_are_refused() -> None:
    for given, message in (
        ({"feature_maps": ["relu"]}, "'relu' does not estimate softmax; those that do: positive, hyperbolic, trig"),
        ({"draws": 0}, "at least one draw, found 0"),
        ({"feature_maps": ["trig"], "features": [7]}, "even number"),
        ({"norms": [1.0, 8.0]}, "norms above 7.92 overflow float64, found 8"),
    ):
        with pytest.raises(UsageError, match=message):
            measure(**given)
    assert math.isfinite(measure(feature_maps=["positive"], norms=[7.9])[0].kernel.mean)
