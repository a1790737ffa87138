"""Plots bits/dim against the position in an image or in a window of bytes."""

from collections.abc import Sequence

from linformer_cli.report.plots import Curve, Panel, PlotFormat, render_plot
from linformer_cli.units import Words

from .bits import PositionBits


def render_positions(parts: Sequence[PositionBits], kind: PlotFormat, words: Words) -> bytes:
    """Plot the bits of each range of positions at its last position, counted from 1, with a band for the error."""
    errors = [part.standard_error or 0.0 for part in parts]
    y = [part.bits_per_dim for part in parts]
    low, high = ([bits + sign * error for bits, error in zip(y, errors, strict=True)] for sign in (-1, 1))
    curve = Curve(f"mean over {words.items}, with standard error", [part.last + 1 for part in parts], y, low, high)
    return render_plot([Panel("", [curve], y_scale="linear")], f"position in the {words.item}", words.bits, kind)
