"""Tests of the page's boards for models of colours: a pixel editor, and pictures."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from demo.browser import COMPLETED, PAGE_ERROR, Browser, encode_picture, needs_browser, read_images
from machine import needs_library
from numpy.typing import NDArray
from sampling.cases import CHANGES, PALETTE

from linformer_cli.config import ImageShape
from linformer_cli.data.look import Look
from linformer_cli.data.sequence import paint
from linformer_cli.sampling.decode import Sampler
from linformer_cli.sampling.engines import NATIVE

pytestmark = needs_browser
COLOUR = ImageShape(height=5, width=4, channels=3)
RGBA = ImageShape(height=5, width=4, channels=4)
LOOKS = {name: Look(shape, smooth=False) for name, shape in (("palette", PALETTE), ("colour", COLOUR), ("RGBA", RGBA))}


@pytest.fixture
def models(build_tiny_model) -> dict[str, torch.nn.Module]:
    palette = build_tiny_model(**CHANGES["palette"])
    return {"palette": palette, "colour": build_tiny_model(image=COLOUR), "RGBA": build_tiny_model(image=RGBA)}


@pytest.fixture
def open_board(open_tiny, models) -> Callable[..., Browser]:
    """Provides `open_board(kind)`: the view of a tiny model. All of the picture is kept, so a completion shows it."""

    def open_board(kind: str, look: Look | None = None) -> Browser:
        page = open_tiny("draw", models[kind], look or LOOKS[kind])
        page.wait(COMPLETED)
        page.press("\ue010", "line")  # end
        return page

    return open_board


def read_board(page: Browser) -> list[tuple[int, ...]]:
    page.wait(COMPLETED)
    return read_images(page, "#completions")[0]


def show(image: NDArray[np.uint8], look: Look) -> list[tuple[int, ...]]:
    """The colours on the screen of values [H, W, C]; transparent pixels are grey squares."""
    pixels = paint(image[None], look.shape)[0].astype(int)
    row, column = np.indices(pixels.shape[:2]) // 2
    ground = np.where((row + column) % 2, 144, 112)[..., None]
    opacity = pixels[..., 3:] / 255 if pixels.shape[2] == 4 else 1
    shown = (ground + (pixels[..., :3] - ground) * opacity).round().astype(int)
    return [tuple(pixel) for pixel in shown.reshape(-1, 3).tolist()]


def draw_picture(height: int, width: int, opaque: bool = False) -> NDArray[np.uint8]:
    """Random colours without half transparent pixels, which a browser stores with less precision."""
    generator = np.random.default_rng(height * width)
    pixels = generator.integers(0, 256, (height, width, 4), dtype=np.uint8)
    pixels[..., 3] = 255 if opaque else 255 * (pixels[..., 3] > 99)
    return pixels


@pytest.mark.parametrize("kind", LOOKS)
def test_a_picture_becomes_the_values_of_the_model(open_board, kind) -> None:
    sizes = [(LOOKS[kind].shape.height, LOOKS[kind].shape.width), (3, 5), (15, 13), (9, 31)]  # odd: no ties
    for fit in ("crop", "pad", "stretch"):
        look = dataclasses.replace(LOOKS[kind], fit=fit, ground="#0080ff")
        page = open_board(kind, look)
        for number, size in enumerate(sizes):
            pixels = draw_picture(*size, opaque=number % 2 == 1)
            page.give(encode_picture(pixels), "drop" if number else "paste")
            page.wait(f"document.body.dataset.pictures === '{number + 1}'")
            assert read_board(page) == show(look.read(pixels), look), (fit, size)


@needs_library
def test_the_board_begins_with_a_sample_of_the_model(open_board, models) -> None:
    for kind, look in LOOKS.items():
        page = open_board(kind)
        sampler = Sampler(models[kind], 0, engine=NATIVE, products=torch.int8)
        samples = sampler.sample_images(1)
        assert read_board(page) == show(samples[0], look)


def test_the_pixel_editor_fits_a_phone(open_board) -> None:
    page = open_board("palette")
    with page.as_phone(360):
        assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_the_next_colour_is_named(open_board) -> None:
    page = open_board("palette")
    page.evaluate("CanvasRenderingContext2D.prototype.fillText = (text) => (window.said = text)")
    page.click("#tab-inspect")
    assert page.wait("window.said").split(":")[0] in (*PALETTE.palette[1:], "transparent")
    assert page.evaluate("document.getElementById('next-caption').textContent") == "How likely each next colour is"


def test_a_file_that_is_not_a_picture_changes_nothing(open_board) -> None:
    page = open_board("palette")
    before = read_board(page)
    page.give(b"text")
    said = page.wait(f"!document.getElementById('error').hidden && {PAGE_ERROR}")
    assert said == "own.png is not a picture that this browser can read."
    assert read_board(page) == before


def test_pencil_fill_and_undo_change_pixels(open_board) -> None:
    look = LOOKS["palette"]
    page = open_board("palette")
    page.click("#clear")
    values = np.zeros((7, 6, 1), np.uint8)
    history = [values.copy()]

    def draw(colour: int, tool: str, places: list[tuple[float, float]]) -> None:
        page.click(f"#colours input:nth-child({colour + 1})")
        page.click(f"#tool [value={tool}]")
        page.drag("#board", [((column + 0.5) / 6, (row + 0.5) / 7) for row, column in places])
        assert read_board(page) == show(values, look), (colour, tool)
        history.append(values.copy())

    values[range(5), range(5)] = 1
    draw(1, "pencil", [(0, 0), (4, 4)])
    values[[4, 4, 4, 4], range(4)] = 3
    draw(3, "pencil", [(4, 3), (4, 0)])
    values[[r for r in range(4) for c in range(r)], [c for r in range(4) for c in range(r)]] = 2
    draw(2, "fill", [(3, 2)])
    values[2, 1] = 0
    draw(0, "pencil", [(2, 1)])
    for expected in history[-2::-1]:
        page.click("#undo")
        assert read_board(page) == show(expected, look)


def test_the_keyboard_draws_pixels(open_board) -> None:
    page = open_board("palette")
    page.click("#clear")
    page.evaluate("document.querySelector('#colours input:nth-child(2)').click()")
    page.press("\ue012 \ue015\ue015 ", "board")  # left, space, down twice, space
    values = np.zeros((7, 6, 1), np.uint8)
    values[1:4, 2] = 1
    assert read_board(page) == show(values, LOOKS["palette"])


@pytest.mark.parametrize("kind", LOOKS)
def test_what_is_erased_is_drawn_again(open_board, kind) -> None:
    page = open_board(kind)
    shape = LOOKS[kind].shape
    before = read_board(page)
    if kind == "palette":
        page.click("#tool [value=eraser]")
    else:  # the eraser is the only tool
        assert page.evaluate("document.getElementById('tool').hidden")
    page.drag("#board", [(0.5 / shape.width, 1.5 / shape.height)])  # the first three rows, and two columns
    page.wait(COMPLETED)
    completions = read_images(page, "#completions")
    changed = {divmod(n, shape.width) for image in completions for n in range(len(image)) if image[n] != before[n]}
    assert changed and changed <= {(row, column) for row in range(3) for column in range(2)}
    assert len({tuple(image) for image in completions}) > 1
    if kind == "palette":  # a colour takes the pencil, which goes over what is erased
        page.click("#colours input:nth-child(2)")
        page.drag("#board", [(0.5 / shape.width, 0.5 / shape.height)])
        page.wait(COMPLETED)
        assert {image[0] for image in read_images(page, "#completions")} == {tuple(shape.colours[1][:3])}
        page.click("#undo")
    page.click("#undo")
    assert read_board(page) == before
