"""Curves as PNG or SVG, in one style and colour-blind safe colours. matplotlib is imported only for drawing."""

import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from linformer_cli.errors import UsageError

# Okabe and Ito 2008, without yellow, which is hard to see on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
MARKERS = "osD^vPX"
PlotFormat = Literal["png", "svg"]
PLOT_FORMATS: tuple[PlotFormat, ...] = ("png", "svg")
Scale = Literal["log", "linear"]

_PANEL_INCHES = (3.4, 3.2)
_ONE_ROW = 3  # the largest number of panels in a single row
_MOST_TICKS = 5
_MARKERS_OF_A_CURVE = 8
_FEW_MARKERS = 12
_RING_SIZE = 70  # square points
# These estimate how many labels of the legend fit in a row. A handle is the line before a label.
_LETTERS_PER_INCH = 14
_TITLE_LETTERS_PER_INCH = 12
_HANDLE_LETTERS = 8
_LETTER_SHARE = 0.027  # the width of a letter under an axis, as a share of the axis
# Ticks, as factors of powers of ten, of logarithmic axes that span less than N times the smallest value.
_STEPS = ((16, (1, 1.5, 2, 3, 4, 6, 8)), (200, (1, 2, 5)))
# Powers of ten in this range are written out.
_PLAIN_NUMBERS = (1e-3, 1e5)
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "legend.frameon": False,
    "svg.hashsalt": "lintx",  # the same curves give the same file
}


@dataclass(frozen=True)
class Curve:
    """Points (x, y) or (x, y, low, high), with a band from `low` to `high`, or a bar for a single point.

    `style` has the indices of hue and dashes; by default, each label of a plot has its own. `ringed` are indices of
    points with a ring.
    """

    label: str
    points: Sequence[Sequence[float]]
    style: tuple[int, int] | None = None
    ringed: Sequence[int] = ()


def with_error(x: float, y: float, error: float | None) -> tuple[float, float, float, float]:
    """Return the point of a curve at (x, y) whose band has the width of the standard error on both sides."""
    return x, y, y - (error or 0.0), y + (error or 0.0)


@dataclass(frozen=True)
class Panel:
    """Curves in one frame. An axis without its own label gets the label of the plot."""

    title: str
    curves: Sequence[Curve]
    x_label: str | None = None
    y_label: str | None = None
    x_scale: Scale = "log"
    y_scale: Scale = "log"
    # If true, a logarithmic x axis has its ticks at the points. This suits chosen sizes, but not measured values.
    ticks_at_points: bool = True


def parse_plot_format(path: Path) -> PlotFormat:
    """Return the format of a file from its name. Raises `UsageError` for formats other than PNG and SVG."""
    match path.suffix.lower():
        case ".png":
            return "png"
        case ".svg":
            return "svg"
    raise UsageError(f"a plot is a PNG or an SVG, found '{path}'; give it a name that ends in .png or .svg")


