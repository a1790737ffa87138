"""Tests of the user's own pictures: Pillow's modes and formats, three ways to fit, and one-line errors."""

import io
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from loops import loop_over
from PIL import Image

from linformer_cli.config import ImageShape
from linformer_cli.data.look import Look
from linformer_cli.data.parts import choose_part
from linformer_cli.data.pictures import load_picture
from linformer_cli.errors import DataError

GREY = Look(ImageShape(height=6, width=4))
COLOUR = Look(ImageShape(height=6, width=4, channels=3))
RED, BLACK, WHITE = (255, 0, 0), (0, 0, 0), (255, 255, 255)


def noise(*size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)


def store(folder: Path, picture: Image.Image, name: str = "picture.png", **options: object) -> Path:
    picture.save(folder / name, **options)
    return folder / name


def luma(colour: np.ndarray) -> np.ndarray:
    """Convert to grey by ITU-R 601-2, as Pillow documents."""
    return colour.astype(np.float64) @ [0.299, 0.587, 0.114]


# Images of the right size


def test_a_grey_image_of_the_right_size_is_unchanged(tmp_path: Path) -> None:
    pixels = noise(6, 4)
    picture = load_picture(store(tmp_path, Image.fromarray(pixels)), GREY)
    assert picture.image.dtype == np.uint8
    assert np.array_equal(picture.image, pixels[..., None])
    assert picture.notes == ()
    assert picture.path == tmp_path / "picture.png"
    picture.image[0] = 0  # the array can be written to


@pytest.mark.parametrize("name", ["picture.png", "picture.bmp", "picture.tiff", "picture.webp"])
def test_a_colour_image_of_the_right_size_is_unchanged(tmp_path: Path, name: str) -> None:
    pixels = noise(6, 4, 3)
    options = {"lossless": True} if name.endswith("webp") else {}
    picture = load_picture(store(tmp_path, Image.fromarray(pixels), name, **options), COLOUR)
    assert np.array_equal(picture.image, pixels)
    assert picture.notes == ()


def test_an_image_of_the_right_size_is_not_fitted_and_invert_mirrors_its_values(tmp_path: Path) -> None:
    pixels = noise(6, 4)
    path = store(tmp_path, Image.fromarray(pixels))
    for fit in ("crop", "pad", "stretch"):
        assert np.array_equal(load_picture(path, GREY, fit).image[..., 0], pixels)
        assert np.array_equal(load_picture(path, GREY, fit, invert=True).image[..., 0], 255 - pixels)


# Modes


def test_colour_becomes_grey_by_its_brightness(tmp_path: Path) -> None:
    pixels = noise(6, 4, 3)
    picture = load_picture(store(tmp_path, Image.fromarray(pixels)), GREY)
    assert np.abs(picture.image[..., 0] - luma(pixels)).max() <= 1


def test_grey_becomes_colour_by_repeating_the_channel(tmp_path: Path) -> None:
    pixels = noise(6, 4)
    picture = load_picture(store(tmp_path, Image.fromarray(pixels)), COLOUR)
    assert np.array_equal(picture.image, np.repeat(pixels[..., None], 3, axis=2))


def test_one_bit_pixels_become_black_and_white(tmp_path: Path) -> None:
    pixels = noise(6, 4) > 127
    picture = load_picture(store(tmp_path, Image.fromarray(pixels)), GREY)
    assert np.array_equal(picture.image[..., 0], np.where(pixels, 255, 0))


def test_sixteen_bit_pixels_are_scaled_and_not_clipped(tmp_path: Path) -> None:
    pixels = np.linspace(0, 65535, 24).astype(np.uint16).reshape(6, 4)
    for name in ("picture.png", "picture.tiff"):
        path = store(tmp_path, Image.fromarray(pixels), name)
        with Image.open(path) as opened:
            assert opened.mode.startswith("I")
        found = load_picture(path, GREY).image[..., 0]
        assert np.abs(found - pixels / 65535 * 255).max() <= 0.5
        assert np.abs(load_picture(path, COLOUR).image - found[..., None].astype(int)).max() == 0


