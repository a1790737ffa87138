"""Plots: readable files, the same for the same curves, with labelled axes and colours that can be told apart."""

import dataclasses
import io
import itertools
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image, ImageColor

from linformer_cli.errors import UsageError
from linformer_cli.report.plots import PALETTE, Curve, Panel, parse_plot_format, render_plot


def panels(count: int = 2, factor: float = 1.0) -> list[Panel]:
    def curve(label: str, colour: int, dash: int) -> Curve:
        y = [factor * 10.0 ** (-index - colour) for index in range(3)]
        return Curve(label, [16, 32, 64], y, [0.8 * value for value in y], [1.2 * value for value in y], colour, dash)

    return [Panel(f"norm {number}", [curve("first", 0, 0), curve("second", 1, 1)]) for number in range(count)]


def test_a_png_is_a_picture_with_all_curves() -> None:
    data = render_plot(panels(), "features m", "error", "png")
    picture = Image.open(io.BytesIO(data))
    assert picture.format == "PNG" and picture.width > 600
    found = {colour for _, colour in picture.convert("RGB").getcolors(maxcolors=2**24)}
    for colour in PALETTE[:2]:
        assert ImageColor.getrgb(colour) in found
    assert ImageColor.getrgb(PALETTE[2]) not in found
    # More panels take more room, and the last row may be short.
    assert Image.open(io.BytesIO(render_plot(panels(4), "x", "y", "png"))).height > 1.5 * picture.height


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_nothing_is_cut_off(count) -> None:
    long = [dataclasses.replace(panel, curves=_long_names(panel)) for panel in panels(count)]
    picture = Image.open(io.BytesIO(render_plot(long, "features m", "mean squared error", "png"))).convert("L")
    width, height = picture.size
    for edge in ((0, 0, 2, height), (width - 2, 0, width, height), (0, 0, width, 2), (0, height - 2, width, height)):
        assert picture.crop(edge).getextrema() == (255, 255)


def _long_names(panel: Panel) -> list[Curve]:
    names = [f"{name}, {kind}" for name in ("positive", "hyperbolic", "trig") for kind in ("orthogonal", "independent")]
    return [dataclasses.replace(panel.curves[0], label=name) for name in names]


def test_an_svg_is_one_and_has_both_axes_on_a_log_scale() -> None:
    text = render_plot(panels(), "features m", "error", "svg").decode()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for words in ("features m", "error", "norm 1", "first", "second"):
        assert f"<!-- {words} -->" in text
    # Ticks at what was measured, and powers of ten.
    assert text.count("<!-- 16 -->") == text.count("<!-- 64 -->") == 2
    assert "mathdefault{10^{-3}}" in text and "mathdefault{10^{0}}" in text


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_same_curves_give_the_same_file(kind) -> None:
    first = render_plot(panels(), "x", "y", kind)
    assert render_plot(panels(), "x", "y", kind) == first
    assert render_plot(panels(factor=1.5), "x", "y", kind) != first


def test_colours_differ_in_brightness_or_hue_for_everyone() -> None:
    def luminance(colour: str) -> float:
        red, green, blue = ImageColor.getrgb(colour)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    assert len(set(PALETTE)) == len(PALETTE)
    assert max(map(luminance, PALETTE)) < 200  # on white
    for one, other in itertools.combinations(PALETTE, 2):
        assert sum(abs(a - b) for a, b in zip(ImageColor.getrgb(one), ImageColor.getrgb(other), strict=True)) > 60


@pytest.mark.parametrize(("name", "kind"), [("a.png", "png"), ("b.SVG", "svg")])
def test_the_name_says_the_format(name, kind) -> None:
    assert parse_plot_format(Path(name)) == kind


@pytest.mark.parametrize("name", ["a.pdf", "png", "a.png.gz"])
def test_other_formats_are_one_line(name, raises_one_line) -> None:
    with raises_one_line(UsageError, name, ".png or .svg"):
        parse_plot_format(Path(name))


def test_matplotlib_is_imported_for_drawing_only() -> None:
    script = "import sys, linformer_cli.report.plots; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
