"""Tests of the choice of a value: the order of filters, ties, extremes, and fixed random streams."""

import math

import numpy as np
import pytest
import torch
from loops import loop_over

from linformer_cli.errors import UsageError
from linformer_cli.sampling.choose import Filters, UniformStreams, draw_filtered, filter_log_probabilities


def filtered(probabilities: list[float], dtype: torch.dtype = torch.float64, **filters: float) -> list[float]:
    logs = torch.tensor(probabilities, dtype=dtype).log()
    return filter_log_probabilities(logs, Filters(**filters)).exp().tolist()  # type: ignore[arg-type]


# Filters


def test_temperature_divides_the_log_probabilities() -> None:
    # The result is p^(1/T), renormalised.
    assert filtered([0.5, 0.25, 0.25], temperature=0.5) == pytest.approx([4 / 6, 1 / 6, 1 / 6], rel=1e-12)
    assert filtered([0.64, 0.32, 0.04], temperature=2.0) == pytest.approx(
        [0.8 / (1 + 0.32**0.5), 0.32**0.5 / (1 + 0.32**0.5), 0.2 / (1 + 0.32**0.5)], rel=1e-12
    )


@loop_over("dtype", [torch.float32, torch.float64])
@loop_over("name", ["temperature", "top_p"])
@loop_over("tiny", [1e-4, 1e-30, 1e-39, 1e-46, 1e-300])
def test_a_tiny_temperature_or_top_p_keeps_the_likeliest_value(name: str, tiny: float, dtype: torch.dtype) -> None:
    assert filtered([0.2, 0.5, 0.3], dtype, **{name: tiny}) == [0, 1, 0]


def test_top_k_keeps_and_renormalises_the_likeliest_values() -> None:
    assert filtered([0.1, 0.4, 0.3, 0.2], top_k=2) == pytest.approx([0, 4 / 7, 3 / 7, 0], rel=1e-12)
    assert filtered([0.1, 0.4, 0.3, 0.2], top_k=1) == [0, 1, 0, 0]
    for top_k in (4, 5, 10**9):
        assert filtered([0.1, 0.4, 0.3, 0.2], top_k=top_k) == pytest.approx([0.1, 0.4, 0.3, 0.2], rel=1e-12)