@pytest.mark.parametrize(("highest", "factor"), [(255, 1), (1.0, 255), (0.5, 255)])
def test_floating_point_pixels_are_numbers_of_8_bits_or_fractions_of_white(tmp_path, highest, factor) -> None:
    pixels = np.linspace(0, highest, 24, dtype=np.float32).reshape(6, 4)
    found = load_picture(store(tmp_path, Image.fromarray(pixels), "picture.tiff"), GREY).image[..., 0]
    assert np.abs(found - factor * pixels).max() <= 0.5


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_floating_point_pixels_that_are_no_numbers_are_black(tmp_path: Path, bad: float) -> None:
    pixels = np.full((6, 4), 0.5, np.float32)
    pixels[2, 1] = bad
    image = load_picture(store(tmp_path, Image.fromarray(pixels), "picture.tiff"), GREY).image
    assert image[2, 1, 0] == 0 and (np.delete(image, 2, axis=0) == 128).all()


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    # Without ink a pixel is white; full black gives black, and full cyan removes red.
    inks = np.array([[0, 0, 0, 0], [0, 0, 0, 255], [255, 0, 0, 0], [0, 255, 255, 0]], dtype=np.uint8)
    plates = [Image.fromarray(np.repeat(plate[None], 6, axis=0)) for plate in inks.T]
    picture = load_picture(store(tmp_path, Image.merge("CMYK", plates), "picture.tiff"), COLOUR)
    assert picture.image[0].tolist() == [[255, 255, 255], [0, 0, 0], [0, 255, 255], [255, 0, 0]]


def test_palette_colours_are_looked_up(tmp_path: Path) -> None:
    pixels = np.zeros((6, 4, 3), dtype=np.uint8)
    pixels[:3] = RED
    path = store(tmp_path, Image.fromarray(pixels).convert("P", palette=Image.Palette.ADAPTIVE, colors=2))
    assert np.array_equal(load_picture(path, COLOUR).image, pixels)


def test_colours_that_the_palette_lacks_become_the_nearest_and_a_note_says_so(tmp_path: Path) -> None:
    look = Look(ImageShape(height=6, width=4, levels=3, palette=("#00000000", "#ff0000", "#ffffff")), smooth=False)
    pixels = np.full((6, 4, 4), (*RED, 255), np.uint8)
    pixels[0], pixels[1] = (*WHITE, 255), (90, 90, 90, 0)  # what is transparent has no colour
    assert load_picture(store(tmp_path, Image.fromarray(pixels)), look).notes == ()
    pixels[2, :2] = [(*BLACK, 255), (250, 250, 250, 255)]
    picture = load_picture(store(tmp_path, Image.fromarray(pixels)), look)
    assert picture.image[:4, :2, 0].tolist() == [[2, 2], [0, 0], [0, 2], [1, 1]]
    assert picture.notes == ("2 of its 5 colours become the nearest of the model's palette",)


# Transparency


def drawing(colour: tuple[int, int, int], hidden: tuple[int, int, int]) -> Image.Image:
    """Draw two columns of `colour`. All other pixels are transparent, and their colour `hidden` must not show."""
    pixels = np.zeros((6, 4, 4), dtype=np.uint8)
    pixels[..., :3] = hidden
    pixels[:, 1:3] = (*colour, 255)
    return Image.fromarray(pixels)


@pytest.mark.parametrize(
    ("colour", "ground"), [(BLACK, WHITE), (WHITE, BLACK), ((40, 40, 90), WHITE), ((250, 250, 180), BLACK)]
)
@pytest.mark.parametrize("hidden", [BLACK, WHITE, RED])
def test_a_transparent_drawing_gets_a_contrasting_background(tmp_path: Path, colour, ground, hidden) -> None:
    image = load_picture(store(tmp_path, drawing(colour, hidden)), COLOUR).image
    assert (image[:, 1:3] == colour).all()
    assert (image[:, [0, 3]] == ground).all()


