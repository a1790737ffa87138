"""Tests of durations, bytes and counts as text."""

import math

import pytest
from loops import loop_over

from linformer_cli.units import (
    format_bytes,
    format_count,
    format_duration,
    format_microseconds,
    format_milliseconds,
    parse_count,
    printable,
)


@loop_over(
    "seconds, expected",
    [
        *((0, "0 s"), (-3, "0 s"), (math.nan, "unknown"), (math.inf, "unknown")),
        *((0.0123, "12.3 ms"), (0.04, "40 ms")),
        *((0.1, "0.1 s"), (0.44, "0.4 s"), (9.94, "9.9 s"), (9.96, "10 s"), (45.4, "45 s")),
        *((59.6, "1 min 0 s"), (723, "12 min 3 s")),
        *((3599.6, "1 h 0 min"), (3840, "1 h 4 min"), (86370, "1 d 0 h"), (183600, "2 d 3 h")),
    ],
)
def test_durations_are_written_with_suitable_units(seconds, expected):
    assert format_duration(seconds) == expected


@loop_over(
    "count, expected",
    [
        *((0, "0 B"), (512, "512 B"), (1023, "1023 B")),
        *((1024, "1 KiB"), (270336, "264 KiB"), (2**20 - 1, "1 MiB"), (1.5 * 2**20, "1.5 MiB")),
        *((3.14159 * 2**30, "3.14 GiB"), (2**63, "8192 PiB")),
    ],
)
def test_bytes_are_written_with_suitable_units(count, expected):
    assert format_bytes(count) == expected


@loop_over(
    "count, expected",
    [
        *((0, "0"), (784, "784"), (1000, "1 k"), (12_345, "12.3 k"), (-4200, "-4.2 k")),
        *((999_949, "1 M"), (6_360_000, "6.36 M"), (9_996_000, "10 M"), (1_200_000_000, "1.2 G")),
    ],
)
def test_large_counts_are_abbreviated(count, expected):
    assert format_count(count) == expected


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.000123, "0.12 ms"), (0.00123, "1.23 ms"), (0.0453, "45.3 ms"), (0.1234, "123 ms"), (1.2048, "1,205 ms")],
)
def test_measured_times_keep_three_digits(seconds: float, shown: str) -> None:
    assert format_milliseconds(seconds) == shown
    assert format_microseconds(seconds / 1000) == shown.replace("ms", "µs")


def test_a_count_is_read_only_if_it_is_written_in_digits_and_not_too_large() -> None:
    for text in ("", "-1", "+1", " 1", "1.0", "1e3", "1_0", "\u00b2", "\u0663", "9" * 400, "9" * 5000, str(2**63)):
        assert parse_count(text) is None
    assert [parse_count(text) for text in ("0", "12", "007", str(2**63 - 1))] == [0, 12, 7, 2**63 - 1]
    assert parse_count("10", most=10) == 10 and parse_count("11", most=10) is None


def test_control_characters_and_bytes_that_are_not_utf8_are_not_shown() -> None:
    assert printable("a b\u00e4\u753b") == "a b\u00e4\u753b"
    assert printable("a\x1b[2J\x07\x9b\udcff\n") == "a\ufffd[2J\ufffd\ufffd\ufffd\ufffd"
