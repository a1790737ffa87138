import io
import math

import numpy as np
import pytest
from rich.console import Console

from linformer_cli.errors import DataError
from linformer_cli.report.terminal import (
    format_bytes,
    format_count,
    format_duration,
    format_microseconds,
    format_milliseconds,
    render_preview,
)


def grey(*images):
    """Images [N, H, W, 1] from nested lists of tones."""
    return np.array(images, dtype=np.uint8)[..., None]


def printed(text, width=80, color_system=None):
    output = io.StringIO()
    Console(file=output, width=width, color_system=color_system, force_terminal=True, _environ={}).print(text)
    return output.getvalue()


# render_preview


def test_a_character_is_two_pixels_upper_in_front_of_lower():
    image = np.array([[[[1, 2, 3], [1, 2, 3]], [[4, 5, 6], [7, 8, 9]]]], dtype=np.uint8)
    rendered = printed(render_preview(image, 80, colour=True), color_system="truecolor")
    assert rendered == "\x1b[38;2;1;2;3;48;2;4;5;6m▀\x1b[0m\x1b[38;2;1;2;3;48;2;7;8;9m▀\x1b[0m\n"


def test_equal_neighbours_share_one_escape_code_and_an_odd_row_has_no_ground():
    rendered = printed(render_preview(grey([[9, 9, 9]]), 80, colour=True), color_system="truecolor")
    assert rendered == "\x1b[38;2;9;9;9m▀▀▀\x1b[0m\n"


def test_without_colour_halves_and_shades_stand_for_brightness():
    image = grey([[0, 64, 128, 192, 255, 255, 0], [0, 64, 128, 192, 255, 0, 255], [255] * 7])
    rendered = printed(render_preview(image, 80, colour=False))
    assert rendered == " ░▒▓█▀▄\n▀▀▀▀▀▀▀\n"


def test_without_colour_green_is_brighter_than_blue():
    image = np.array([[[[0, 255, 0], [0, 0, 255]]] * 2], dtype=np.uint8)
    assert render_preview(image, 80, colour=False).plain == "▒ "


@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize(
    "count, width, height_limit, expected",
    [
        (3, 13, 28, ["AAA  AAA  AAA", "AAA  AAA  AAA"]),
        (3, 12, 28, ["AAA  AAA", "AAA  AAA", "", "AAA", "AAA"]),
        (3, 12, 4, ["AAA  AAA", "AAA  AAA", "AAA", "AAA"]),
        (3, 12, 3, ["AAA  AAA", "AAA  AAA", "2 of 3 images"[:12]]),
        (9, 80, 28, ["  ".join(["AAA"] * 9)] * 2),
    ],
    ids=["one-line", "two-lines", "no-room-for-gap", "not-all", "many"],
)
def test_images_stand_side_by_side_as_far_as_they_fit(count, width, height_limit, expected, colour):
    images = np.full((count, 4, 3, 1), 255, np.uint8)
    text = render_preview(images, width, height_limit, colour=colour)
    assert text.plain.replace("▀", "A").replace("█", "A").split("\n") == expected
    # The console must neither wrap nor crop it.
    assert printed(text, width=width).split("\n")[:-1] == text.plain.split("\n")


@pytest.mark.parametrize(
    "height, width, columns, rows, expected_columns, expected_rows",
    [
        (256, 256, 64, 40, 64, 32),
        (256, 256, 100, 28, 56, 28),
        (100, 400, 40, 28, 40, 5),
        (7, 5, 5, 4, 5, 4),
        (300, 1, 80, 28, 1, 28),
        (1, 500, 80, 28, 80, 1),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_large_images_shrink_in_proportion(height, width, columns, rows, expected_columns, expected_rows, channels):
    images = np.full((1, height, width, channels), 200, np.uint8)
    lines = render_preview(images, columns, rows, colour=True).plain.split("\n")
    assert [len(line) for line in lines] == [expected_columns] * expected_rows


def test_shrinking_takes_the_mean():
    image = np.zeros((1, 4, 8, 1), np.uint8)
    image[:, :, 1::2] = 100
    rendered = printed(render_preview(image, 4, colour=True), color_system="truecolor")
    assert rendered == "\x1b[38;2;50;50;50;48;2;50;50;50m▀▀▀▀\x1b[0m\n"


def test_preview_refuses_what_are_no_images():
    with pytest.raises(DataError, match=r"found float64 \[1, 2, 2, 1\]"):
        render_preview(np.zeros((1, 2, 2, 1)), 80, colour=True)


# The words for numbers


@pytest.mark.parametrize(
    "seconds, expected",
    [
        (0, "0 s"),
        (-3, "0 s"),
        (0.0123, "12.3 ms"),
        (0.04, "40 ms"),
        (0.1, "0.1 s"),
        (0.44, "0.4 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (45.4, "45 s"),
        (59.6, "1 min 0 s"),
        (723, "12 min 3 s"),
        (3599.6, "1 h 0 min"),
        (3840, "1 h 4 min"),
        (86370, "1 d 0 h"),
        (183600, "2 d 3 h"),
        (math.nan, "unknown"),
        (math.inf, "unknown"),
    ],
)
def test_format_duration(seconds, expected):
    assert format_duration(seconds) == expected


@pytest.mark.parametrize(
    "count, expected",
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (270336, "264 KiB"),
        (1.5 * 2**20, "1.5 MiB"),
        (2**20 - 1, "1 MiB"),
        (3.14159 * 2**30, "3.14 GiB"),
        (2**63, "8192 PiB"),
    ],
)
def test_format_bytes(count, expected):
    assert format_bytes(count) == expected


@pytest.mark.parametrize(
    "count, expected",
    [
        (0, "0"),
        (784, "784"),
        (1000, "1 k"),
        (12_345, "12.3 k"),
        (999_949, "1 M"),
        (6_360_000, "6.36 M"),
        (9_996_000, "10 M"),
        (1_200_000_000, "1.2 G"),
        (-4200, "-4.2 k"),
    ],
)
def test_format_count(count, expected):
    assert format_count(count) == expected


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.000123, "0.12 ms"), (0.00123, "1.23 ms"), (0.0453, "45.3 ms"), (0.1234, "123 ms"), (1.2048, "1,205 ms")],
)
def test_measured_times_keep_three_digits(seconds: float, shown: str) -> None:
    assert format_milliseconds(seconds) == shown
    assert format_microseconds(seconds / 1000) == shown.replace("ms", "µs")
