"""Tests of images and text in the terminal, with and without colour."""

import io
from pathlib import Path

import numpy as np
import pytest
from loops import loop_over
from rich.console import Console

from linformer_cli.errors import DataError
from linformer_cli.metrics import RunSeries, TrainingPoint, ValidationPoint
from linformer_cli.report.terminal import SafeText, render_curves, render_preview, render_windows


def grey(*images):
    """Build images [N, H, W, 1] from nested lists of grey levels."""
    return np.array(images, dtype=np.uint8)[..., None]


def printed(text, width=80, color_system=None):
    output = io.StringIO()
    Console(file=output, width=width, color_system=color_system, force_terminal=True, _environ={}).print(text)
    return output.getvalue()


# render_curves


def test_curves_are_dots_on_a_logarithmic_scale():
    training = [TrainingPoint(step, 8 * step, step / 2, bits, 0.1) for step, bits in ((0, 8.0), (1, 4.0), (4, 0.0))]
    validation = [ValidationPoint(5, 40, 65.0, 2.0, None)]
    series = [RunSeries("first", Path(), training[:2], validation), RunSeries("second", Path(), training[1:2], [])]
    assert render_curves(series, 18, 3).plain.splitlines() == [
        "first: step 5, 1 min 5 s, training 4.0000, validation 2.0000 bits/dim",
        "second: step 1, 0.5 s, training 4.0000 bits/dim",
        " 8.000 ·          ",
        " 4.000   ·        ",
        " 2.000           ●",
        "         40 images",
    ]
    assert render_curves([RunSeries("zero", Path(), training, [])], 18, 3).plain.splitlines()[3] == " 0.001           ·"


# render_preview


@loop_over(
    "image, width, expected",
    [
        # The lower of two pixels is the background.
        (
            np.array([[[[1, 2, 3], [1, 2, 3]], [[4, 5, 6], [7, 8, 9]]]], dtype=np.uint8),
            80,
            "\x1b[38;2;1;2;3;48;2;4;5;6m▀\x1b[0m\x1b[38;2;1;2;3;48;2;7;8;9m▀\x1b[0m\n",
        ),
        # Equal neighbours share one escape code, and an odd last row has no background.
        (grey([[9, 9, 9]]), 80, "\x1b[38;2;9;9;9m▀▀▀\x1b[0m\n"),
        # Shrinking averages pixels.
        (grey([[0, 100] * 4] * 4), 4, "\x1b[38;2;50;50;50;48;2;50;50;50m▀▀▀▀\x1b[0m\n"),
    ],
)
def test_a_character_shows_two_pixels_in_their_colours(image, width, expected):
    assert printed(render_preview(image, width, colour=True), color_system="truecolor") == expected


def test_without_colour_brightness_is_shown_by_half_blocks_and_shades():
    image = grey([[0, 64, 128, 192, 255, 255, 0], [0, 64, 128, 192, 255, 0, 255], [255] * 7])
    assert printed(render_preview(image, 80, colour=False)) == " ░▒▓█▀▄\n▀▀▀▀▀▀▀\n"
    green_and_blue = np.array([[[[0, 255, 0], [0, 0, 255]]] * 2], dtype=np.uint8)
    assert render_preview(green_and_blue, 80, colour=False).plain == "▒ "


@loop_over("colour", [True, False])
@loop_over(
    "count, width, height_limit, expected",
    [
        (3, 13, 28, ["AAA  AAA  AAA", "AAA  AAA  AAA"]),
        (3, 12, 28, ["AAA  AAA", "AAA  AAA", "", "AAA", "AAA"]),
        (3, 12, 4, ["AAA  AAA", "AAA  AAA", "AAA", "AAA"]),
        (3, 12, 3, ["AAA  AAA", "AAA  AAA", "2 of 3 images"[:12]]),
        (9, 80, 28, ["  ".join(["AAA"] * 9)] * 2),
    ],
)
def test_as_many_images_as_fit_are_shown_side_by_side(count, width, height_limit, expected, colour):
    images = np.full((count, 4, 3, 1), 255, np.uint8)
    text = render_preview(images, width, height_limit, colour=colour)
    assert text.plain.replace("▀", "A").replace("█", "A").split("\n") == expected
    # The console must not wrap or crop the preview.
    assert printed(text, width=width).split("\n")[:-1] == text.plain.split("\n")


@loop_over(
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
@loop_over("channels", [1, 3])
def test_large_images_shrink_with_their_proportions_kept(
    height, width, columns, rows, expected_columns, expected_rows, channels
):
    images = np.full((1, height, width, channels), 200, np.uint8)
    lines = render_preview(images, columns, rows, colour=True).plain.split("\n")
    assert [len(line) for line in lines] == [expected_columns] * expected_rows


def test_a_preview_refuses_arrays_that_are_not_images():
    with pytest.raises(DataError, match=r"found float64 \[1, 2, 2, 1\]"):
        render_preview(np.zeros((1, 2, 2, 1)), 80, colour=True)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_characters_that_arrive_in_parts_are_joined(size: int) -> None:
    data, text = "naïve €\t😀\n".encode(), SafeText()
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    assert "".join(text.decode(part) for part in parts) + text.decode(b"", last=True) == "naïve €\t😀\n"


def test_a_terminal_gets_no_control_characters_and_no_invalid_text() -> None:
    shown = SafeText().decode(b"\x1b[2J\x07a\x00\r\n\xff\xe2\x82|\xc2\x9b\xe2\x80\xae\xe2\x82", last=True)
    assert shown == "\\x1b[2J\\x07a\\x00\\r\n\ufffd\ufffd|\\x9b\\u202e\ufffd"
    assert all(character.isprintable() or character == "\n" for character in shown)


def test_windows_are_numbered() -> None:
    assert render_windows([b"one\n", b"\xe2\x82"]) == "--- 0 ---\none\n\n--- 1 ---\n\ufffd\n"
