from functools import partial

import pytest
from loops import loop_over

from linformer_cli.cli.options import LARGEST_COUNT, parse_duration, parse_numbers, parse_pairs, parse_size, parse_sizes
from linformer_cli.errors import UsageError


@loop_over(
    ("text", "seconds"),
    [
        *(("90", 90), ("90s", 90), ("10m", 600), ("10 min", 600)),
        *(("1.5h", 5400), ("1h30m", 5400), ("1H 5s", 3605), ("2d", 172800)),
    ],
)
def test_times_are_parsed_with_their_units(text, seconds):
    assert parse_duration(text) == seconds


@loop_over("text", ["", "m", "ten", "10x", "-5m", "0s", "1h-5m", "5m!", "1 0m", "5 5", "1h30", "1.h"])
def test_an_invalid_time_is_refused(text):
    with pytest.raises(UsageError):
        parse_duration(text)


@pytest.mark.parametrize("text", ["3651d", "9" * 41, "9" * 400 + "d"])
def test_a_time_beyond_ten_years_is_refused(text, raises_one_line) -> None:
    with raises_one_line(UsageError, "at most 3650 days"):
        parse_duration(text)
    assert parse_duration("3650d") == 3650 * 86400


def test_pairs_are_parsed_into_a_dictionary():
    assert parse_pairs(["chunk=16", "feature_map=elu", "text=a=b"], "--x") == {
        "chunk": "16",
        "feature_map": "elu",
        "text": "a=b",
    }
    assert parse_pairs(None, "--x") == {}


@pytest.mark.parametrize("pairs", [["chunk"], ["=3"], ["chunk=1", "chunk=2"]])
def test_wrong_pairs_are_refused(pairs):
    with pytest.raises(UsageError, match="--x"):
        parse_pairs(pairs, "--x")


@loop_over("parse", [partial(parse_size, example="1"), parse_sizes, parse_numbers])
@loop_over("text", ["", "0", "-1", "x", "1,", "nan", "inf"])
def test_numbers_that_are_not_positive_are_refused(parse, text) -> None:
    with pytest.raises(UsageError, match="--x takes"):
        parse(text, "--x")


@loop_over("parse", [partial(parse_size, example="1"), parse_sizes])
@loop_over("text", [str(LARGEST_COUNT + 1), str(2**63), "9" * 20, "9" * 5000])
def test_an_absurdly_large_size_is_refused(parse, text) -> None:
    with pytest.raises(UsageError, match="--x takes"):
        parse(text, "--x")
