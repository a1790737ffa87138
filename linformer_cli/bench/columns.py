"""The columns of benchmark tables, and the plots of the same rows. The rows declare how each field is shown."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from linformer_cli.report.plots import Curve, Panel, PlotFormat, render_plot, with_error
from linformer_cli.report.tables import Column, Record, RecordTable, TableStyle, find_value, list_columns
from linformer_cli.units import IMAGES, WINDOWS, Words, format_count
from .growth import Exponents
from .rows import AttentionRow, ModelRow, Row, SamplingRow, TrainingRow

_FILE_SPEED = "precision device images_per_second speed_quartiles"
_PUBLISHED = "published.images_per_second published.seconds_per_image_cpu published.bits_per_dim"
# The columns for a terminal, and those for Markdown and CSV.
SAMPLING = (
    list_columns(
        SamplingRow,
        "name engine batch images_per_second extrapolated.images_per_second speed_quartiles times_softmax left_out "
        "latency_seconds latency_seconds_extrapolated state_bytes_per_image peak_memory_bytes product_share copy_share "
        f"times_softmax_of_other_engine looked_ahead reduced bits_per_dim images_seen {_PUBLISHED}",
    ),
    list_columns(
        SamplingRow,
        f"preset name engine batch look_ahead {_FILE_SPEED} extrapolated.images_per_second times_softmax "
        "times_softmax_of_other_engine latency_seconds latency_seconds_extrapolated seconds_per_position "
        "seconds_per_position_extrapolated state_bytes_per_image peak_memory_bytes product_share copy_share "
        f"bits_per_dim images_seen {_PUBLISHED} left_out",
    ),
)
TRAINING = (
    list_columns(
        TrainingRow,
        "name engine precision batch images_per_second speed_quartiles times_softmax left_out seconds_per_step "
        "product_share reduced bits_per_dim images_seen",
    ),
    list_columns(
        TrainingRow,
        f"preset name engine batch {_FILE_SPEED} seconds_per_step times_softmax product_share bits_per_dim images_seen "
        "repeats left_out",
    ),
)
# Time against the number of positions, for all networks.
_SECONDS = "seconds_per_position seconds_per_position_extrapolated"
POSITION_COLUMNS = list_columns(SamplingRow, f"network name engine batch positions {_SECONDS} state_bytes_per_image")
SCALING_COLUMNS = list_columns(
    AttentionRow,
    "name positions batch seconds_per_sequence seconds_per_sequence_quartiles times_softmax memory_bytes_per_sequence "
    "copy_share left_out",
)
EXPONENT_COLUMNS = list_columns(Exponents)
SCALING_FILE_COLUMNS = (
    *list_columns(AttentionRow, "name attention device heads head_width positions batch repeats"),
    *SCALING_COLUMNS[3:-1],
    Column("peak_memory_bytes"),
    *EXPONENT_COLUMNS[1:],
    Column("overtakes_softmax_at"),
    SCALING_COLUMNS[-1],
)

# Markdown tables keep these columns even if they are empty. An empty column shows that no run has trained these models.
QUALITY = ("bits_per_dim", "images_seen")


def choose_columns(rows: Sequence[Record], columns: Sequence[Column], keep: Sequence[str] = ()) -> list[Column]:
    """Choose `columns` that are not empty or in `keep`, in the words of the rows; none if all only identify a row."""
    words = find_words(rows)
    full = [
        replace(column, title=column.title.replace(IMAGES.bits, words.bits).replace(IMAGES.item, words.item))
        for column in columns
        if column.key in keep or any(find_value(row, column.key) is not None for row in rows)
    ]
    return full if any(not column.names for column in full) else []


def list_speed_tables(
    rows: Sequence[ModelRow], columns: tuple[Sequence[Column], Sequence[Column]], style: TableStyle, title: str = ""
) -> list[RecordTable]:
    """Return the tables of sampling or training: for a terminal, one for each preset, whose name is its title."""
    shown, file = columns
    if style != "table":
        return [RecordTable(rows, file if style == "csv" else choose_columns(rows, file, QUALITY), title)]
    groups = [[row for row in rows if row.preset == preset] for preset in dict.fromkeys(row.preset for row in rows)]
    return [RecordTable(mine, choose_columns(mine, shown), mine[0].preset or "") for mine in groups]


def list_position_times(rows: Sequence[ModelRow]) -> RecordTable:
    methods = [(row.network, row.name, row.engine, row.batch) for row in rows]
    places = sorted(range(len(rows)), key=lambda place: (methods.index(methods[place]), rows[place].positions))
    return RecordTable([rows[place] for place in places], choose_columns(rows, POSITION_COLUMNS))


def list_growth_tables(
    rows: Sequence[AttentionRow], exponents: Sequence[Exponents], style: TableStyle
) -> list[RecordTable]:
    """List the tables of time and memory against T, and of the exponents. In CSV, all of it is one table."""
    if style == "csv":
        powers = {found.name: vars(found) for found in exponents}
        records = [{**vars(row), **powers[row.name]} for row in rows]
        return [RecordTable(records, SCALING_FILE_COLUMNS)]
    growth = RecordTable(rows, SCALING_COLUMNS, "Time and memory against T")
    return [growth, RecordTable(exponents, EXPONENT_COLUMNS, "Exponents")]


def find_words(rows: Sequence[Record]) -> Words:
    """Return what the sequences of `rows` are called: windows if all models are models of bytes."""
    return WINDOWS if all(find_value(row, "item") == WINDOWS.item for row in rows) else IMAGES


def render_speed(rows: Sequence[ModelRow], kind: PlotFormat) -> bytes:
    """Plot images per second against batch size, with one panel per preset. A ring marks an extrapolated point."""
    labels = _label_methods(rows)
    panels = []
    presets = dict.fromkeys(row.preset for row in rows)
    for preset in presets:
        curves = []
        for method in dict.fromkeys(labels):
            mine = [row for row, label in zip(rows, labels, strict=True) if row.preset == preset and label == method]
            timed = sorted((row for row in mine if row.speed), key=lambda row: row.batch)
            points = [(row.batch, row.speed or 0.0, *(row.speed_quartiles or ())) for row in timed]
            ringed = [index for index, row in enumerate(timed) if row.images_per_second is None]
            curves += [Curve(method, points, ringed=ringed)] if points else []
        panels.append(Panel(preset or ("runs" if len(presets) > 1 else ""), curves))
    partly = any(curve.ringed for panel in panels for curve in panel.curves)
    items = find_words(rows).items
    label = f"{items} per second{' (in a ring: extrapolated)' if partly else ''}"
    return render_plot(panels, f"{items} at once", label, kind)


def render_quality(rows: Sequence[ModelRow], kind: PlotFormat) -> bytes:
    """Plot bits/dim against images per second, with a panel per batch size and a point per row of `trained_rows`."""
    drawn = trained_rows(rows)
    seen, words = {row.images_seen for row in drawn}, find_words(drawn)
    labels = _label_methods(drawn)
    if len(seen) > 1:
        counts = [f"{format_count(row.images_seen or 0)} {words.items}" for row in drawn]
        labels = [f"{label}, {count}" for label, count in zip(labels, counts, strict=True)]
    panels: dict[int, list[Curve]] = {batch: [] for batch in sorted({row.batch for row in drawn})}
    for row, label in zip(drawn, labels, strict=True):
        point = with_error(row.speed or 0.0, row.bits_per_dim or 0.0, row.bits_per_dim_standard_error)
        panels[row.batch].append(Curve(label, [point]))
    data = ", ".join(sorted({row.data or "" for row in drawn}))
    after = f" after {seen.pop():,} training {words.items}" if len(seen) == 1 else ""
    title = f"validation {words.bits} on {data}{after}"
    shown = [Panel(f"batch {n}", curves, y_scale="linear", ticks_at_points=False) for n, curves in panels.items()]
    return render_plot(shown, f"{words.items} per second", words.bits, kind, title=title)


def trained_rows(rows: Sequence[ModelRow]) -> list[ModelRow]:
    """Return the timed rows with a trained model. `render_quality` draws these rows."""
    return [row for row in rows if row.bits_per_dim is not None and row.speed]


def render_growth(rows: Sequence[AttentionRow], exponents: Sequence[Exponents], kind: PlotFormat) -> bytes:
    """Plot time and memory of a sequence against T. The legend has the exponents, the title the batches."""
    timed = {row.name for row in rows if row.seconds_per_sequence}
    labels: dict[str, str] = {}
    for found in exponents:
        slopes = (found.time_exponent_all, found.memory_exponent_all)
        label = f"{found.name} ({', '.join('-' if slope is None else f'{slope:.2f}' for slope in slopes)})"
        labels |= {found.name: label} if found.name in timed else {}
    title = f"attention, forward and backward, {_describe_batches(rows)} (slopes: time, memory)"
    time = "seconds_per_sequence", "time of a sequence (s)"
    memory = "memory_bytes_per_sequence", "peak memory of a sequence (MiB)"
    return render_costs(rows, labels, time, memory, "T (positions)", title, kind)


def render_costs(
    rows: Sequence[Row],
    labels: Mapping[str, str],
    time: tuple[str, str],
    memory: tuple[str, str],
    x_label: str,
    title: str,
    kind: PlotFormat,
) -> bytes:
    """Plot `time` with quartiles, and bytes of `memory`, pairs (field, axis label), against the positions of `rows`."""
    times, memories = [], []
    for name, label in labels.items():
        mine = [row for row in rows if row.name == name]
        timed = [(row.positions, getattr(row, time[0]), getattr(row, f"{time[0]}_quartiles")) for row in mine]
        counted = [(row.positions, getattr(row, memory[0])) for row in mine]
        times.append(Curve(label, [(x, y, *band) for x, y, band in timed if y and band]))
        memories.append(Curve(label, [(x, y / 2**20) for x, y in counted if y]))
    panels = [Panel("time", times, y_label=time[1]), Panel("memory", memories, y_label=memory[1])]
    return render_plot(panels, x_label, "", kind, title=title)


def _describe_batches(rows: Sequence[AttentionRow]) -> str:
    batches = {row.batch for row in rows}
    if len(batches) == 1:
        return f"batch {batches.pop()}"
    product = min(row.batch * row.positions for row in rows)
    if any(row.batch != max(1, product // row.positions) for row in rows):
        return f"batch {max(batches)} to {min(batches)}"
    if any(row.positions > product for row in rows):
        return f"batch max(1, {product:,} / T)"
    return f"batch x T = {product:,}"


def _label_methods(rows: Sequence[ModelRow]) -> list[str]:
    """Return the legend label of each row, with its engine for softmax and for names with several engines."""
    several = len({row.precision for row in rows}) > 1
    methods = [f"{row.engine}, {row.precision}" if several else row.engine for row in rows]
    counts = Counter(name for name, _ in {(row.name, method) for row, method in zip(rows, methods, strict=True)})
    return [
        f"{row.name}, {method}" if counts[row.name] > 1 or row.attention == "softmax" else row.name
        for row, method in zip(rows, methods, strict=True)
    ]
