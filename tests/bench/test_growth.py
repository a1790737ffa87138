"""Tests of exponents, crossings and predictions, computed from known points."""

import pytest

from linformer_cli.bench.growth import extrapolate, find_overtaking, fit_exponent


def test_exponents_are_fitted_to_the_points() -> None:
    assert fit_exponent([(10, 3.0), (100, 300.0)]) == pytest.approx(2)
    assert fit_exponent([(1, 1.0), (2, 4.0), (4, 4.0)]) == pytest.approx(1)
    assert fit_exponent([(10, 3.0)]) is None
    assert fit_exponent([(10, 0.0), (20, 1.0)]) is None
    assert fit_exponent([]) is None


def test_extrapolation_follows_the_last_two_points() -> None:
    assert extrapolate([], 10) is None
    assert extrapolate([(10, 3.0)], 20) == pytest.approx(12)  # with one point, the growth is assumed to be quadratic
    assert extrapolate([(1, 7.0), (10, 3.0), (20, 12.0)], 40) == pytest.approx(48)
    assert extrapolate([(10, 3.0), (20, 2.0)], 40) == pytest.approx(4)  # at least linear
    assert extrapolate([(10, 1.0), (20, 30.0)], 40) == pytest.approx(120)  # at most quadratic


def test_a_crossing_is_found_between_measured_lengths() -> None:
    """The times 8 T and T^2 cross at T = 8. On logarithmic axes, powers are straight lines, so the result is exact."""
    slow, fast = ([(length, float(f(length))) for length in (2, 4, 16, 32)] for f in (lambda t: t**2, lambda t: 8 * t))
    found = find_overtaking(fast, slow)
    assert found == ("8", pytest.approx(8))
    assert find_overtaking(slow, fast) == ("not up to 32", None)


@pytest.mark.parametrize(
    ("mine", "rival", "expected"),
    [
        ([(10, 1.0), (20, 2.0)], [(10, 2.0), (20, 3.0)], "below 10"),
        ([(10, 1.0), (20, 2.0)], [(10, 1.0), (20, 2.0)], "not up to 20"),
        ([(10, 3.0), (20, 2.0)], [(10, 2.0), (40, 9.0)], "not up to 10"),  # only common lengths count
        ([(10, 1.0)], [(10, 1.5)], "below 10"),
        # The method is faster, then slower, then faster at all longer lengths. The last crossing counts.
        ([(10, 1.0), (20, 2.0), (80, 1.0)], [(10, 2.0), (20, 1.0), (80, 2.0)], "40"),
    ],
)
def test_crossings_are_described_by_measured_lengths(mine, rival, expected) -> None:
    found = find_overtaking(mine, rival)
    assert found is not None and found[0] == expected
    assert (found[1] is None) == (not expected.isdigit())


def test_methods_without_a_common_length_are_not_compared() -> None:
    assert find_overtaking([(10, 1.0)], [(20, 1.0)]) is None
    assert find_overtaking([], [(20, 1.0)]) is None
