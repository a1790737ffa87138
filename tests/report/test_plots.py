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
from linformer_cli.report.plots import PALETTE, Curve, Panel, number_styles, parse_plot_format, render_plot


def panels(count: int = 2, factor: float = 1.0) -> list[Panel]:
    def curve(label: str, colour: int, dash: int) -> Curve:
        y = [factor * 10.0 ** (-index - colour) for index in range(3)]
        return Curve(label, [16, 32, 64], y, [0.8 * value for value in y], [1.2 * value for value in y], colour, dash)

    return [Panel(f"norm {number}", [curve("first", 0, 0), curve("second", 1, 1)]) for number in range(count)]


def test_a_curve_goes_through_its_points() -> None:
    assert Curve.through("a", [(1, 3), (2, 4)], (5, 0)) == Curve("a", (1, 2), (3, 4), colour=5)
    assert Curve.through("a", [(1, 3, 2, 4)], (5, 6), [0]) == Curve("a", (1,), (3,), (2,), (4,), 5, 6, [0])
    assert Curve.through("a", [], (0, 0)) == Curve("a", (), ())


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
    long = [dataclasses.replace(panel, curves=_long_names(panel)) for panel in panels(count)]
    title = "a long title " * 12
    data = render_plot(long, "features m", "mean squared error", "png", title=title)
    picture = Image.open(io.BytesIO(data)).convert("L")
    width, height = picture.size
    for edge in ((0, 0, 2, height), (width - 2, 0, width, height), (0, 0, width, 2), (0, height - 2, width, height)):
        assert picture.crop(edge).getextrema() == (255, 255)


def _long_names(panel: Panel) -> list[Curve]:
    names = [f"{name}, {kind}" for name in ("positive", "hyperbolic", "trig") for kind in ("orthogonal", "independent")]
    return [dataclasses.replace(panel.curves[0], label=name) for name in names]


def test_an_svg_is_valid_and_has_logarithmic_axes() -> None:
    text = render_plot(panels(), "features m", "error", "svg").decode()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for words in ("features m", "error", "norm 1", "first", "second"):
        assert f"<!-- {words} -->" in text
    # There are ticks at the measured values and at powers of ten.
    assert text.count("<!-- 16 -->") == text.count("<!-- 64 -->") == 2
    assert "mathdefault{10^{-3}}" in text and "mathdefault{10^{0}}" in text


def test_panels_may_have_different_axes() -> None:
    points = [100, 2500, 12000]
    wide = Panel("", [Curve("curve", points, [0.9, 1.2, 3])], "images", "bits/dim", x_scale="linear")
    other = Panel("", [Curve("curve", [1, 3], [0, 1])], "hours", "rate", x_scale="linear", y_scale="linear")
    text = render_plot([wide, other], "x", "y", "svg", title="what it is").decode()
    for words in ("images", "bits/dim", "hours", "rate", "what it is", "3,000", "1.5", "0.25"):
        assert f"<!-- {words} -->" in text, words
    assert "<!-- x -->" not in text and "<!-- y -->" not in text and "mathdefault" not in text


@pytest.mark.slow
def test_panels_with_the_same_label_share_an_axis() -> None:
    """On a shared axis, 64 is a tick of both panels."""
    few = [Panel("", [Curve("curve", [16], [1.0])], y_label=f"quantity {number}") for number in range(2)]
    more = [dataclasses.replace(few[0], curves=[Curve("curve", [16, 64], [1.0, 2.0])]), few[1]]
    assert render_plot(few, "m", "", "svg").decode().count("<!-- 64 -->") == 0
    assert render_plot(more, "m", "", "svg").decode().count("<!-- 64 -->") == 2
    apart = [more[0], dataclasses.replace(few[1], x_label="other")]
    assert render_plot(apart, "m", "", "svg").decode().count("<!-- 64 -->") == 1
    # The panels share the axis itself, not only its ticks.
    low, high = (Panel("", [Curve("curve", [1, 2], [0, top])], x_scale="linear", y_scale="linear") for top in (1, 100))
    assert render_plot([low, high], "m", "y", "svg").decode().count("<!-- 100 -->") == 2
    apart = [low, dataclasses.replace(high, y_label="other")]
    assert render_plot(apart, "m", "y", "svg").decode().count("<!-- 100 -->") == 1


def test_crowded_tick_labels_are_thinned_out() -> None:
    x = [2**index for index in range(12)]
    text = render_plot([Panel("", [Curve("curve", x, x)])], "T", "s", "svg").decode()
    # Single digits need less room, so more of them are shown.
    assert [length for length in x if f"<!-- {length:,} -->" in text] == [1, 2, 4, 8, 16, 32, 128, 512, 2048]


def test_a_curve_of_many_points_has_few_markers() -> None:
    def count_signs(count: int) -> int:
        x = range(1, count + 1)
        panel = Panel("", [Curve("curve", x, x)], x_scale="linear", y_scale="linear")
        return render_plot([panel], "T", "s", "svg").decode().count("<use")  # letters are counted too

    assert count_signs(400) < count_signs(12) + 50


def test_a_curve_without_points_is_in_the_legend() -> None:
    empty = Panel("", [Curve("nothing", [], []), Curve("one", [1], [2.0])])
    assert "<!-- nothing -->" in render_plot([empty], "x", "y", "svg").decode()


def test_numbered_styles_are_all_different() -> None:
    styles = number_styles(3 * len(PALETTE))
    assert len({(colour, dash) for colour, dash in styles}) == len(styles)
    assert {colour for colour, _ in styles} == set(range(len(PALETTE)))


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
    def render(low, high):
        curve = Curve("alone", [10.0], [3.0], low, high)
        panel = Panel("", [curve], y_scale="linear", ticks_at_points=False)
        return render_plot([panel], "images per second", "bits/dim", "svg").decode()

    bare, barred = render((), ()), render((2.5,), (3.5,))
    assert "LineCollection" in barred and "LineCollection" not in bare
    assert "stroke-dasharray" not in bare


@pytest.mark.parametrize(("span", "shown"), [((0.05, 300.0), "100"), ((2e-5, 300.0), "{10^{2}}")])
def test_short_powers_of_ten_are_written_in_digits(span, shown) -> None:
    curve = Curve("one", [1, 2], list(span))
    text = render_plot([Panel("", [curve])], "x", "y", "svg").decode()
    assert shown in text


@pytest.mark.slow
def test_tick_labels_do_not_overlap() -> None:
    lengths = [512, 1024, 4096, 8192, 32_768, 65_536]
    text = render_plot([Panel("", [Curve("one", lengths, lengths)])], "T", "y", "svg").decode()
    shown = [length for length in lengths if f"<!-- {length:,} -->" in text]
    assert shown == [512, 1024, 8192, 65_536]
    text = render_plot([Panel("", [Curve("one", [1, 16, 64], [1, 2, 3])])], "x", "seconds", "svg").decode()
    assert all(f"<!-- {size} -->" in text for size in (1, 16, 64))
