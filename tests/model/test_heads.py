"""Tests of heads: likelihood and draws use the same distribution, whose probabilities always add up to 1."""

import math
from collections.abc import Callable

import pytest
import torch
from loops import loop_over
from tolerances import FLOAT64, PROBABILITY_TOTAL, assert_agree
from torch import Tensor

from linformer_cli.config import ModelConfig
from linformer_cli.model import heads
from linformer_cli.model.heads import CategoricalHead, Head, MixtureHead, build_head, invert_cumulative

BuildConfig = Callable[..., ModelConfig]
every_head = pytest.mark.parametrize("kind", ["categorical", "mixture"])
every_type = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def build(build_config: BuildConfig, kind: str, levels: int = 256, mixtures: int = 3) -> Head:
    torch.manual_seed(0)
    return build_head(build_config(head=kind, levels=levels, mixtures=mixtures))


def draw_parameters(head: Head, count: int, seed: int = 0) -> Tensor:
    """Draw logits and means of order 1, and log scales around -3."""
    generator = torch.Generator().manual_seed(seed)
    parameters = torch.randn(count, head.projection.out_features, generator=generator, dtype=torch.float64)
    if isinstance(head, MixtureHead):
        parameters[:, : head.mixtures] *= 3
        parameters[:, 2 * head.mixtures :] -= 3
    return parameters


def extreme_parameters(head: Head) -> Tensor:
    """Combine certain and uniform predictions, means at and outside the ends of the range, and extreme scales."""
    if isinstance(head, CategoricalHead):
        rows = torch.zeros(6, head.levels, dtype=torch.float64)
        rows[1, 3], rows[2, -1], rows[3, 0], rows[4, :2], rows[5] = 1e4, 1e4, -1e4, 1e3, 1e4
        return rows
    means = (-1e3, -1.5, -1.0, -0.3, 0.0, 1 / 255, 0.9999, 1.0, 1.5, 1e3)
    log_scales = (-20.0, -7.0, -6.0, -5.0, -3.0, 0.0, 3.0, 10.0, 30.0, 1000.0)
    rows = []
    for mean in means:
        for log_scale in log_scales:
            for logit in (0.0, 50.0, -1e4):
                # Only the first component is extreme; its weight is low, high or 0.
                rows.append([logit, 0, 1] + [mean, 0.2, -0.2] + [log_scale, -3, -2])
    return torch.tensor(rows, dtype=torch.float64)


@every_head
@every_type
def test_probabilities_of_all_values_add_up_to_one(build_config: BuildConfig, kind: str, dtype: torch.dtype) -> None:
    head = build(build_config, kind)
    for parameters in (draw_parameters(head, 200), extreme_parameters(head)):
        log_probabilities = head.log_probabilities(parameters.to(dtype))
        assert log_probabilities.dtype == dtype
        assert log_probabilities.shape == (len(parameters), 256)
        assert not log_probabilities.isnan().any()
        totals = log_probabilities.double().exp().sum(dim=-1)
        torch.testing.assert_close(totals, torch.ones_like(totals), rtol=0, atol=PROBABILITY_TOTAL)


@pytest.mark.parametrize("mean", [-1.0, -0.3, 0.2, 0.9999, 1.0])
def test_narrow_logistics_lose_no_probability_in_float64(build_config: BuildConfig, mean: float) -> None:
    head = build(build_config, "mixture", mixtures=1)
    for log_scale in (-7.0, -6.0, -5.0, -4.0):
        parameters = torch.tensor([0.0, mean, log_scale], dtype=torch.float64)
        assert head.log_probabilities(parameters).exp().sum().item() == pytest.approx(1, abs=FLOAT64)


@every_head
def test_probabilities_of_bfloat16_parameters_are_computed_in_float32(build_config: BuildConfig, kind: str) -> None:
    head = build(build_config, kind)
    parameters = draw_parameters(head, 50).bfloat16()
    values = torch.arange(50)
    assert torch.equal(head.log_probabilities(parameters), head.log_probabilities(parameters.float()))
    assert head.log_likelihood(parameters, values).dtype == torch.float32
    assert torch.equal(head.log_likelihood(parameters, values), head.log_likelihood(parameters.float(), values))


