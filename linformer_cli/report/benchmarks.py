"""The rows of a benchmark as tables and as curves. A row is a plain record, as a report holds it."""

from collections.abc import Mapping, Sequence
from typing import Any

from .plots import Curve, Panel
from .tables import Column
from .terminal import format_bytes, format_milliseconds


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


_METHOD = (Column("name", "attention"), Column("engine", "engine"), Column("batch", "batch"))
_WHO = (Column("preset", "preset"), *_METHOD)
_SPEED = (Column("images_per_second", "images/s", format=".4g"), Column("quartiles", "quartiles"))
_BITS = (Column("bits_per_dim", "bits/dim", format=".4f"), Column("images_seen", "images seen", format=","))
_LEFT_OUT = Column("left_out", "left out")
_SHARES = (
    Column("product_share", "products", format=_percent),
    Column("copy_share", "copying", format=_percent),
)
_FILE_SPEED = (
    Column("precision", "precision"),
    Column("device", "device"),
    Column("images_per_second", "images/s", format=".4g"),
    Column("images_per_second_quartile_1", "quartile 1", format=".4g"),
    Column("images_per_second_quartile_3", "quartile 3", format=".4g"),
)
_STATE = (
    Column("state_bytes_per_image", "state", format=format_bytes),
    Column("peak_memory_bytes", "memory", format=format_bytes),
)
_PUBLISHED = tuple(
    Column(f"published_{key}", f"published {title}", format="g")
    for key, title in (
        ("images_per_second", "images/s"),
        ("seconds_per_image_cpu", "s an image"),
        ("bits_per_dim", "bits/dim"),
    )
)

# What a terminal shows, a table under another so that none is wider than it: speed, cost, quality.
SAMPLING_TABLES: tuple[Sequence[Column], ...] = (
    (*_METHOD, *_SPEED, Column("images_per_second_extrapolated", "extrapolated", format=".3g"), _LEFT_OUT),
    (*_METHOD, Column("latency_seconds", "s/image", format=".3g"), *_STATE, *_SHARES),
    (*_METHOD, *_BITS, *_PUBLISHED),
)
TRAINING_TABLES: tuple[Sequence[Column], ...] = (
    (*_METHOD[::2], *_SPEED, Column("seconds_per_step", "step", format=format_milliseconds), _SHARES[0]),
    (*_METHOD[::2], *_BITS, Column("reduced", "reduced"), _LEFT_OUT),
)
SAMPLING_FILE_COLUMNS = (
    *_WHO,
    *_FILE_SPEED,
    Column("images_per_second_extrapolated", "extrapolated images/s", format=".3g"),
    Column("latency_seconds", "s an image", format=".3g"),
    Column("state_bytes_per_image", "state bytes an image", format=","),
    Column("peak_memory_bytes", "peak memory bytes", format=","),
    *_SHARES,
    *_BITS,
    *_PUBLISHED,
    _LEFT_OUT,
)
TRAINING_FILE_COLUMNS = (
    *_WHO,
    *_FILE_SPEED,
    Column("seconds_per_step", "s a step", format=".3g"),
    _SHARES[0],
    *_BITS,
    Column("repeats", "repeats"),
    _LEFT_OUT,
)
SCALING_COLUMNS = (
    Column("name", "attention"),
    Column("positions", "T", format=","),
    Column("seconds", "time", format=format_milliseconds),
    Column("quartiles", "quartiles"),
    Column("peak_memory_bytes", "memory", format=format_bytes),
    _LEFT_OUT,
)


def choose_columns(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> list[Column]:
    """`columns` without those that no row has anything in; none at all where nothing but the method would be left."""
    full = [column for column in columns if any(row.get(column.key) is not None for row in rows)]
    return full if any(column not in _METHOD for column in full) else []


def flatten_speed(row: Mapping[str, Any]) -> dict[str, Any]:
    """A record without nested parts, for a table; what was extrapolated keeps its own column."""
    low, high = row.get("images_per_second_quartiles") or (None, None)
    extrapolated = row.get("extrapolated") or {}
    published = row.get("published") or {}
    seconds = row.get("seconds_per_image") or extrapolated.get("seconds_per_image")
    return {
        **row,
        "quartiles": None if low is None else f"{low:.3g}-{high:.3g}",
        "images_per_second_quartile_1": low,
        "images_per_second_quartile_3": high,
        "images_per_second_extrapolated": extrapolated.get("images_per_second"),
        "latency_seconds": seconds if row["batch"] == 1 else None,
        **{
            f"published_{key}": published.get(key)
            for key in ("images_per_second", "seconds_per_image_cpu", "bits_per_dim")
        },
    }


def flatten_scaling(row: Mapping[str, Any]) -> dict[str, Any]:
    """A record of a point of time and memory against T, for a table."""
    low, high = row["seconds_quartiles"] or (None, None)
    shown = None if low is None or high is None else f"{format_milliseconds(low)} - {format_milliseconds(high)}"
    return {**row, "seconds_quartile_1": low, "seconds_quartile_3": high, "quartiles": shown}


def speed_panels(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Images per second against the batch size, a panel for each preset; extrapolated ones too."""
    methods = list(dict.fromkeys(_method(row) for row in rows))
    panels = []
    for preset in dict.fromkeys(row["preset"] for row in rows):
        curves = []
        for number, method in enumerate(methods):
            points = []
            for row in rows:
                figures = row if row.get("images_per_second") else row.get("extrapolated")
                if row["preset"] == preset and _method(row) == method and figures:
                    points.append((row["batch"], figures["images_per_second"], *figures["images_per_second_quartiles"]))
            if points:
                x, y, low, high = (list(part) for part in zip(*sorted(points), strict=True))
                curves.append(Curve(method, x, y, low, high, colour=number))
        if curves:
            panels.append(Panel(preset or "", curves))
    return panels


def growth_panels(rows: Sequence[Mapping[str, Any]], exponents: Sequence[Mapping[str, Any]], kind: str) -> list[Panel]:
    """`kind` time (seconds) or memory (bytes) against T; the label has the exponent fitted over all lengths."""
    key = {"time": "seconds", "memory": "peak_memory_bytes"}[kind]
    curves = []
    for number, exponent in enumerate(exponents):
        name, slope = exponent["name"], exponent[f"{kind}_exponent_all"]
        points = []
        for row in rows:
            if row["name"] == name and row[key]:
                low, high = row["seconds_quartiles"] if kind == "time" else (row[key], row[key])
                points.append((row["positions"], row[key], low, high))
        if points:
            x, y, low_line, high_line = (list(part) for part in zip(*sorted(points), strict=True))
            label = name if slope is None else f"{name}: T^{slope:.2f}"
            curves.append(Curve(label, x, y, low_line, high_line, colour=number))
    return [Panel(f"{kind} of one forward and backward pass", curves)] if curves else []


def _method(row: Mapping[str, Any]) -> str:
    return f"{row['name']}, {row['engine']}" if row["attention"] == "softmax" else str(row["name"])
