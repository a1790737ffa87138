"""`lintx bench attention`: how time and memory of training grow with the number of positions."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linformer_cli.report import benchmarks
from linformer_cli.report.tables import Column
from linformer_cli.units import format_bytes, format_milliseconds

from . import options
from .output import print_json, print_records, talk, write_plot

if TYPE_CHECKING:
    from linformer_cli.bench.scaling import ScalingReport

SCALED = "scaled"


def attention(
    names: options.Variants = None,
    positions: Annotated[
        str, typer.Option("--positions", help="Lengths T, separated by commas.", metavar="LIST")
    ] = "512,1024,2048,4096,8192,16384,32768,65536",
    batch: Annotated[
        str,
        typer.Option(
            "--batch", help="Sequences at once: a number, or scaled: 65,536 / T, at least 1.", metavar="NUMBER|scaled"
        ),
    ] = SCALED,
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
    style: options.Style = options.TableFormat.TABLE,
    json: options.Json = False,
) -> None:
    """Measure how time and memory grow with T.

    Forward and backward passes of each mechanism alone in float32, with the batch scaled inversely with T, as in the
    figure of Katharopoulos 2020. Time and memory are those of one sequence: the median and quartiles of the time over
    interleaved repeats, the peak of the memory (on a CPU the growth of a fresh process), and the exponents p of both as
    T to the power p, between the last two lengths and fitted over all. `copying` is the share of the memory that can be
    copied in that time which inputs, outputs and gradients need at the least. What would not fit into memory or --limit
    is left out, and its row says why. Nothing is timed whose parallel and step form disagree.

    A second table has the longest T of --positions that fits, and, where softmax is among the mechanisms, the T from
    which on each is faster than it, interpolated in log T and log time between the lengths that were measured. Ctrl-C
    shows what was measured.

    Examples:

    - `lintx bench attention`
    - `lintx bench attention --attention linear,softmax --positions 1024,4096 --batch 1 --format md`
    - `lintx bench attention --attention linear,linear:chunk=256 --limit 10s --json`
    - `lintx bench attention --attention linear,softmax,lsh --plot scaling.png`
    """
    options.require_plots(plot)
    lengths = options.parse_sizes(positions, "--positions", "1024,4096")
    size = None if batch == SCALED else options.parse_size(batch, "--batch", f"16, or {SCALED}")
    seconds = options.parse_duration(limit)

    from linformer_cli.bench.ceilings import Ceilings
    from linformer_cli.bench.scaling import run_scaling_bench
    from linformer_cli.system.device import choose_device
    from linformer_cli.system.signals import catch_signals

    place = choose_device(device)
    talk(f"device {place.value} ({place.reason})")
    with catch_signals() as stop:
        report = run_scaling_bench(
            options.choose_variants(names),
            lengths,
            repeats,
            seconds,
            heads,
            head_width,
            place.value,
            _report,
            stop.raise_if_set,
            size,
            Ceilings(place.value),
        )
    if not report.rows:
        stop.raise_if_set("Stopped before anything was measured")
    if json:
        print_json({**vars(report), "plot": plot})
    else:
        _print(report, style)
    write_plot(plot, lambda kind: benchmarks.render_growth(report.rows, report.exponents, kind))
    stop.raise_if_set(options.STOPPED)


def _print(report: "ScalingReport", style: options.TableFormat) -> None:
    exponents = {row["name"]: row for row in report.exponents}
    rows = [benchmarks.flatten_scaling({**row, **exponents[row["name"]]}) for row in report.rows]
    tables: list[tuple[Sequence[dict[str, Any]], Sequence[Column]]] = [(rows, benchmarks.SCALING_FILE_COLUMNS)]
    if style is not options.TableFormat.CSV:  # which holds one table
        tables = [(rows, benchmarks.SCALING_COLUMNS)]
        tables += [(report.exponents, columns) for columns in (benchmarks.EXPONENT_COLUMNS, benchmarks.REACH_COLUMNS)]
    for number, (records, columns) in enumerate(tables):
        if number:
            print()
        print_records(records, columns, style.value)
    options.talk_about(report.environment, report.ceilings)


def _report(row: dict[str, Any]) -> None:
    """A long job says what it has."""
    found = f"left out, {row['left_out']}" if row["left_out"] else format_milliseconds(row["seconds_per_sequence"])
    memory = row["memory_bytes_per_sequence"]
    talk(
        f"{row['name']}, T = {row['positions']:,}, batch {row['batch']}: {found}"
        + (f", {format_bytes(memory)}" if memory else "")
    )