@every_head
def test_likelihood_matches_the_table_of_log_probabilities(build_config: BuildConfig, kind: str) -> None:
    head = build(build_config, kind)
    values = torch.arange(256).repeat(3, 1)
    parameters = draw_parameters(head, 3).unsqueeze(1).expand(3, 256, -1)
    found = head.log_likelihood(parameters, values)
    assert found.shape == (3, 256)
    expected = head.log_probabilities(parameters).gather(-1, values.unsqueeze(-1)).squeeze(-1)
    assert_agree(found, expected, FLOAT64)


@pytest.mark.parametrize("levels", [2, 3, 16, 256])
def test_a_mixture_matches_logistics_integrated_over_bins(build_config: BuildConfig, levels: int) -> None:
    head = build(build_config, "mixture", levels)
    parameters = draw_parameters(head, 20)
    logits, means, log_scales = parameters.split(3, dim=-1)
    # Values are spaced evenly on [-1, 1]. Bins extend halfway to the next value; the outer bins extend to infinity.
    centres = torch.linspace(-1, 1, levels, dtype=torch.float64)
    borders = torch.cat([torch.tensor([-math.inf]), (centres[1:] + centres[:-1]) / 2, torch.tensor([math.inf])])
    below = ((borders[None, :, None] - means[:, None]) / log_scales.exp()[:, None]).sigmoid()
    expected = ((below[:, 1:] - below[:, :-1]) * logits.softmax(dim=-1)[:, None]).sum(dim=-1)
    torch.testing.assert_close(head.log_probabilities(parameters).exp(), expected, rtol=0, atol=FLOAT64)


def test_log_scales_are_bounded_below(build_config: BuildConfig) -> None:
    head = build(build_config, "mixture", mixtures=1)
    narrow, smallest = (torch.tensor([0.0, 0.1, scale], dtype=torch.float64) for scale in (-12.0, -7.0))
    assert torch.equal(head.log_probabilities(narrow), head.log_probabilities(smallest))
    # The bound also affects draws: with a scale of exp(-12), every draw would give the same value.
    uniforms = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    between = torch.tensor([[0.0, -1 + 100.49 * 2 / 255, -12.0]], dtype=torch.float64)
    assert set(head.draw(between.expand(999, -1), uniforms).tolist()) >= {100, 101}


@every_head
@every_type
def test_gradients_at_extreme_parameters_are_finite(build_config: BuildConfig, kind: str, dtype: torch.dtype) -> None:
    head = build(build_config, kind)
    parameters = extreme_parameters(head).to(dtype).unsqueeze(1).expand(-1, 4, -1).clone().requires_grad_()
    values = torch.tensor([0, 1, 128, 255]).expand(parameters.shape[:2])
    nats = head.log_likelihood(parameters, values)
    assert bool(torch.isfinite(nats).all())
    assert bool((nats <= 0).all())
    nats.sum().backward()
    assert bool(torch.isfinite(parameters.grad).all())


def chi_square_excess(counts: Tensor, expected: Tensor) -> float:
    """Return by how many standard deviations chi-square exceeds its mean.

    A bin with fewer than 5 expected draws is joined with the next bin.
    """
    merged: list[tuple[float, float]] = []
    count_sum = expected_sum = 0.0
    for count, share in zip(counts.tolist(), expected.tolist(), strict=True):
        count_sum, expected_sum = count_sum + count, expected_sum + share
        if expected_sum >= 5:
            merged.append((count_sum, expected_sum))
            count_sum = expected_sum = 0.0
    last_count, last_expected = merged.pop()
    merged.append((last_count + count_sum, last_expected + expected_sum))
    freedom = len(merged) - 1
    assert freedom >= 2, "too few bins for the test"
    statistic = sum((count - share) ** 2 / share for count, share in merged)
    return (statistic - freedom) / math.sqrt(2 * freedom)