def render_plot(
    panels: Sequence[Panel],
    x_label: str,
    y_label: str,
    kind: PlotFormat,
    title: str | None = None,
    columns: int | None = None,
) -> bytes:
    """Draw panels in `columns` columns with one legend. Panels with the same axis label share that axis."""
    import matplotlib
    from matplotlib.figure import Figure

    if columns is None:
        columns = len(panels) if len(panels) <= _ONE_ROW else math.ceil(math.sqrt(len(panels)))
    rows = math.ceil(len(panels) / columns)
    width, height = _PANEL_INCHES
    with matplotlib.rc_context(_STYLE):
        figure = Figure(dpi=150, layout="constrained")
        frames = figure.subplots(rows, columns, squeeze=False).flatten()
        first: dict[tuple[str, str], Any] = {}
        handles: dict[str, Any] = {}
        labels = dict.fromkeys(curve.label for panel in panels for curve in panel.curves)
        # The dash changes when all colours have been used.
        styles = {label: (index % len(PALETTE), index // len(PALETTE)) for index, label in enumerate(labels)}
        for index, (frame, panel) in enumerate(zip(frames, panels, strict=False)):
            across, up = panel.x_label or x_label, panel.y_label or y_label
            frame.set(title=panel.title, xlabel=across, xscale=panel.x_scale, yscale=panel.y_scale)
            if index % columns == 0 or panel.y_label is not None:
                frame.set_ylabel(up)
            for axis, label in (("x", across), ("y", up)):
                shared = first.setdefault((axis, label), frame)
                if shared is not frame:
                    getattr(frame, f"share{axis}")(shared)
            for curve in panel.curves:
                handles[curve.label] = _draw_curve(frame, curve, *(curve.style or styles[curve.label]))
        for frame, panel in zip(frames, panels, strict=False):
            together = [other for other in panels if other.x_label == panel.x_label]
            places = [x for other in together for curve in other.curves for x, *_ in curve.points]
            _choose_ticks(frame.xaxis, panel.x_scale, places if panel.ticks_at_points else None)
            _choose_ticks(frame.yaxis, panel.y_scale, None)
        for frame in frames[len(panels) :]:
            frame.set_axis_off()
        if title is not None:
            lines = textwrap.wrap(title, int(width * columns * _TITLE_LETTERS_PER_INCH))
            figure.suptitle("\n".join(lines), fontsize=_STYLE["font.size"] + 1)
        # Long labels need more room.
        fitting = int(width * columns * _LETTERS_PER_INCH / (max(map(len, handles), default=1) + _HANDLE_LETTERS))
        abreast = max(1, min(max(2, columns * 3 // 2), fitting))
        figure.set_size_inches(width * columns, height * rows + 0.3 + 0.2 * math.ceil(len(handles) / abreast))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=abreast)
        return _write(figure, kind)


def _write(figure: Any, kind: PlotFormat) -> bytes:
    """Return the file. Date and version are left out, so that equal plots give equal files."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return buffer.getvalue()


def _draw_curve(frame: Any, curve: Curve, hue: int, dash: int) -> Any:
    colour = PALETTE[hue % len(PALETTE)]
    x, y, *band = [*zip(*curve.points, strict=True)] or [(), ()]
    if band and len(x) == 1:
        frame.vlines(x, *band, color=colour, linewidth=1)
    elif band:
        frame.fill_between(x, *band, color=colour, alpha=0.15, linewidth=0)
    (line,) = frame.plot(
        x,
        y,
        color=colour,
        linestyle=DASHES[dash % len(DASHES)] if len(x) > 1 else "none",
        # No two of 49 curves have the same hue and marker, so that points without a line can be distinguished, too.
        marker=MARKERS[(hue + dash) % len(MARKERS)],
        markevery=1 if len(x) <= _FEW_MARKERS else math.ceil(len(x) / _MARKERS_OF_A_CURVE),
        label=curve.label,
    )
    if curve.ringed:
        ringed = [curve.points[index][:2] for index in curve.ringed]
        frame.scatter(*zip(*ringed, strict=True), s=_RING_SIZE, facecolors="none", edgecolors=colour, linewidths=0.8)
    return line


def _choose_ticks(axis: Any, scale: Scale, measured: Sequence[float] | None) -> None:
    """Choose a few readable tick labels, at the values of `measured` if it is given."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    if scale == "linear":
        axis.set_major_locator(MaxNLocator(_MOST_TICKS))
        axis.set_major_formatter("{x:,g}")
        return
    low, high = axis.get_view_interval()
    if 0 < high <= 1.001 * low:  # for a single value, matplotlib may make an axis with no extent
        low, high = low / 2, high * 2
        getattr(axis.axes, f"set_{axis.axis_name}lim")(low, high)
    if measured is not None:
        labels = _label_places(measured or [1.0])
        axis.set_ticks(list(labels), list(labels.values()))
    elif steps := next((steps for span, steps in _STEPS if 0 < high < span * low), None):
        axis.set_major_locator(LogLocator(subs=steps))
        axis.set_major_formatter("{x:g}")
    elif _PLAIN_NUMBERS[0] <= low and high <= _PLAIN_NUMBERS[1]:
        axis.set_major_formatter("{x:,g}")
    axis.set_tick_params(which="minor", left=False, bottom=False)
    axis.set_minor_formatter("")


def _label_places(places: Sequence[float]) -> dict[float, str]:
    """Label as many of `places` on a logarithmic axis as fit without overlap. Larger places take precedence."""
    labels: dict[float, str] = {}
    span = math.log(max(places) / min(places))
    last = math.inf
    for place in sorted(set(places), reverse=True):
        label = f"{place:,.15g}"
        if labels and math.log(last / place) < span * _LETTER_SHARE * ((len(labels[last]) + len(label)) / 2 + 1):
            continue
        labels[place], last = label, place
    return labels