@loop_over(
    ("top_p", "kept"), [(0.25, 1), (0.5, 1), (0.5001, 2), (0.75, 2), (0.7501, 3), (0.875, 3), (0.876, 4), (1.0, 4)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_the_probability(top_p: float, kept: int) -> None:
    # All probabilities are multiples of 1/8, so no sum is rounded.
    probabilities = [0.125, 0.5, 0.125, 0.25]
    order = [1, 3, 0, 2]
    mass = sum(probabilities[value] for value in order[:kept])
    expected = [p / mass if value in order[:kept] else 0 for value, p in enumerate(probabilities)]
    assert filtered(probabilities, top_p=top_p) == pytest.approx(expected, rel=1e-12)


def test_the_smaller_values_win_ties() -> None:
    assert filtered([0.1, 0.3, 0.3, 0.3], top_k=2) == pytest.approx([0, 0.5, 0.5, 0], rel=1e-12)
    assert filtered([0.25, 0.25, 0.25, 0.25], top_p=0.5) == pytest.approx([0.5, 0.5, 0, 0], rel=1e-12)
    even = torch.full((300,), -math.log(300), dtype=torch.float64)
    kept = filter_log_probabilities(even, Filters(top_k=7)).isfinite().nonzero().flatten()
    assert kept.tolist() == list(range(7))


def test_temperature_comes_before_top_p() -> None:
    # At T = 1/2, the first value has probability 16/26 and alone reaches 0.5. At T = 1, it has 0.4.
    assert filtered([0.4, 0.2, 0.2, 0.1, 0.1], temperature=0.5, top_p=0.5) == [1, 0, 0, 0, 0]
    assert filtered([0.4, 0.2, 0.2, 0.1, 0.1], top_p=0.5) == pytest.approx([2 / 3, 1 / 3, 0, 0, 0], rel=1e-12)


def test_top_k_comes_before_top_p() -> None:
    # After top-k, the first value has probability 4/6 and alone reaches 0.6. Before top-k, it has 0.4.
    assert filtered([0.4, 0.2, 0.2, 0.2], top_k=2, top_p=0.6) == [1, 0, 0, 0]
    assert filtered([0.4, 0.2, 0.2, 0.2], top_p=0.6) == pytest.approx([2 / 3, 1 / 3, 0, 0], rel=1e-12)
    assert filtered([0.4, 0.2, 0.2, 0.2], top_k=2, top_p=0.7) == pytest.approx([2 / 3, 1 / 3, 0, 0], rel=1e-12)


@loop_over(
    ("filters", "parts"),
    [
        ({"temperature": 0.0}, ("--temperature", "above 0", "found 0.0", "--top-k 1")),
        *(({"temperature": value}, ("--temperature", f"found {value}")) for value in (-1.0, math.nan, math.inf)),
        ({"top_k": 0}, ("--top-k", "at least 1", "found 0")),
        ({"top_k": -3}, ("--top-k", "found -3")),
        ({"top_p": 0.0}, ("--top-p", "above 0", "found 0.0")),
        ({"top_p": 1.01}, ("--top-p", "at most 1", "found 1.01")),
        ({"top_p": math.nan}, ("--top-p", "found nan")),
    ],
)
def test_invalid_filters_are_refused(raises_one_line, filters, parts) -> None:
    with raises_one_line(UsageError, *parts):
        Filters(**filters)


# Choosing


@pytest.fixture(params=["categorical", "mixture"])
def head(request, build_tiny_model):
    return build_tiny_model(head=request.param).head


def parameters_of(head, count: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, head.projection.in_features, generator=generator)
    return head(x).to(dtype).detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_dropped_value_is_never_drawn(head, dtype: torch.dtype) -> None:
    parameters = parameters_of(head, 200, dtype)
    filters = Filters(top_k=4)
    kept = filter_log_probabilities(head.log_probabilities(parameters), filters).isfinite()
    # The largest float64 below 1 is 1 in float32. Even then, no value after the last kept one may be drawn.
    for uniform in (0.0, 2.0**-53, 0.5, 1 - 2.0**-24, 1 - 2.0**-30, 1 - 2.0**-53):
        chosen = draw_filtered(
            head.log_probabilities(parameters), torch.full((200,), uniform, dtype=torch.float64), filters
        )
        assert kept.gather(1, chosen.unsqueeze(1)).all()


def test_filtered_values_are_drawn_with_their_probabilities(head) -> None:
    # With numbers spaced evenly over [0, 1), every value must have exactly its share.
    (parameters,) = parameters_of(head, 1)
    filters = Filters(temperature=0.8, top_k=8, top_p=0.95)
    count = 10_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    chosen = draw_filtered(head.log_probabilities(parameters.expand(count, -1)), uniforms, filters)
    shares = torch.bincount(chosen, minlength=16) / count
    expected = filter_log_probabilities(head.log_probabilities(parameters), filters).exp()
    assert (shares - expected).abs().max() <= 1 / count


# Random streams


def test_the_first_numbers_never_change() -> None:
    # These numbers must never change, because users rely on --seed.
    streams = UniformStreams(0, range(3))
    found = torch.stack([streams.take(), streams.take()])
    assert found.tolist() == [
        [0.011546754286331562, 0.8133540609793564, 0.8144335776159864],
        [0.24154919656271812, 0.7513314251083365, 0.4396808049627232],
    ]
    (later,) = UniformStreams(12345, range(678, 679)).take().tolist()
    assert later == 0.3558951948059388


def test_a_stream_is_philox_with_the_seed_and_the_index_as_key() -> None:
    """So numbers are uniform, below 1 and independent."""
    streams = UniformStreams(7, range(5, 6))
    words = np.random.Philox(key=np.array([7, 5], dtype=np.uint64)).random_raw(200)
    for word in words.tolist():
        assert float(streams.take()) == (word >> 11) / 2**53


def test_a_stream_depends_only_on_seed_and_index(monkeypatch) -> None:
    whole = [UniformStreams(3, range(10)).take() for _ in range(1)]
    streams = {
        "alone": UniformStreams(3, range(4, 5)),
        "beside others": UniformStreams(3, range(2, 9)),
        "all": UniformStreams(3, range(10)),
    }
    series = {name: torch.stack([stream.take() for _ in range(150)], dim=1) for name, stream in streams.items()}
    assert torch.equal(series["alone"][0], series["beside others"][2])
    assert torch.equal(series["alone"][0], series["all"][4])
    assert torch.equal(whole[0], series["all"][:, 0])
    for block in (1, 7, 1000):
        monkeypatch.setattr("linformer_cli.sampling.choose._BLOCK", block)
        stream = UniformStreams(3, range(10))
        assert torch.equal(torch.stack([stream.take() for _ in range(150)], dim=1), series["all"])


def test_taken_numbers_are_not_overwritten() -> None:
    streams = UniformStreams(0, range(2))
    first = streams.take()
    kept = first.clone()
    for _ in range(100):
        streams.take().zero_()
    assert torch.equal(first, kept)
