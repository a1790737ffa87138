"""Tests of parts of pictures: which pixels are kept."""

import numpy as np
from loops import loop_over

from linformer_cli.config import ImageShape
from linformer_cli.data.parts import choose_part
from linformer_cli.errors import UsageError

GREY = ImageShape(height=28, width=28)
COLOUR = ImageShape(height=32, width=20, channels=3)


@loop_over(
    ("text", "shape", "known"),
    [
        *((half, GREY, 392) for half in ("top:0.5", "top:50%", "top:14rows", "top:14", "top:392px", " TOP:14Rows ")),
        *((nothing, GREY, 0) for nothing in ("top:0", "top:0.0", "top:0%")),
        *((one_row, GREY, 28) for one_row in ("top:1row", "top:1")),
        *(("top:12.5%", GREY, 98), ("top:1px", GREY, 1), ("top:783px", GREY, 783), ("top:27rows", GREY, 756)),
        ("top:0.3", ImageShape(height=1, width=7), 2),
        # A pixel is kept with all its channels.
        ("top:0.5", COLOUR, 960),
        ("top:16rows", COLOUR, 960),
        ("top:5px", COLOUR, 15),
        ("top:0.003", COLOUR, 6),
    ],
)
def test_the_first_pixels_are_kept(text: str, shape: ImageShape, known: int) -> None:
    kept = choose_part(text, None, None, shape).pixels
    assert kept.shape == (shape.height, shape.width)
    assert np.array_equal(kept.ravel(), np.arange(kept.size) < known // shape.channels)


@loop_over(
    "text",
    [
        *("", "top", "top:", ":0.5", "0.5", "half", "14rows", "middle:0.5", "top:0.5:0.5"),
        *("top:half", "top:rows", "top:%", "top:14lines", "top:1.5rows", "top:0.5px"),
        *("top:1.5", "top:101%", "top:-1", "top:-0.5", "top:nan", "top:inf", "top:1e400px"),
    ],
)
def test_the_error_for_an_invalid_keep_gives_examples(raises_one_line, text: str) -> None:
    with raises_one_line(UsageError, "--keep", "top:0.5", "top:14rows", f"found '{text}'"):
        choose_part(text, None, None, GREY)


@loop_over(
    ("text", "rows", "columns"),
    [
        ("bottom:14", slice(14, 28), slice(None)),
        ("bottom:0.25", slice(21, 28), slice(None)),
        ("bottom:56px", slice(26, 28), slice(None)),
        ("left:14", slice(None), slice(14)),
        ("left:14columns", slice(None), slice(14)),
        ("right:50%", slice(None), slice(14, 28)),
        ("right:1column", slice(None), slice(27, 28)),
        ("right:0.01", slice(0), slice(0)),
        ("box:2,20,3,8", slice(2, 5), slice(20, 28)),
        (" Box: 0, 0, 27, 28", slice(27), slice(None)),
    ],
)
def test_every_part_can_be_kept_or_erased(text: str, rows: slice, columns: slice) -> None:
    expected = np.zeros((28, 28), bool)
    expected[rows, columns] = True
    assert np.array_equal(choose_part(text, None, None, GREY).pixels, expected)
    assert np.array_equal(choose_part("top:20", text, None, GREY).pixels, (np.arange(28) < 20)[:, None] & ~expected)
    if expected.any():
        assert np.array_equal(choose_part(None, text, None, GREY).pixels, ~expected)


@loop_over(
    "text", ["box:1,2,3", "box:1,2,3,x", "box:1,2,3,-4", "box:", "left:5px", "left:5rows", "top:5columns", "edge:1"]
)
def test_what_names_no_part_is_refused(raises_one_line, text: str) -> None:
    with raises_one_line(UsageError, "--erase takes", "box:ROW,COLUMN,HEIGHT,WIDTH", f"found '{text}'"):
        choose_part(None, text, None, GREY)


@loop_over("text", ["box:0,0,0,5", "box:0,0,5,0", "box:20,0,9,5", "box:0,28,1,1"])
def test_a_box_must_lie_within_the_image(raises_one_line, text: str) -> None:
    with raises_one_line(UsageError, f"--keep {text}", "28 rows and 28 columns"):
        choose_part(text, None, None, GREY)


@loop_over("text", ["top:1.0", "top:100%", "top:28rows", "top:28", "top:784px", "top:9999rows"])
def test_keeping_the_whole_image_is_refused(raises_one_line, text: str) -> None:
    with raises_one_line(UsageError, f"--keep {text}", "nothing is left"):
        choose_part(text, None, None, GREY)
