"""`lintx bench attention`: how time and memory of training grow with the number of positions."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linformer_cli.report.tables import Column
from linformer_cli.report.terminal import format_bytes, format_milliseconds

from . import options
from .output import print_json, print_records, talk

if TYPE_CHECKING:
    from linformer_cli.bench.scaling import ScalingReport
    from linformer_cli.report.plots import PlotFormat

_POINT_COLUMNS = (
    Column("name", "attention"),
    Column("positions", "T", format=","),
    Column("seconds", "time", format=format_milliseconds),
    Column("quartiles", "quartiles"),
    Column("peak_memory_bytes", "memory", format=format_bytes),
    Column("left_out", "left out"),
)
_EXPONENT_COLUMNS = (
    Column("time_exponent_last_two", "time, last two", format=".2f"),
    Column("memory_exponent_last_two", "memory, last two", format=".2f"),
    Column("time_exponent_all", "time, all", format=".2f"),
    Column("memory_exponent_all", "memory, all", format=".2f"),
)
_REACH_COLUMNS = (
    Column("longest_positions", "longest T that fits", format=","),
    Column("overtakes_softmax", "overtakes softmax at T"),
)
_FILE_COLUMNS = (
    *(Column(key, key) for key in ("name", "attention", "device", "heads", "head_width", "positions", "repeats")),
    *(Column(key, key) for key in ("seconds", "seconds_quartile_1", "seconds_quartile_3", "peak_memory_bytes")),
    *_EXPONENT_COLUMNS,
    *(Column(key, key) for key in ("longest_positions", "overtakes_softmax_at", "overtakes_softmax")),
    Column("left_out", "left out"),
)


def attention(
    names: options.Variants = None,
    positions: Annotated[
        str, typer.Option("--positions", help="Lengths T, separated by commas.", metavar="LIST")
    ] = "1024,4096,16384",
    heads: Annotated[int, typer.Option("--heads", min=1, help="Heads.")] = 1,
    head_width: Annotated[int, typer.Option("--head-width", min=1, help="Width of a head.")] = 32,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Repeats after one warm-up; the median counts.")] = 5,
    limit: Annotated[
        str, typer.Option("--limit", help="The most that all passes of one mechanism at one T may take.")
    ] = "60s",
    device: options.Device = "auto",
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Also time and memory against T, log-log: .png or .svg.", show_default=False),
    ] = None,
    style: Annotated[options.TableFormat, typer.Option("--format", help="How to print.")] = options.TableFormat.TABLE,
    json: options.Json = False,
) -> None:
    """Measure how time and memory grow with T.

    One forward and backward pass of each mechanism alone, for one sequence in float32: the median and quartiles of its
    time over interleaved repeats, the peak of its memory (on a CPU the growth of a fresh process), and the exponents p
    of time and memory as T to the power p, between the last two lengths and fitted over all. What would not fit into
    memory or --limit is left out, and its row says why. Nothing is timed whose parallel and step form disagree.

    A second table has the longest T of --positions that fits, and, where softmax is among the mechanisms, the T from
    which on each is faster than it, interpolated in log T and log time between the lengths that were measured.

    Examples:

    - `lintx bench attention`
    - `lintx bench attention --attention linear,softmax --positions 1024,4096 --format md`
    - `lintx bench attention --attention linear,linear:chunk=256 --limit 10s --json`
    - `lintx bench attention --positions 512,1024,2048,4096 --plot scaling.png`
    """
    from linformer_cli.report.plots import parse_plot_format

    kind = None if plot is None else parse_plot_format(plot)
    lengths = options.parse_sizes(positions, "--positions", "1024,4096")
    seconds = options.parse_duration(limit)

    from linformer_cli.bench.scaling import run_scaling_bench
    from linformer_cli.report.grids import write_file
    from linformer_cli.runtime import choose_device

    place = choose_device(device)
    talk(f"device {place.value} ({place.reason})")
    report = run_scaling_bench(
        options.choose_variants(names), lengths, repeats, seconds, heads, head_width, place.value, _report
    )
    if plot is not None and kind is not None:
        write_file(plot, _render(report, kind))
        talk(f"wrote {plot}")
    if json:
        print_json({**vars(report), "plot": plot})
        return
    exponents = {row["name"]: row for row in report.exponents}
    rows = [_flatten({**row, **exponents[row["name"]]}) for row in report.rows]
    tables = [(rows, _FILE_COLUMNS)]
    if style is not options.TableFormat.CSV:  # which holds one table
        tables = [(rows, _POINT_COLUMNS), (report.exponents, (Column("name", "exponents of"), *_EXPONENT_COLUMNS))]
        tables.append((report.exponents, (Column("name", "attention"), *_REACH_COLUMNS)))
    for number, (records, columns) in enumerate(tables):
        if number:
            print()
        print_records(records, columns, style.value)
    machine = report.environment
    talk(f"{machine['processor']}, {machine['threads']} threads, torch {machine['versions']['torch']}")


def _report(row: dict[str, Any]) -> None:
    """A long job says what it has."""
    found = f"left out, {row['left_out']}" if row["left_out"] else format_milliseconds(row["seconds"])
    memory = row["peak_memory_bytes"]
    talk(f"{row['name']}, T = {row['positions']:,}: {found}" + (f", {format_bytes(memory)}" if memory else ""))


def _flatten(row: dict[str, Any]) -> dict[str, Any]:
    low, high = row["seconds_quartiles"] or (None, None)
    shown = (
        f"{format_milliseconds(low)} - {format_milliseconds(high)}" if low is not None and high is not None else None
    )
    return {**row, "seconds_quartile_1": low, "seconds_quartile_3": high, "quartiles": shown}


def _render(report: "ScalingReport", kind: "PlotFormat") -> bytes:
    """Time and memory against T, one curve a mechanism, with its exponents over all lengths in the legend."""
    from linformer_cli.report.plots import Curve, Panel, number_styles, render_plot

    styles = number_styles(len(report.exponents))
    times, memories = [], []
    for row, (colour, dash) in zip(report.exponents, styles, strict=True):
        slopes = [row[f"{key}_exponent_all"] for key in ("time", "memory")]
        label = f"{row['name']} ({', '.join('-' if slope is None else f'{slope:.2f}' for slope in slopes)})"
        timed = [point for point in report.rows if point["name"] == row["name"] and point["seconds"]]
        low, high = zip(*(point["seconds_quartiles"] for point in timed), strict=True) if timed else ((), ())
        x, y = [point["positions"] for point in timed], [point["seconds"] for point in timed]
        times.append(Curve(label, x, y, low, high, colour, dash))
        counted = [point for point in timed if point["peak_memory_bytes"]]
        x, y = [point["positions"] for point in counted], [point["peak_memory_bytes"] / 2**20 for point in counted]
        memories.append(Curve(label, x, y, colour=colour, dash=dash))
    panels = [Panel("time", times, y_label="one pass (s)"), Panel("memory", memories, y_label="peak of one pass (MiB)")]
    title = "attention alone, forward and backward (slopes of time, memory)"
    return render_plot(panels, "T (positions)", "", kind, title=title)
