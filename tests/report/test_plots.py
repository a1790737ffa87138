"""Tests that plots are readable and reproducible, with labelled axes and distinguishable colours."""

import dataclasses
import io
import itertools
from pathlib import Path
from xml.etree import ElementTree

import pytest
from loops import first_fast
from PIL import Image, ImageColor

from linformer_cli.errors import UsageError
from linformer_cli.report.plots import PALETTE, Curve, Panel, parse_plot_format, render_plot, with_error


def panels(count: int = 2, factor: float = 1.0, names: tuple[str, ...] = ("first", "second")) -> list[Panel]:
    def curve(label: str, place: int) -> Curve:
        points = [(x, factor * 10.0 ** (-index - place)) for index, x in enumerate((16, 32, 64))]
        return Curve(label, [(x, y, 0.8 * y, 1.2 * y) for x, y in points], (place, place))

    return [
        Panel(f"norm {number}", [curve(name, place) for place, name in enumerate(names)]) for number in range(count)
    ]


def trace(x, y, label: str = "curve", **settings) -> Panel:
    return Panel("", [Curve(label, list(zip(x, y, strict=True)))], **settings)


def draw(*panels: Panel, title: str | None = None) -> str:
    return render_plot(panels, "x", "y", "svg", title=title).decode()


def test_a_png_shows_all_curves() -> None:
    data = render_plot(panels(), "features m", "error", "png")
    picture = Image.open(io.BytesIO(data))
    assert picture.format == "PNG" and picture.width > 600
    found = {colour for _, colour in picture.convert("RGB").getcolors(maxcolors=2**24)}
    for colour in PALETTE[:2]:
        assert ImageColor.getrgb(colour) in found
    assert ImageColor.getrgb(PALETTE[2]) not in found
    # Four panels take two rows.
    assert Image.open(io.BytesIO(render_plot(panels(4), "x", "y", "png"))).height > 1.5 * picture.height


@pytest.mark.parametrize("count", first_fast([1, 5, 2, 3, 4], count=2))
def test_nothing_is_cut_off(count) -> None:
    kinds = ("orthogonal", "independent")
    names = tuple(f"{name}, {kind}" for name in ("positive", "hyperbolic", "trig") for kind in kinds)
    data = render_plot(panels(count, names=names), "features m", "mean squared error", "png", "a long title " * 12)
    picture = Image.open(io.BytesIO(data)).convert("L")
    width, height = picture.size
    for edge in ((0, 0, 2, height), (width - 2, 0, width, height), (0, 0, width, 2), (0, height - 2, width, height)):
        assert picture.crop(edge).getextrema() == (255, 255)


def test_an_svg_is_valid_and_has_logarithmic_axes() -> None:
    text = render_plot(panels(), "features m", "error", "svg").decode()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for words in ("features m", "error", "norm 1", "first", "second"):
        assert f"<!-- {words} -->" in text
    # There are ticks at the measured values and at powers of ten.
    assert text.count("<!-- 16 -->") == text.count("<!-- 64 -->") == 2
    assert "mathdefault{10^{-3}}" in text and "mathdefault{10^{0}}" in text


def test_panels_may_have_different_axes() -> None:
    wide = trace([100, 2500, 12000], [0.9, 1.2, 3], x_label="images", y_label="bits/dim", x_scale="linear")
    other = trace([1, 3], [0, 1], x_label="hours", y_label="rate", x_scale="linear", y_scale="linear")
    text = draw(wide, other, title="what it is")
    for words in ("images", "bits/dim", "hours", "rate", "what it is", "3,000", "1.5", "0.25"):
        assert f"<!-- {words} -->" in text, words
    assert "<!-- x -->" not in text and "<!-- y -->" not in text and "mathdefault" not in text


