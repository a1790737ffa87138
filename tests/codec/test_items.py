"""Tests of how items are cut into tiles, and of the names that are allowed."""

import numpy as np
from loops import loop_over

from linformer_cli.codec.items import Contents, Item, Tiling, check_names
from linformer_cli.config import ImageShape
from linformer_cli.errors import DataError


@loop_over("channels", [1, 3])
@loop_over("bands", [1, 2, 3, 4])
@loop_over("size", [(1, 1), (4, 5), (8, 10), (9, 3), (3, 11)])
def test_a_picture_comes_back_from_its_tiles(channels, bands, size) -> None:
    tiling = Tiling(ImageShape(height=4, width=5, channels=channels), False)
    item = Item("a.png", *size, bands)
    picture = np.random.default_rng(0).integers(0, 256, (*size, bands), dtype=np.uint8)
    tiles = tiling.cut(picture)
    assert tiles.shape == (tiling.count(item), 4, 5, channels)
    np.testing.assert_array_equal(tiling.join(item, tiles), picture)


def test_tiles_are_in_raster_order_and_repeat_the_edge() -> None:
    tiling = Tiling(ImageShape(height=2, width=2), False)
    tiles = tiling.cut(np.arange(9, dtype=np.uint8).reshape(3, 3, 1))
    assert tiles[..., 0].tolist() == [[[0, 1], [3, 4]], [[2, 2], [5, 5]], [[6, 7], [6, 7]], [[8, 8], [8, 8]]]


def test_only_the_last_window_of_a_file_is_short() -> None:
    tiling = Tiling(ImageShape(height=1, width=10), True)
    contents = Contents(tiling, [Item(str(size), 1, size, 1) for size in (25, 0, 10, 3, 0)])
    expected = [10, 10, 5, 10, 3]
    assert contents.sequences == 5 and contents.values == 38 and contents.unit == "windows"
    assert contents.lengths(0, 5).tolist() == expected
    for start in range(6):
        for stop in range(start, 6):
            assert contents.lengths(start, stop).tolist() == expected[start:stop]
    assert [contents.rows(index) for index in range(5)] == [(0, 3), (3, 3), (3, 4), (4, 5), (5, 5)]


@loop_over(
    "names",
    [
        *([name] for name in ("/etc/passwd", "../a", "a/../../b", ".", "", "a//b", "a/", "a\\b", "c:x", "a\nb")),
        ["a\0b"],
        ["\udcff"],
        ["x" * 241],
        ["x/" * 600 + "x"],
        ["a", "a"],
        ["a", "a/b"],
        ["a/b/c", "a"],
        ["damaged-a", "a"],
        ["x/a", "x/damaged-a"],
    ],
)
def test_dangerous_names_are_refused(names, raises_one_line) -> None:
    with raises_one_line(DataError):
        check_names(names)


def test_other_names_are_allowed() -> None:
    check_names(["a", "b/a", "b/ä €.png", "..c", "d..", "e f", "1.23\u202fPM", "damaged-c", "x" * 240])
