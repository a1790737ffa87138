"""Tests of grids, completions, captions, animations, and PNG metadata."""

import io
from pathlib import Path

import numpy as np
import pytest
from loops import loop_over
from PIL import Image, PngImagePlugin

from linformer_cli.errors import DataError, UsageError
from linformer_cli.report.grids import (
    BACKGROUND,
    CAPTION_HEIGHT,
    CELL,
    GAP,
    HIDDEN_TONES,
    LAST_MILLISECONDS,
    MOST_FRAMES,
    TRANSPARENT_TONES,
    encode_gif,
    encode_png,
    frame_rows,
    hide_rows,
    read_png_metadata,
    render_captioned_row,
    render_completion,
    render_grid,
    render_title,
    stack_rows,
    to_picture,
)


def random_images(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def flat_images(*tones):
    return np.array(tones, dtype=np.uint8)[:, None, None, None]


# render_grid


def test_a_grid_has_its_images_in_raster_order_with_gaps_only_between_them():
    grid = render_grid(flat_images(1, 2, 3), columns=2, scale=2)
    g = BACKGROUND
    expected = [
        [1, 1, g, g, 2, 2],
        [1, 1, g, g, 2, 2],
        [g, g, g, g, g, g],
        [g, g, g, g, g, g],
        [3, 3, g, g, g, g],
        [3, 3, g, g, g, g],
    ]
    np.testing.assert_array_equal(np.asarray(grid), expected)


def test_a_grid_shows_transparent_pixels_as_a_light_checkerboard():
    images = random_images(1, 5, 7, 4)
    images[0, 0, :, 3], images[0, 1, :, 3] = 0, 255
    shown = np.asarray(render_grid(images, scale=3)).astype(float)
    rows, columns = np.indices((15, 21)) // CELL
    ground = np.array(TRANSPARENT_TONES)[(rows + columns) % 2][..., None]
    colours, opacity = np.split(images[0].repeat(3, 0).repeat(3, 1) / [1, 1, 1, 255], [3], axis=2)
    np.testing.assert_array_equal(shown[:3], ground[:3].repeat(3, axis=2))
    np.testing.assert_array_equal(shown[3:6], colours[3:6])
    np.testing.assert_allclose(shown, colours * opacity + ground * (1 - opacity), atol=0.51)


def test_a_picture_with_a_palette_is_indexed_and_transparent(tmp_path):
    indices = random_images(5, 7, 1) % 3
    colours = [(0, 0, 0, 0), (255, 128, 1, 255), (9, 8, 7, 128)]
    (tmp_path / "one.png").write_bytes(encode_png(to_picture(indices, colours), {}))
    with Image.open(tmp_path / "one.png") as found:
        assert found.mode == "P"
        np.testing.assert_array_equal(np.asarray(found), indices[..., 0])
        np.testing.assert_array_equal(np.asarray(found.convert("RGBA")), np.array(colours)[indices[..., 0]])


@loop_over("channels, mode", [(1, "L"), (3, "RGB")])
def test_a_grid_of_one_image_at_scale_1_equals_the_image(channels, mode):
    images = random_images(1, 5, 7, channels)
    grid = render_grid(images, scale=1)
    assert grid.mode == mode
    np.testing.assert_array_equal(np.asarray(grid).reshape(5, 7, channels), images[0])


@loop_over(
    "count, height, width, columns",
    [(1, 8, 8, 1), (2, 8, 8, 2), (3, 8, 8, 3), (5, 8, 8, 3), (8, 8, 8, 4), (16, 8, 8, 4), (4, 32, 8, 4), (4, 8, 32, 1)],
)
def test_a_grid_is_nearly_square(count, height, width, columns):
    grid = render_grid(np.zeros((count, height, width, 1), np.uint8), scale=1)
    assert grid.size == (columns * (width + GAP) - GAP, -(-count // columns) * (height + GAP) - GAP)


@loop_over("count, side, enlarged", [(16, 28, 4 * 28 * 5), (64, 32, 8 * 32 * 2), (1, 8, 8 * 8), (4, 512, 1024)])
def test_the_default_scale_depends_on_the_size_of_the_grid(count, side, enlarged):
    gaps = (count**0.5 - 1) * GAP
    assert max(render_grid(np.zeros((count, side, side, 1), np.uint8)).size) == enlarged + gaps
    assert render_grid(flat_images(1, 2), columns=9, scale=1).size == (2 + GAP, 1)  # no column is empty


@loop_over(
    "images, numbers, error, message",
    [
        (flat_images(1), {"columns": 0}, UsageError, "^columns must be at least 1, found 0$"),
        (flat_images(1), {"scale": -1}, UsageError, "^scale must be at least 1, found -1$"),
        (np.zeros((2, 3, 3, 1), np.float32), {}, DataError, r"found float32 \[2, 3, 3, 1\]"),
        (np.zeros((2, 3, 3), np.uint8), {}, DataError, r"found uint8 \[2, 3, 3\]"),
        (np.zeros((2, 3, 3, 2), np.uint8), {}, DataError, r"found uint8 \[2, 3, 3, 2\]"),
        (np.zeros((0, 3, 3, 1), np.uint8), {}, DataError, r"found an array of \[0, 3, 3, 1\]"),
    ],
)
def test_a_grid_refuses_impossible_numbers_and_arrays_that_are_not_images(images, numbers, error, message):
    with pytest.raises(error, match=message):
        render_grid(images, **numbers)


# render_completion and stack_rows


def completion_cells(picture, count, width):
    """Return the images of a row as arrays; each column is as wide as its image."""
    array = np.asarray(picture)[CAPTION_HEIGHT:]
    return [array[:, column * (width + GAP) :][:, :width] for column in range(count)]


def first(image, known):
    """The first `known` values of an image are kept."""
    return (np.arange(image.size) < known).reshape(image.shape)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_completion_shows_all_images_and_hides_only_the_unknown_values(channels):
    scale, side = 16, 4
    original, *completions = random_images(3, side, side, channels)
    known = 2 * side * channels + channels + 1  # with three channels, the last known value is the red of a pixel
    picture = render_completion(original, first(original, known), np.stack(completions), scale=scale)
    assert picture.size == (4 * side * scale + 3 * GAP, side * scale + CAPTION_HEIGHT)
    shown, *others = completion_cells(picture, 4, side * scale)

    for cell, image in zip(others, [*completions, original], strict=True):
        np.testing.assert_array_equal(cell.reshape(64, 64, channels), image.repeat(scale, 0).repeat(scale, 1))
    values = shown.reshape(side, scale, side, scale, channels).transpose(0, 2, 4, 1, 3)  # [H, W, C, scale, scale]
    values = values.reshape(-1, scale, scale)
    for index in range(original.size):
        if index < known:
            assert (values[index] == original.flat[index]).all(), index
        else:
            assert set(values[index].flat) == set(HIDDEN_TONES), index


def test_a_hidden_part_differs_from_a_transparent_one():
    given = np.zeros((8, 64, 4), np.uint8)
    shown = completion_cells(render_completion(given, first(given, 4 * 64), given[None], scale=1), 2, 64)
    assert set(shown[0][:1].flat) == set(shown[1].flat) == set(TRANSPARENT_TONES)
    assert set(shown[0][1:].flat) == set(HIDDEN_TONES)
    # Of the first hidden pixel, only the red value is known.
    red = completion_cells(render_completion(given, first(given, 4 * 64 + 1), given[None], scale=1), 1, 64)[0][1, 0]
    assert red[0] == 0 and set(red[1:]) <= set(HIDDEN_TONES)


def test_captions_of_small_images_do_not_overlap():
    pictures = [Image.new("L", (4, 4))] * 4
    picture = render_captioned_row(pictures, ["given", "1", "2", "original"], gap=6)
    inked = (np.asarray(picture)[:CAPTION_HEIGHT] > BACKGROUND).any(axis=0)
    blank_runs = [len(run) for run in "".join("x" if ink else " " for ink in inked).split("x") if run]
    # Letters are one or two pixels apart. Wider gaps separate the four captions.
    assert sum(length >= 6 for length in blank_runs[1:-1]) == 3
    assert not inked[[0, -1]].any()


def test_a_completion_refuses_images_and_kept_parts_of_other_shapes():
    image = np.zeros((4, 4, 1), np.uint8)
    for shape in ((4, 4), (4, 4, 3), (3, 4, 1)):
        with pytest.raises(DataError, match=r"like the original, found \["):
            render_completion(image, np.ones(shape, bool), image[None])
    with pytest.raises(DataError, match=r"original image must be uint8 \[4, 4, 1\].*found uint8 \[4, 5, 1\]"):
        render_completion(np.zeros((4, 5, 1), np.uint8), first(image, 0), image[None])
    with pytest.raises(DataError, match=r"unframed image must be uint8.*found float64 \[4, 4, 1\]"):
        render_completion(image, first(image, 0), image[None], picture=np.zeros((4, 4, 1)))


def test_stacked_rows_are_left_aligned_and_all_become_rgb_if_one_is():
    grey, colour = Image.new("L", (2, 1), 9), Image.new("RGB", (1, 1), (1, 2, 3))
    stack = stack_rows([grey, colour], gap=1)
    b = [BACKGROUND] * 3
    np.testing.assert_array_equal(np.asarray(stack), [[[9] * 3, [9] * 3], [b, b], [[1, 2, 3], b]])
    assert stack_rows([grey, grey]).mode == "L"
    with pytest.raises(DataError, match="no pictures"):
        stack_rows([])


# encode_png and read_png_metadata


@pytest.fixture
def read(tmp_path):
    """Provides `read(data)`, which calls `read_png_metadata` with a file that contains `data`."""

    def read(data):
        (tmp_path / "a.png").write_bytes(data)
        return read_png_metadata(tmp_path / "a.png")

    return read


def test_a_png_holds_the_image_and_compact_sorted_metadata(read):
    image = Image.fromarray(random_images(3, 4, 3))
    data = encode_png(image, {"b": [1, "ä|\n", Path("runs/a")], "a": np.float32(0.5)})
    assert read(data) == {"a": 0.5, "b": [1, "ä|\n", str(Path("runs/a"))]}
    with Image.open(io.BytesIO(data)) as decoded:
        assert isinstance(decoded, PngImagePlugin.PngImageFile)
        assert decoded.text["lintx"].startswith('{"a":0.5,"b":[1,')
        np.testing.assert_array_equal(np.asarray(decoded), np.asarray(image))
    assert encode_png(image, {"b": 1, "a": None}) == encode_png(image, {"a": None, "b": 1})


def test_metadata_after_the_pixels_is_found(read):
    data = encode_png(Image.new("L", (2, 2)), {"seed": 3})
    start = data.index(b"tEXt") - 4
    end = start + 12 + int.from_bytes(data[start : start + 4], "big")
    last = data.index(b"IEND") - 4
    moved = data[:start] + data[end:last] + data[start:end] + data[last:]
    assert moved != data
    assert read(moved) == {"seed": 3}


def png_with_text(text):
    information = PngImagePlugin.PngInfo()
    information.add_text("lintx", text)
    buffer = io.BytesIO()
    Image.new("L", (2, 2)).save(buffer, format="PNG", pnginfo=information)
    return buffer.getvalue()


def plain_image(format):
    buffer = io.BytesIO()
    Image.new("L", (2, 2)).save(buffer, format=format)
    return buffer.getvalue()


def test_a_file_that_is_no_whole_png_gives_a_one_line_error(read, tmp_path, raises_one_line):
    for data, message in (
        (b"", "a.png' is not a PNG image"),
        (plain_image("GIF"), "a.png' is not a PNG image"),
        (encode_png(Image.new("L", (64, 64)), {})[:-30], "a.png': "),
    ):
        with raises_one_line(DataError, message):
            read(data)
    with raises_one_line(DataError, "cannot read '", "none.png': no such file or directory"):
        read_png_metadata(tmp_path / "none.png")
    for other in (plain_image("PNG"), png_with_text("not json"), png_with_text("[1]")):
        assert read(other) is None


def test_pictures_of_several_sizes_fit_into_one_row():
    pictures = [Image.new("L", (40, 10), 200), Image.new("RGB", (5, 30), (250, 0, 0))]
    row = render_captioned_row(pictures, ["a", "a long caption"], gap=4)
    assert row.mode == "RGB" and row.height == CAPTION_HEIGHT + 30
    assert row.getpixel((20, CAPTION_HEIGHT + 5)) == (200, 200, 200)
    column = row.width - 44
    assert column > 60 and row.getpixel((44 + column // 2, CAPTION_HEIGHT + 29)) == (250, 0, 0)
    with pytest.raises(DataError, match="no pictures"):
        render_captioned_row([], [])


def test_a_longer_title_is_wider():
    short, long = render_title("a"), render_title("a" * 30)
    assert short.height == long.height == CAPTION_HEIGHT and long.width > 5 * short.width
    assert max(long.tobytes()) > 200


# Frames of images that are sampled row by row, and their GIF


@loop_over(("height", "first"), [(28, 0), (28, 14), (28, 27), (1, 0), (500, 0), (64, 0), (65, 3)])
def test_frames_show_the_image_from_the_first_row_to_the_last(height: int, first: int) -> None:
    rows = frame_rows(height, first)
    assert rows[0] == first and rows[-1] == height
    assert rows == sorted(set(rows))
    assert len(rows) == min(height - first, MOST_FRAMES) + 1


def test_later_rows_are_hidden_in_a_copy() -> None:
    images = np.full((2, 4, 3, 1), 200, dtype=np.uint8)
    hidden = hide_rows(images, 1)
    assert (hidden[:, :1] == 200).all() and (hidden[:, 1:] == BACKGROUND).all()
    assert (images == 200).all()
    hidden = hide_rows(np.zeros((2, 4, 3, 4), np.uint8), 1)
    assert (hidden[:, :1] == 0).all() and (hidden[:, 1:] == [BACKGROUND] * 3 + [255]).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_a_gif_shows_every_frame_and_stays_on_the_last(channels: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 6, 5, channels), dtype=np.uint8)
    frames = [render_grid(hide_rows(images, rows), scale=1) for rows in frame_rows(6)]
    with Image.open(io.BytesIO(encode_gif(frames, {"seed": 3}))) as gif:
        assert gif.n_frames == 7
        assert gif.info["loop"] == 0
        assert gif.info["comment"] == b'{"seed":3}'
        gif.seek(6)
        assert gif.info["duration"] == LAST_MILLISECONDS
        shown = np.asarray(gif.convert("RGB"), dtype=int)
    expected = np.asarray(frames[-1].convert("RGB"), dtype=int)
    # Greys are exact, but colours are converted to a palette.
    assert np.abs(shown - expected).max() <= (0 if channels == 1 else 40)