@every_head
@loop_over(("levels", "row"), [(256, 0), (256, 1), (256, 2), (16, 3), (5, 4)])
def test_draws_follow_the_probabilities(build_config: BuildConfig, kind: str, levels: int, row: int) -> None:
    head = build(build_config, kind, levels)
    parameters = draw_parameters(head, 5)[row : row + 1].float()
    count = 100_000
    uniforms = torch.rand(count, generator=torch.Generator().manual_seed(row), dtype=torch.float64)
    values = torch.cat([head.draw(parameters.expand(len(part), -1), part) for part in uniforms.split(10_000)])
    assert values.dtype == torch.int64
    counts = torch.bincount(values, minlength=levels).double()
    assert len(counts) == levels
    expected = count * head.log_probabilities(parameters.double())[0].exp()
    assert chi_square_excess(counts, expected) < 5


@every_head
def test_draws_at_extreme_parameters_are_valid(build_config: BuildConfig, kind: str) -> None:
    head = build(build_config, kind)
    for dtype in (torch.float32, torch.float64):
        parameters = extreme_parameters(head).to(dtype)
        for uniform in (0.0, 1e-12, 0.5, 1 - 2**-53):
            values = head.draw(parameters, torch.full((len(parameters),), uniform, dtype=torch.float64))
            assert values.dtype == torch.int64
            assert bool(((values >= 0) & (values < 256)).all())


@every_type
@pytest.mark.parametrize("precise", [Tensor.double, Tensor.float], ids=["double", "device-without-double"])
def test_a_value_of_probability_zero_is_never_drawn(dtype: torch.dtype, precise, monkeypatch) -> None:
    """Top-k and top-p give many values probability 0. Some uniform numbers here are rounded to 1 in float32."""
    monkeypatch.setattr(heads, "precise", precise)
    probabilities = torch.tensor([[0, 0.25, 0, 0.25, 0.5, 0, 0]], dtype=dtype)
    uniforms = torch.tensor([0.0, 0.1, 0.25, 0.3, 0.5, 0.75, 1 - 2**-24, 1 - 2**-30, 1 - 2**-53], dtype=torch.float64)
    values, places = invert_cumulative(probabilities.expand(9, -1), uniforms)
    assert values.tolist() == [1, 1, 3, 3, 4, 4, 4, 4, 4]
    assert bool(((places >= 0) & (places <= 1)).all())


def test_the_position_within_a_share_is_uniform() -> None:
    probabilities = torch.tensor([[0.2, 0.0, 0.3, 0.5]], dtype=torch.float64)
    uniforms = torch.tensor([0.0, 0.05, 0.15, 0.2, 0.35, 0.5, 0.75], dtype=torch.float64)
    values, places = invert_cumulative(probabilities.expand(7, -1), uniforms)
    assert values.tolist() == [0, 0, 0, 2, 2, 3, 3]
    expected = torch.tensor([0, 0.25, 0.75, 0, 0.5, 0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(places, expected, rtol=0, atol=1e-12)


def test_the_position_within_a_tiny_share_is_between_0_and_1() -> None:
    probabilities = torch.exp(8 * torch.randn(500, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    probabilities /= probabilities.sum(dim=-1, keepdim=True)
    borders = probabilities.cumsum(dim=-1)
    for column in range(59):
        _, places = invert_cumulative(probabilities, borders[:, column] / borders[:, -1])
        assert bool(((places >= 0) & (places <= 1)).all())


def test_probabilities_need_not_add_up_to_one() -> None:
    probabilities = torch.tensor([[0.1, 0.2, 0.3]], dtype=torch.float64)
    uniforms = torch.tensor([0.0, 0.4999 / 3, 0.501 / 3, 0.499, 0.501, 0.9999], dtype=torch.float64)
    assert invert_cumulative(probabilities.expand(6, -1), uniforms)[0].tolist() == [0, 0, 1, 1, 2, 2]
