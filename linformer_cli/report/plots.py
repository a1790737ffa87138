"""Curves as PNG or SVG, in one style and in colours that everyone can tell apart. matplotlib is imported to draw."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from linformer_cli.errors import UsageError

# Okabe and Ito 2008, without yellow, which white paper swallows.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES: tuple[Literal["-", "--", ":"], ...] = ("-", "--", ":")
MARKERS = "osD^vPX"
PlotFormat = Literal["png", "svg"]

_PANEL_INCHES = (3.4, 3.2)
_ONE_ROW = 3  # panels
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
    """Points (x, y) with a band from `low` to `high`. `colour` numbers the hue and the marker, `dash` the dashes."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    colour: int = 0
    dash: int = 0


@dataclass(frozen=True)
class Panel:
    """Curves in one frame."""

    title: str
    curves: Sequence[Curve]


def parse_plot_format(path: Path) -> PlotFormat:
    """The format that a file's name asks for; raises `UsageError` for any but PNG and SVG."""
    match path.suffix.lower():
        case ".png":
            return "png"
        case ".svg":
            return "svg"
    raise UsageError(f"a plot is a PNG or an SVG, found '{path}'; give it a name that ends in .png or .svg")


def render_plot(panels: Sequence[Panel], x_label: str, y_label: str, kind: PlotFormat) -> bytes:
    """Panels side by side, both axes logarithmic and the same in all of them, under one legend.

    The labels name the quantity and its unit. The same panels give the same bytes.
    """
    import matplotlib
    from matplotlib.figure import Figure

    columns = len(panels) if len(panels) <= _ONE_ROW else math.ceil(math.sqrt(len(panels)))
    rows = math.ceil(len(panels) / columns)
    width, height = _PANEL_INCHES
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width * columns, height * rows + 0.5), dpi=150, layout="constrained")
        frames = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
        handles = {}
        for index, (frame, panel) in enumerate(zip(frames, panels, strict=False)):
            frame.set(title=panel.title, xlabel=x_label, xscale="log", yscale="log")
            if index % columns == 0:
                frame.set_ylabel(y_label)
            frame.tick_params(labelbottom=True)  # the frame below may be an empty one
            for curve in panel.curves:
                colour = PALETTE[curve.colour % len(PALETTE)]
                marker = MARKERS[curve.colour % len(MARKERS)]
                frame.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
                (line,) = frame.plot(
                    curve.x, curve.y, DASHES[curve.dash % len(DASHES)], color=colour, marker=marker, label=curve.label
                )
                handles[curve.label] = line
            measured = sorted({x for panel in panels for curve in panel.curves for x in curve.x})
            frame.set_xticks(measured, [f"{x:g}" for x in measured])
            frame.minorticks_off()
        for frame in frames[len(panels) :]:
            frame.set_axis_off()
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=max(1, columns * 3 // 2))
        buffer = io.BytesIO()
        # No date and no version in the file.
        figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return buffer.getvalue()