@pytest.mark.slow
def test_panels_with_the_same_label_share_an_axis() -> None:
    """On a shared axis, 64 is a tick of both panels."""
    few, other = (trace([16], [1.0], y_label=f"quantity {number}") for number in range(2))
    more = trace([16, 64], [1.0, 2.0], y_label="quantity 0")
    assert draw(few, other).count("<!-- 64 -->") == 0 and draw(more, other).count("<!-- 64 -->") == 2
    assert draw(more, dataclasses.replace(other, x_label="other")).count("<!-- 64 -->") == 1
    # The panels share the axis itself, not only its ticks.
    low, high = (trace([1, 2], [0, top], x_scale="linear", y_scale="linear") for top in (1, 100))
    assert draw(low, high).count("<!-- 100 -->") == 2
    assert draw(low, dataclasses.replace(high, y_label="other")).count("<!-- 100 -->") == 1


@pytest.mark.parametrize(
    ("x", "shown"),
    [
        # Single digits need less room, so more of them are shown.
        ([2**index for index in range(12)], [1, 2, 4, 8, 16, 32, 128, 512, 2048]),
        ([512, 1024, 4096, 8192, 32_768, 65_536], [512, 1024, 8192, 65_536]),
        ([1, 16, 64], [1, 16, 64]),
    ],
)
def test_crowded_tick_labels_are_thinned_out(x, shown) -> None:
    text = draw(trace(x, x))
    assert [place for place in x if f"<!-- {place:,} -->" in text] == shown


def test_a_curve_of_many_points_has_few_markers() -> None:
    few, many = (draw(trace(x, x, x_scale="linear", y_scale="linear")) for x in (range(1, 13), range(1, 401)))
    assert many.count("<use") < few.count("<use") + 50  # letters are counted too


def test_a_curve_without_points_is_in_the_legend() -> None:
    assert "<!-- nothing -->" in draw(Panel("", [Curve("nothing", []), Curve("one", [(1, 2.0)])]))


def test_every_label_has_a_style_of_its_own_by_default() -> None:
    count = len(PALETTE) + 1
    curves = [Curve(str(number), [(1, number + 1), (2, number + 1)]) for number in range(count)]
    text = draw(Panel("", curves), Panel("", curves[1:2]))
    used = [text.count(f"stroke: {colour.lower()}") for colour in PALETTE]
    assert min(used) > 0 and used[0] > used[2] and used[1] > used[2]  # the eighth has the first colour, with dashes
    assert "stroke-dasharray" in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_same_curves_give_the_same_file(kind) -> None:
    first = render_plot(panels(), "x", "y", kind)
    assert render_plot(panels(), "x", "y", kind) == first
    assert render_plot(panels(factor=1.5), "x", "y", kind) != first


def test_colours_are_dark_enough_and_differ_from_each_other() -> None:
    def luminance(colour: str) -> float:
        red, green, blue = ImageColor.getrgb(colour)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    assert len(set(PALETTE)) == len(PALETTE)
    assert max(map(luminance, PALETTE)) < 200  # visible on white
    for one, other in itertools.combinations(PALETTE, 2):
        assert sum(abs(a - b) for a, b in zip(ImageColor.getrgb(one), ImageColor.getrgb(other), strict=True)) > 60


def test_the_file_name_gives_the_format(raises_one_line) -> None:
    assert [parse_plot_format(Path(name)) for name in ("a.png", "b.SVG")] == ["png", "svg"]
    for name in ("a.pdf", "png", "a.png.gz"):
        with raises_one_line(UsageError, name, ".png or .svg"):
            parse_plot_format(Path(name))


def test_a_single_point_has_an_error_bar_and_no_line() -> None:
    assert with_error(10.0, 3.0, None) == (10.0, 3.0, 3.0, 3.0)
    bare, barred = (
        draw(Panel("", [Curve("alone", [point])], y_scale="linear", ticks_at_points=False))
        for point in ((10.0, 3.0), with_error(10.0, 3.0, 0.5))
    )
    assert "LineCollection" in barred and "LineCollection" not in bare
    assert "stroke-dasharray" not in bare


@pytest.mark.parametrize(("span", "shown"), [((0.05, 300.0), "100"), ((2e-5, 300.0), "{10^{2}}")])
def test_short_powers_of_ten_are_written_in_digits(span, shown) -> None:
    assert shown in draw(trace([1, 2], span))
