"""Tests of the frame of a data set, and of bringing pictures into it."""

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from data.photographs import CASES, photograph
from loops import loop_over
from PIL import Image, ImageDraw, ImageFilter

from linformer_cli.checkpoint_files import Frame
from linformer_cli.config import ImageShape
from linformer_cli.data.framing import frame_picture, measure_frame
from linformer_cli.data.look import Look
from linformer_cli.data.pictures import load_picture

SHAPE = ImageShape(height=28, width=28)
DARK = Frame(ground=0, ink=250.0, box=20.0, centre=(14.5, 14.5))
# Every fifth photograph has each paper, desk, shadow and ink; $LINTX_FULL takes all.
SOME = range(0, len(CASES), 5)
LIGHT = DARK.model_copy(update={"ground": 255})


def draw_seven(
    size: tuple[int, int] = (800, 600), ink: int = 40, ground: int = 230, noise: float = 0, pen: int = 0
) -> Image.Image:
    """A seven in the upper left of a sheet, blurred; with `noise`, the light on the sheet is also uneven."""
    width, height = size
    sheet = Image.new("L", size, ground)
    line = [(width * 0.2, height * 0.2), (width * 0.5, height * 0.2), (width * 0.35, height * 0.6)]
    ImageDraw.Draw(sheet).line(line, fill=ink, width=pen or width // 25, joint="curve")
    blurred = sheet.filter(ImageFilter.GaussianBlur(2))
    if not noise:
        return blurred
    row, column = np.ogrid[0:height, 0:width]
    grain = np.random.default_rng(0).normal(0, 1, (height, width))
    pixels = np.asarray(blurred) + grain * noise - 8 * noise * (row + column) / height
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def drawn_box(image: np.ndarray, ground: int) -> tuple[int, int]:
    ink = abs(image[..., 0].astype(int) - ground) > 60
    return int(ink.any(axis=1).sum()), int(ink.any(axis=0).sum())


def test_the_frame_of_drawings_is_measured() -> None:
    images = np.zeros((30, 28, 28, 1), np.uint8)
    for number, image in enumerate(images):
        image[5:17, 8 + number % 3 : 12 + number % 3] = 200
    assert measure_frame(images) == Frame(ground=0, ink=200, box=12, centre=(11, 11))
    assert measure_frame(255 - images) == Frame(ground=255, ink=200, box=12, centre=(11, 11))


def test_photographs_colour_and_empty_images_have_no_frame() -> None:
    random = np.random.default_rng(0).integers(0, 256, (20, 16, 16, 3), np.uint8)
    assert measure_frame(random) is None
    assert measure_frame(random[..., :1]) is None
    assert measure_frame(np.zeros((20, 16, 16, 1), np.uint8)) is None
    assert measure_frame(np.full((1, 2, 2, 1), 9, np.uint8)) is None


@loop_over(
    ("sheet", "is_dark"),
    [
        ({}, True),
        ({"noise": 5}, True),
        ({"size": (600, 800), "ink": 240, "ground": 10, "noise": 3}, False),
        ({"size": (300, 300), "ink": 90, "ground": 140, "noise": 4}, True),
        ({"size": (40, 40)}, True),
        ({"size": (2000, 1500)}, True),
        ({"size": (1000, 1000), "pen": 3}, True),
    ],
)
def test_a_drawing_gets_the_size_position_and_contrast_of_the_frame(sheet, is_dark) -> None:
    picture = draw_seven(**sheet)
    for frame in (DARK, LIGHT):
        ((image, note),) = frame_picture(picture, frame, SHAPE)
        assert image.shape == (28, 28, 1) and image.dtype == np.uint8
        assert max(drawn_box(image, frame.ground)) in (19, 20, 21)
        ink = abs(image[..., 0].astype(float) - frame.ground)
        assert np.quantile(ink[ink > 60], 0.9) == pytest.approx(frame.ink, abs=12)
        assert ink[0].max() < 10 and ink[:, 0].max() < 10, "the paper must become plain"
        # The image ends 20 pixels below the seven's top, so its centre of mass cannot be in the middle.
        column = (ink.sum(axis=0) * (np.arange(28) + 0.5)).sum() / ink.sum()
        assert abs(column - 14.5) < 1
        assert ("inverted" in note) == (is_dark != (frame.ground == 255))


def test_a_tall_drawing_keeps_its_proportions() -> None:
    sheet = Image.new("L", (500, 500), 255)
    ImageDraw.Draw(sheet).rectangle((240, 100, 279, 299), fill=0)
    ((image, _),) = frame_picture(sheet, DARK, SHAPE)
    assert drawn_box(image, 0) == (20, 4)
    assert image[14, 14] > 200, "the drawing must be in the middle"


def test_a_speck_does_not_change_the_size() -> None:
    sheet = draw_seven()
    ((clean, _),) = frame_picture(sheet, DARK, SHAPE)
    ImageDraw.Draw(sheet).ellipse((700, 520, 703, 523), fill=0)
    ((specked, _),) = frame_picture(sheet, DARK, SHAPE)
    assert np.abs(clean.astype(int) - specked).max() < 30


@pytest.mark.parametrize(
    "picture",
    [
        Image.new("L", (100, 100), 180),
        Image.fromarray(np.random.default_rng(0).integers(176, 184, (100, 100), np.uint8)),
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (100, 100), np.uint8)),
        Image.new("L", (1, 300), 0),
    ],
)
def test_a_picture_without_a_drawing_is_not_framed(picture) -> None:
    assert frame_picture(picture, DARK, SHAPE) == []


