"""The rows of a benchmark as tables and as curves. A row is a plain record, as a report holds it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from linformer_cli.errors import UsageError
from linformer_cli.units import format_bytes, format_count, format_microseconds, format_milliseconds

from .plots import Curve, Panel, PlotFormat, number_styles, render_plot
from .tables import Column

Record = Mapping[str, Any]


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


_METHOD = (
    Column("name", "attention", names=True),
    Column("engine", "engine", names=True),
    Column("batch", "batch", names=True),
)
_WHO = (Column("preset", "preset"), *_METHOD)
_SPEED = (Column("images_per_second", "images/s", format=".4g"), Column("quartiles", "quartiles"))
_EXTRAPOLATED = "extrapolated"
_BITS = (Column("bits_per_dim", "bits/dim", format=".4f"), Column("images_seen", "images seen", format=","))
_TIMES_SOFTMAX = Column("times_softmax", "x softmax", format=".3g")
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

# What a terminal shows, a table under another so that none is wider than it: speed, cost, quality, and the
# paper's own.
SAMPLING_TABLES: tuple[Sequence[Column], ...] = (
    (
        *(*_METHOD, _SPEED[0], Column("images_per_second_extrapolated", _EXTRAPOLATED, format=".3g"), _SPEED[1]),
        *(_TIMES_SOFTMAX, _LEFT_OUT),
    ),
    (
        *(*_METHOD, Column("latency_seconds", "s/image", format=".3g")),
        Column("latency_seconds_extrapolated", _EXTRAPOLATED, format=".3g"),
        *(*_STATE, *_SHARES),
    ),
    (*_METHOD, *_BITS),
    (
        *_METHOD,
        Column("published_images_per_second", "published images/s", format="g"),
        Column("published_seconds_per_image_cpu", "s/image", format="g"),
        Column("published_bits_per_dim", "bits/dim", format="g"),
    ),
)
# Against the number of positions, over all networks.
POSITION_COLUMNS = (
    Column("network", "network", names=True),
    *_METHOD,
    Column("positions", "T", format=",", names=True),
    Column("seconds_per_position", "a value", format=format_microseconds),
    Column("seconds_per_position_extrapolated", _EXTRAPOLATED, format=format_microseconds),
    _STATE[0],
)
TRAINING_TABLES: tuple[Sequence[Column], ...] = (
    (*_METHOD, *_SPEED, _TIMES_SOFTMAX, Column("reduced", "reduced"), _LEFT_OUT),
    (*_METHOD, Column("seconds_per_step", "step", format=format_milliseconds), _SHARES[0]),
    (*_METHOD, *_BITS),
)
SAMPLING_FILE_COLUMNS = (
    *_WHO,
    *_FILE_SPEED,
    Column("images_per_second_extrapolated", "extrapolated images/s", format=".3g"),
    _TIMES_SOFTMAX,
    Column("latency_seconds", "s an image", format=".3g"),
    Column("latency_seconds_extrapolated", "extrapolated s an image", format=".3g"),
    Column("seconds_per_position", "s a position", format=".3g"),
    Column("seconds_per_position_extrapolated", "extrapolated s a position", format=".3g"),
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
    _TIMES_SOFTMAX,
    _SHARES[0],
    *_BITS,
    Column("repeats", "repeats"),
    _LEFT_OUT,
)
SCALING_COLUMNS = (
    Column("name", "attention", names=True),
    Column("positions", "T", format=",", names=True),
    Column("batch", "batch"),
    Column("seconds_per_sequence", "time", format=format_milliseconds),
    Column("quartiles", "quartiles"),
    _TIMES_SOFTMAX,
    Column("memory_bytes_per_sequence", "memory", format=format_bytes),
    Column("copy_share", "copying", format=_percent),
    _LEFT_OUT,
)
_EXPONENTS = (
    Column("time_exponent_last_two", "time, last two", format=".2f"),
    Column("memory_exponent_last_two", "memory, last two", format=".2f"),
    Column("time_exponent_all", "time, all", format=".2f"),
    Column("memory_exponent_all", "memory, all", format=".2f"),
)
EXPONENT_COLUMNS = (Column("name", "exponents of", names=True), *_EXPONENTS)
REACH_COLUMNS = (
    Column("name", "attention", names=True),
    Column("longest_positions", "longest T that fits", format=","),
    Column("overtakes_softmax", "overtakes softmax at T"),
)
SCALING_FILE_COLUMNS = (
    *(Column(key, key) for key in ("name", "attention", "device", "heads", "head_width", "positions", "batch")),
    *(Column(key, key) for key in ("repeats", "seconds_per_sequence", "seconds_quartile_1", "seconds_quartile_3")),
    *(Column(key, key) for key in ("times_softmax", "memory_bytes_per_sequence", "peak_memory_bytes", "copy_share")),
    *_EXPONENTS,
    *(Column(key, key) for key in ("longest_positions", "overtakes_softmax_at", "overtakes_softmax")),
    Column("left_out", "left out"),
)


# Empty, they say that speed alone was measured.
QUALITY = ("bits_per_dim", "images_seen")


def choose_columns(rows: Sequence[Record], columns: Sequence[Column], keep: Sequence[str] = ()) -> list[Column]:
    """`columns` without those that no row has anything in, but for `keep`; none where only the method would be left."""
    full = [column for column in columns if column.key in keep or any(row.get(column.key) is not None for row in rows)]
    return full if any(column not in _METHOD for column in full) else []


def flatten_speed(row: Record) -> dict[str, Any]:
    """A record without nested parts, for a table; what was extrapolated keeps columns of its own.

    The quartiles are those of the one speed that the row has, measured or extrapolated.
    """
    low, high = find_speed(row).get("images_per_second_quartiles") or (None, None)
    extrapolated = row.get("extrapolated") or {}
    published = row.get("published") or {}

    def per_image_and_value(suffix: str, seconds: float | None) -> dict[str, float | None]:
        return {
            f"latency_seconds{suffix}": seconds if row["batch"] == 1 else None,
            f"seconds_per_position{suffix}": seconds / row["positions"] if seconds else None,
        }

    return {
        **row,
        "quartiles": None if low is None else f"{low:.3g}-{high:.3g}",
        "images_per_second_quartile_1": low,
        "images_per_second_quartile_3": high,
        "images_per_second_extrapolated": extrapolated.get("images_per_second"),
        **per_image_and_value("", row.get("seconds_per_image")),
        **per_image_and_value("_extrapolated", extrapolated.get("seconds_per_image")),
        **{
            f"published_{key}": published.get(key)
            for key in ("images_per_second", "seconds_per_image_cpu", "bits_per_dim")
        },
    }


def flatten_scaling(row: Record) -> dict[str, Any]:
    """A record of a point of time and memory against T, for a table."""
    low, high = row["seconds_per_sequence_quartiles"] or (None, None)
    shown = None if low is None or high is None else f"{format_milliseconds(low)} - {format_milliseconds(high)}"
    return {**row, "seconds_quartile_1": low, "seconds_quartile_3": high, "quartiles": shown}


def render_speed(rows: Sequence[Record], kind: PlotFormat) -> bytes:
    """Images per second against the batch size, a panel for each preset; what was extrapolated has a ring around it."""
    labels = _label_methods(rows)
    methods = list(dict.fromkeys(labels))
    panels = []
    presets = dict.fromkeys(row["preset"] for row in rows)
    for preset in presets:
        curves = []
        for method, (colour, dash) in zip(methods, number_styles(len(methods)), strict=True):
            points, extrapolated = [], set()
            for row, label in zip(rows, labels, strict=True):
                figures = find_speed(row)
                if row["preset"] == preset and label == method and figures:
                    points.append((row["batch"], figures["images_per_second"], *figures["images_per_second_quartiles"]))
                    if figures is not row:
                        extrapolated.add(row["batch"])
            if points:
                x, y, low, high = (list(part) for part in zip(*sorted(points), strict=True))
                ringed = [index for index, batch in enumerate(x) if batch in extrapolated]
                curves.append(Curve(method, x, y, low, high, colour, dash, ringed))
        panels.append(Panel(preset or ("runs" if len(presets) > 1 else ""), curves))
    partly = any(curve.ringed for panel in panels for curve in panel.curves)
    label = "images per second (in a ring: extrapolated)" if partly else "images per second"
    return render_plot(panels, "images at once", label, kind)


def render_quality(rows: Sequence[Record], kind: PlotFormat) -> bytes:
    """bits/dim against images per second, a panel for each batch size: rows whose model was trained, a point each.

    Raises `UsageError` where there is none: speed alone says nothing of bits/dim.
    """
    drawn = trained_rows(rows)
    if not drawn:
        raise UsageError("no row has bits/dim and a speed; name trained runs of these models with --runs")
    seen = {row["images_seen"] for row in drawn}
    labels = _label_methods(drawn)
    if len(seen) > 1:
        labels = [
            f"{label}, {format_count(row['images_seen'])} images" for label, row in zip(labels, drawn, strict=True)
        ]
    methods = list(dict.fromkeys(labels))
    styles = dict(zip(methods, number_styles(len(methods)), strict=True))
    panels = []
    for batch in sorted({row["batch"] for row in drawn}):
        curves = []
        for row, label in zip(drawn, labels, strict=True):
            if row["batch"] == batch:
                bits, error = row["bits_per_dim"], row["bits_per_dim_standard_error"] or 0.0
                point = [find_speed(row)["images_per_second"]], [bits], [bits - error], [bits + error]
                curves.append(Curve(label, *point, *styles[label]))
        panels.append(Panel(f"batch {batch}", curves, y_scale="linear", ticks_at_points=False))
    data = ", ".join(sorted({row["data"] for row in drawn}))
    title = f"validation bits/dim on {data}" + (f" after {seen.pop():,} training images" if len(seen) == 1 else "")
    return render_plot(panels, "images per second", "bits/dim", kind, title=title)


def trained_rows(rows: Sequence[Record]) -> list[Record]:
    """Those whose model was trained and that were timed: what `render_quality` draws."""
    return [row for row in rows if row["bits_per_dim"] is not None and find_speed(row)]


def find_speed(row: Record) -> Record:
    """Where the figures of speed stand: in the row, or among the extrapolated; empty where it was left out."""
    return row if row.get("images_per_second") else row.get("extrapolated") or {}


def describe_speed(row: Record) -> str:
    """One row in a line."""
    figures = find_speed(row)
    where = f"{row['preset']}, " if row["preset"] else ""
    who = f"{where}{row['name']} ({row['engine']}), batch {row['batch']}"
    if not figures:
        return f"{who}: left out, {row['left_out']}"
    how = "" if figures is row else " (extrapolated)"
    return f"{who}: {figures['images_per_second']:.3g} images/s{how}"


def render_growth(rows: Sequence[Record], exponents: Sequence[Record], kind: PlotFormat) -> bytes:
    """Time and memory of one sequence against T, a curve a mechanism, its exponents over all lengths in the legend.

    The title says how many sequences a pass had.
    """
    styles = number_styles(len(exponents))
    times, memories = [], []
    for row, (colour, dash) in zip(exponents, styles, strict=True):
        slopes = [row[f"{key}_exponent_all"] for key in ("time", "memory")]
        label = f"{row['name']} ({', '.join('-' if slope is None else f'{slope:.2f}' for slope in slopes)})"
        timed = [point for point in rows if point["name"] == row["name"] and point["seconds_per_sequence"]]
        if not timed:
            continue
        low, high = zip(*(point["seconds_per_sequence_quartiles"] for point in timed), strict=True)
        x, y = [point["positions"] for point in timed], [point["seconds_per_sequence"] for point in timed]
        times.append(Curve(label, x, y, low, high, colour, dash))
        counted = [point for point in timed if point["memory_bytes_per_sequence"]]
        x, y = (
            [point["positions"] for point in counted],
            [point["memory_bytes_per_sequence"] / 2**20 for point in counted],
        )
        memories.append(Curve(label, x, y, colour=colour, dash=dash))
    panels = [
        Panel("time", times, y_label="time of a sequence (s)"),
        Panel("memory", memories, y_label="peak memory of a sequence (MiB)"),
    ]
    title = f"attention, forward and backward, {_describe_batches(rows)} (slopes: time, memory)"
    return render_plot(panels, "T (positions)", "", kind, title=title)


def _describe_batches(rows: Sequence[Record]) -> str:
    """How many sequences the passes of a figure had."""
    batches = {row["batch"] for row in rows}
    if len(batches) == 1:
        return f"batch {batches.pop()}"
    product = min(row["batch"] * row["positions"] for row in rows)
    if any(row["batch"] != max(1, product // row["positions"]) for row in rows):
        return f"batch {max(batches)} to {min(batches)}"
    if any(row["positions"] > product for row in rows):
        return f"batch max(1, {product:,} / T)"
    return f"batch x T = {product:,}"


def _label_methods(rows: Sequence[Record]) -> list[str]:
    """What each row is called in a legend: with its engine where its name has several, and always for softmax."""
    engines = Counter(name for name, _ in {(row["name"], row["engine"]) for row in rows})
    return [
        f"{row['name']}, {row['engine']}" if engines[row["name"]] > 1 or row["attention"] == "softmax" else row["name"]
        for row in rows
    ]