@pytest.mark.parametrize(("tone", "ground"), [(0, 255), (255, 0)])
def test_grey_with_alpha_is_flattened_too(tmp_path: Path, tone: int, ground: int) -> None:
    shown = np.zeros((6, 4), dtype=bool)
    shown[:, 1:3] = True
    bands = [Image.fromarray(np.where(shown, value, 0).astype(np.uint8)) for value in (tone, 255)]
    image = load_picture(store(tmp_path, Image.merge("LA", bands)), GREY).image[..., 0]
    assert (image[:, 1:3] == tone).all()
    assert (image[:, [0, 3]] == ground).all()


def test_half_transparent_pixels_are_mixed_with_the_background(tmp_path: Path) -> None:
    pixels = np.zeros((6, 4, 4), dtype=np.uint8)
    pixels[..., 3] = 51  # black at 1/5 opacity on white
    assert np.abs(load_picture(store(tmp_path, Image.fromarray(pixels)), GREY).image - 204.0).max() <= 1


def test_a_transparent_colour_of_a_palette_is_flattened(tmp_path: Path) -> None:
    picture = Image.frombytes("P", (4, 6), bytes([0, 1, 1, 0]) * 6)
    picture.putpalette([*RED, *BLACK])
    for name in ("picture.png", "picture.gif"):
        image = load_picture(store(tmp_path, picture, name, transparency=0), COLOUR).image
        assert (image[:, 1:3] == BLACK).all()
        assert (image[:, [0, 3]] == WHITE).all()


def test_a_transparent_colour_without_a_palette_is_flattened(tmp_path: Path) -> None:
    pixels = np.zeros((6, 4, 3), dtype=np.uint8)
    pixels[:, :2] = RED
    image = load_picture(store(tmp_path, Image.fromarray(pixels), transparency=RED), COLOUR).image
    assert (image[:, :2] == WHITE).all()
    assert (image[:, 2:] == BLACK).all()


def test_a_model_with_transparency_says_that_a_hole_belongs_to_the_picture(tmp_path: Path) -> None:
    look = Look(ImageShape(height=6, width=4, channels=4))
    part = choose_part(None, None, None, look.shape)
    pixels = np.full((6, 4, 4), 255, np.uint8)
    assert load_picture(store(tmp_path, Image.fromarray(pixels)), look, part=part).notes == ()
    pixels[2, 2, 3] = 0
    path = store(tmp_path, Image.fromarray(pixels))
    (note,) = load_picture(path, look, part=part).notes
    assert note == "transparent pixels are part of it for this model; --erase or --mask says what to draw"
    asked = choose_part(None, "box:2,2,1,1", None, look.shape)
    assert load_picture(path, look, part=asked).notes == ()


# Orientation and frames


@loop_over(
    ("orientation", "turn"),
    [
        (1, lambda seen: seen),
        (2, np.fliplr),
        (3, lambda seen: np.rot90(seen, 2)),
        (4, np.flipud),
        (6, lambda seen: np.rot90(seen, 1)),
        (8, lambda seen: np.rot90(seen, -1)),
    ],
)
@loop_over("name", ["picture.jpg", "picture.png", "picture.webp"])
def test_an_image_is_rotated_according_to_its_exif_data(tmp_path: Path, name, orientation, turn) -> None:
    seen = np.zeros((48, 32), dtype=np.uint8)
    seen[:16, :8] = 255  # in the upright picture, the top left corner is bright
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = store(tmp_path, Image.fromarray(turn(seen)), name, exif=exif, quality=95)
    picture = load_picture(path, Look(ImageShape(height=48, width=32)))
    assert picture.notes == ()
    assert np.abs(picture.image[..., 0].astype(int) - seen).mean() < 8