def test_a_frame_larger_than_the_image_is_limited_to_the_image() -> None:
    """A hand-edited checkpoint can contain any numbers."""
    frame = DARK.model_copy(update={"box": 60_000.0, "centre": (-1e9, 1e300)})
    ((image, _),) = frame_picture(draw_seven(), frame, SHAPE)
    assert max(drawn_box(image, 0)) >= 26


def test_only_a_picture_of_another_size_is_framed(tmp_path: Path) -> None:
    draw_seven().save(tmp_path / "seven.png")
    framed = load_picture(tmp_path / "seven.png", Look(SHAPE, frame=DARK), framing=True)
    assert framed.unframed is not None and framed.unframed.shape == (28, 28, 1)
    assert any("scaled to" in note and "centred, inverted" in note for note in framed.notes)
    draw_seven((28, 28)).save(tmp_path / "small.png")
    unchanged = load_picture(tmp_path / "small.png", Look(SHAPE, frame=DARK), framing=True)
    assert unchanged.unframed is None and unchanged.notes == ()
    Image.new("L", (90, 60), 200).save(tmp_path / "empty.png")
    empty = load_picture(tmp_path / "empty.png", Look(SHAPE, frame=DARK), framing=True)
    assert empty.unframed is None and (empty.image == 200).all()
    assert any("no drawing" in note for note in empty.notes)


def rule(sheet: Image.Image) -> Image.Image:
    """Thin lines across a sheet, and a margin."""
    pen = ImageDraw.Draw(sheet)
    for y in range(30, sheet.height, 45):
        pen.line((0, y, sheet.width, y), fill=150, width=2)
    pen.line((60, 0, 60, sheet.height), fill=150, width=2)
    return sheet


def lay_on_desk(sheet: Image.Image) -> Image.Image:
    desk = Image.fromarray(np.random.default_rng(0).normal(90, 5, (900, 1000)).clip(0, 255).astype(np.uint8))
    turned = sheet.convert("LA").rotate(6, Image.Resampling.BICUBIC, expand=True)
    desk.paste(turned.getchannel("L"), (60, 40), turned.getchannel("A"))
    return desk


@pytest.mark.slow
@loop_over("change", [rule, lay_on_desk, lambda sheet: lay_on_desk(rule(sheet))])
def test_ruled_lines_and_the_desk_are_left_out(change) -> None:
    ((plain, _),) = frame_picture(draw_seven(noise=2), DARK, SHAPE)
    ((image, _),) = frame_picture(change(draw_seven(noise=2)), DARK, SHAPE)
    assert max(drawn_box(image, 0)) in (19, 20, 21)
    inside = np.corrcoef(plain.ravel(), image.ravel())[0, 1]
    assert inside > 0.6, inside


def test_drawings_in_a_row_are_told_apart(tmp_path: Path) -> None:
    sheet = Image.new("L", (1200, 500), 235)
    for number in range(3):
        sheet.paste(
            draw_seven((300, 400), ground=235).crop((40, 60, 180, 260)), (100 + 350 * number, 120 + 20 * number)
        )
    sheet.save(tmp_path / "row.png")
    first = load_picture(tmp_path / "row.png", Look(SHAPE, frame=DARK), framing=True)
    images = [picture.image for picture in (first, *first.others)]
    assert len(images) == 3 and all(max(drawn_box(image, 0)) in (19, 20, 21) for image in images)
    wide = Image.new("L", (900, 300), 235)
    ImageDraw.Draw(wide).line((100, 100, 800, 200), fill=20, width=30)
    assert len(frame_picture(wide, DARK, SHAPE)) == 1


def find_wrong_boxes(numbers: Iterable[int]) -> list[tuple[object, ...]]:
    """Those of `CASES` in which the box of the digit is wrong by more than 10 % and 2 pixels, with what was found."""
    wrong = []
    for number in numbers:
        picture, size = photograph(number, *CASES[number])
        wanted = np.array(size) * 1024 / max(picture.size)  # pictures are reduced to 1,024 pixels first
        notes = " ".join(note for _, note in frame_picture(picture, DARK, SHAPE))
        found = [tuple(map(int, sides)) for sides in re.findall(r"drawing of (\d+) x (\d+) pixels", notes)]
        if len(found) != 1 or (abs(found[0] - wanted) > 0.1 * wanted + 2).any():
            wrong.append((*CASES[number], found, wanted))
    return wrong


@pytest.mark.slow
def test_most_photographs_give_the_box_of_the_digit(share) -> None:
    """Five papers, on a desk or not, with a shadow or not, two inks, all tilted."""
    assert find_wrong_boxes(range(len(CASES)) if share else SOME) == []


TURNS = [(0, 30), (-45, 0), (50, 15), (30, -25)]


@pytest.mark.parametrize("numbers", [[2], pytest.param(SOME[1:], marks=pytest.mark.slow)])
def test_a_turned_sheet_is_straightened(numbers, share) -> None:
    """Turned by up to 30 degrees and leaning up to 50 degrees: the digit is as wide for its height as on the sheet."""
    for number in range(len(CASES)) if share else numbers:
        paper, _, shadow, ink = CASES[number]
        picture, (width, height) = photograph(number, paper, True, shadow, ink, TURNS[number % 4])
        ((_, note),) = frame_picture(picture, DARK, SHAPE)
        assert note.startswith("sheet straightened"), number
        across, down = map(int, re.findall(r"drawing of (\d+) x (\d+) pixels", note)[0])
        assert across / down == pytest.approx(width / height, rel=0.1), number
