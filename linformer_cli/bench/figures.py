"""The plots of benchmarks. They use the same rows as the tables."""

from collections import Counter
from collections.abc import Mapping, Sequence

from linformer_cli.report.plots import Curve, Panel, PlotFormat, number_styles, render_plot
from linformer_cli.units import format_count
from .columns import find_words
from .growth import Exponents
from .rows import AttentionRow, ModelRow, Row


def render_speed(rows: Sequence[ModelRow], kind: PlotFormat) -> bytes:
    """Plot images per second against batch size, with one panel per preset. A ring marks an extrapolated point."""
    labels = _label_methods(rows)
    methods = list(dict.fromkeys(labels))
    panels = []
    presets = dict.fromkeys(row.preset for row in rows)
    for preset in presets:
        curves = []
        for method, style in zip(methods, number_styles(len(methods)), strict=True):
            mine = [row for row, label in zip(rows, labels, strict=True) if row.preset == preset and label == method]
            timed = sorted((row for row in mine if row.speed), key=lambda row: row.batch)
            points = [(row.batch, row.speed or 0.0, *(row.speed_quartiles or ())) for row in timed]
            if points:
                ringed = [index for index, row in enumerate(timed) if row.images_per_second is None]
                curves.append(Curve.through(method, points, style, ringed))
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
    methods = list(dict.fromkeys(labels))
    styles = dict(zip(methods, number_styles(len(methods)), strict=True))
    panels: dict[int, list[Curve]] = {batch: [] for batch in sorted({row.batch for row in drawn})}
    for row, label in zip(drawn, labels, strict=True):
        bits, error = row.bits_per_dim or 0.0, row.bits_per_dim_standard_error or 0.0
        point = [row.speed or 0.0], [bits], [bits - error], [bits + error]
        panels[row.batch].append(Curve(label, *point, *styles[label]))
    data = ", ".join(sorted({row.data or "" for row in drawn}))
    after = f" after {seen.pop():,} training {words.items}" if len(seen) == 1 else ""
    title = f"validation {words.bits} on {data}{after}"
    shown = [
        Panel(f"batch {batch}", curves, y_scale="linear", ticks_at_points=False) for batch, curves in panels.items()
    ]
    return render_plot(shown, f"{words.items} per second", words.bits, kind, title=title)


def trained_rows(rows: Sequence[ModelRow]) -> list[ModelRow]:
    """Return the timed rows with a trained model. `render_quality` draws these rows."""
    return [row for row in rows if row.bits_per_dim is not None and row.speed]


def render_growth(rows: Sequence[AttentionRow], exponents: Sequence[Exponents], kind: PlotFormat) -> bytes:
    """Plot time and memory of one sequence against T, with one curve per mechanism that was measured.

    The legend shows the exponents over all lengths. The title shows the number of sequences in a pass.
    """
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
    """Plot a time with its quartiles, and bytes of memory, against the positions of `rows`.

    `labels` has the label of each name. `time` and `memory` are pairs of a field of the rows and the label of its axis.
    """
    times, memories = [], []
    for (name, label), style in zip(labels.items(), number_styles(len(labels)), strict=True):
        mine = [row for row in rows if row.name == name]
        timed = [(row.positions, getattr(row, time[0]), getattr(row, f"{time[0]}_quartiles")) for row in mine]
        counted = [(row.positions, getattr(row, memory[0])) for row in mine]
        times.append(Curve.through(label, [(x, y, *band) for x, y, band in timed if y and band], style))
        memories.append(Curve.through(label, [(x, y / 2**20) for x, y in counted if y], style))
    panels = [Panel("time", times, y_label=time[1]), Panel("memory", memories, y_label=memory[1])]
    return render_plot(panels, x_label, "", kind, title=title)


def _describe_batches(rows: Sequence[AttentionRow]) -> str:
    """Describe the number of sequences in a pass for a title."""
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
    """Return the legend label of each row. A label names the method for softmax and for names with several methods.

    A method is an engine, with its precision if the rows differ in precision.
    """
    several = len({row.precision for row in rows}) > 1
    methods = [f"{row.engine}, {row.precision}" if several else row.engine for row in rows]
    counts = Counter(name for name, _ in {(row.name, method) for row, method in zip(rows, methods, strict=True)})
    return [
        f"{row.name}, {method}" if counts[row.name] > 1 or row.attention == "softmax" else row.name
        for row, method in zip(rows, methods, strict=True)
    ]