def test_the_first_frame_of_an_animation_is_used_and_a_note_says_so(tmp_path: Path) -> None:
    frames = [Image.new("L", (4, 6), tone) for tone in (0, 255, 128)]
    for name in ("picture.gif", "picture.webp", "picture.png", "picture.tiff"):
        path = store(tmp_path, frames[0], name, save_all=True, append_images=frames[1:])
        picture = load_picture(path, GREY)
        assert picture.image.max() <= 1
        assert picture.notes == ("has 3 frames; only the first is used",)


# Fitting


def test_an_image_of_another_size_is_resized_and_a_note_says_so(tmp_path: Path) -> None:
    path = store(tmp_path, Image.new("L", (40, 60), 77))
    for fit in ("crop", "pad", "stretch"):
        picture = load_picture(path, GREY, fit)
        assert (picture.image == 77).all()
        assert picture.notes == (f"resized from 60 x 40 to 6 x 4 pixels (height x width; {fit})",)


def test_crop_keeps_the_middle(tmp_path: Path) -> None:
    wide = np.zeros((6, 12), dtype=np.uint8)
    wide[:, 4:8] = noise(6, 4)
    assert np.array_equal(load_picture(store(tmp_path, Image.fromarray(wide)), GREY).image[..., 0], wide[:, 4:8])


def test_pad_adds_the_colour_of_the_border_and_keeps_the_aspect_ratio(tmp_path: Path) -> None:
    ground, ink = (10, 20, 200), (250, 240, 30)
    pixels = np.full((8, 16, 3), ground, dtype=np.uint8)
    pixels[2:6, 4:12] = ink
    look = Look(ImageShape(height=16, width=16, channels=3))
    image = load_picture(store(tmp_path, Image.fromarray(pixels)), look, "pad").image
    assert (image[:4] == ground).all()
    assert (image[12:] == ground).all()
    assert np.array_equal(image[4:12], pixels)
    grey = load_picture(tmp_path / "picture.png", Look(ImageShape(height=16, width=16)), "pad").image
    assert np.abs(grey[:4] - luma(np.array(ground))).max() <= 1


def test_stretch_keeps_everything_and_distorts(tmp_path: Path) -> None:
    halves = np.zeros((6, 120), dtype=np.uint8)
    halves[:, 60:] = 255
    path = store(tmp_path, Image.fromarray(halves))
    stretched = load_picture(path, Look(ImageShape(height=6, width=12)), "stretch").image[..., 0]
    # Resampling reaches three pixels to either side of the edge.
    assert stretched[:, :3].max() == 0
    assert stretched[:, 9:].min() == 255
    assert (stretched == stretched[0]).all()


@loop_over("size", [(1, 5000), (5000, 1), (1, 1)])
@loop_over("fit", ["crop", "pad", "stretch"])
@loop_over("look", [GREY, COLOUR])
def test_extreme_aspect_ratios_can_be_fitted(tmp_path: Path, size, fit, look) -> None:
    image = load_picture(store(tmp_path, Image.new("RGB", size, (90, 90, 90))), look, fit).image
    assert image.shape == (6, 4, look.shape.channels)
    assert (image == 90).all()


# Faults


def test_files_that_are_not_images_are_refused(tmp_path: Path, raises_one_line) -> None:
    with raises_one_line(DataError, "no image at", "missing.png"):
        load_picture(tmp_path / "missing.png", GREY)
    with raises_one_line(DataError, str(tmp_path), "is a folder"):
        load_picture(tmp_path, GREY)
    (tmp_path / "text.png").write_text("I am not an image.\n")
    with raises_one_line(DataError, "text.png", "not an image"):
        load_picture(tmp_path / "text.png", GREY)
    (tmp_path / "empty.png").touch()
    with raises_one_line(DataError, "empty.png", "not an image"):
        load_picture(tmp_path / "empty.png", GREY)


def encode(kind: str, **options: object) -> bytes:
    pictures = [Image.fromarray(noise(12, 10, 3)).rotate(turn) for turn in (0, 180)]
    more = {"save_all": True, "append_images": pictures[1:]} if kind in ("GIF", "TIFF") else {}
    buffer = io.BytesIO()
    pictures[0].save(buffer, kind, **more, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_a_truncated_file_gives_a_one_line_error_wherever_it_ends(tmp_path: Path, kind: str) -> None:
    data = encode(kind)
    for kept in range(0, len(data) - 1, max(1, len(data) // 60)):
        (tmp_path / "picture").write_bytes(data[:kept])
        try:
            load_picture(tmp_path / "picture", COLOUR)
        except DataError as error:
            assert re.fullmatch(r"'.*picture' .{1,300}", str(error))
        else:
            assert kept > len(data) // 4  # what is left may be readable, such as the first of several frames


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "ICO", "PPM", "TGA", "PCX", "SGI"])
def test_a_damaged_file_gives_an_image_or_a_one_line_error(tmp_path: Path, kind: str) -> None:
    random = np.random.default_rng(1)
    exif = Image.Exif()
    exif[0x0112] = 6
    data = np.frombuffer(encode(kind, **({"exif": exif} if kind in ("PNG", "JPEG", "WEBP") else {})), dtype=np.uint8)
    for _ in range(60):
        damaged = data.copy()
        places = random.integers(0, len(data), random.integers(1, 6))
        damaged[places] = random.integers(0, 256, len(places))
        (tmp_path / "picture").write_bytes(damaged.tobytes())
        try:
            image = load_picture(tmp_path / "picture", COLOUR).image
        except DataError as error:
            assert re.fullmatch(r"'.*picture' .{1,300}", str(error))
        else:
            assert image.shape == (6, 4, 3)


def claim(width: int, height: int) -> bytes:
    """Build a PNG whose header claims this size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(10_000, 10_000), (60_000, 60_000)])
def test_an_image_too_large_to_open_safely_is_refused(tmp_path: Path, size, raises_one_line) -> None:
    # Pillow warns about the first size and refuses the second.
    (tmp_path / "bomb.png").write_bytes(claim(*size))
    with raises_one_line(DataError, "bomb.png", "more pixels than is safe", f"{Image.MAX_IMAGE_PIXELS:,}"):
        load_picture(tmp_path / "bomb.png", GREY)


@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_an_image_without_pixels_is_refused(tmp_path: Path, size, raises_one_line) -> None:
    (tmp_path / "nothing.png").write_bytes(claim(*size))
    with raises_one_line(DataError, "nothing.png"):
        load_picture(tmp_path / "nothing.png", GREY)


def test_any_error_of_a_decoder_gives_a_one_line_error(tmp_path: Path, monkeypatch, raises_one_line) -> None:
    # Pillow's decoders raise many kinds of errors, such as struct.error for a GIF and RuntimeError for an AVIF file.
    def fail(error: Exception) -> Callable[..., None]:
        def opener(*_arguments: object) -> None:
            raise error

        return opener

    path = store(tmp_path, Image.new("L", (4, 6)))
    for error in (RuntimeError("first line\nsecond line"), struct.error("too short"), KeyError(5), AssertionError()):
        monkeypatch.setattr(Image, "open", fail(error))
        with raises_one_line(DataError, "picture.png", "cannot be read"):
            load_picture(path, GREY)


def test_inverting_changes_colours_and_not_their_numbers_or_opacity(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(np.array([[[0, 0, 0, 255], [255, 255, 255, 255], [0, 0, 0, 0]]], np.uint8)).save(path)
    palette = ("#00000000", "#000000", "#ffffff")
    indexed = Look(ImageShape(height=1, width=3, levels=3, palette=palette))
    assert load_picture(path, indexed, invert=True).image.ravel().tolist() == [2, 1, 0]
    opacity = load_picture(path, Look(ImageShape(height=1, width=3, channels=4)), invert=True).image[..., 3]
    assert opacity.ravel().tolist() == [255, 255, 0]
