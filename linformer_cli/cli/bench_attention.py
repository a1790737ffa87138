"""`lintx bench attention`: how time and memory of training grow with the number of positions."""

from typing import Annotated, Any

import typer

from linformer_cli.report.benchmarks import SCALING_COLUMNS, flatten_scaling
from linformer_cli.report.tables import Column
from linformer_cli.report.terminal import format_bytes, format_milliseconds

from . import options
from .output import print_json, print_records, talk

_EXPONENT_COLUMNS = (
    Column("time_exponent_last_two", "time, last two", format=".2f"),
    Column("memory_exponent_last_two", "memory, last two", format=".2f"),
    Column("time_exponent_all", "time, all", format=".2f"),
    Column("memory_exponent_all", "memory, all", format=".2f"),
)
_FILE_COLUMNS = (
    *(Column(key, key) for key in ("name", "attention", "device", "heads", "head_width", "positions", "repeats")),
    *(Column(key, key) for key in ("seconds", "seconds_quartile_1", "seconds_quartile_3", "peak_memory_bytes")),
    *_EXPONENT_COLUMNS,
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
    style: Annotated[options.TableFormat, typer.Option("--format", help="How to print.")] = options.TableFormat.TABLE,
    json: options.Json = False,
) -> None:
    """Measure how time and memory grow with T.

    One forward and backward pass of each mechanism alone, for one sequence in float32: the median and quartiles of its
    time over interleaved repeats, the peak of its memory (on a CPU the growth of a fresh process), and the exponents p
    of time and memory as T to the power p, between the last two lengths and fitted over all. What would not fit into
    memory or --limit is left out, and its row says why. Nothing is timed whose parallel and step form disagree.

    Examples:

    - `lintx bench attention`
    - `lintx bench attention --attention linear,softmax --positions 1024,4096 --format md`
    - `lintx bench attention --attention linear,linear:chunk=256 --limit 10s --json`
    """
    lengths = options.parse_sizes(positions, "--positions", "1024,4096")
    seconds = options.parse_duration(limit)

    from linformer_cli.bench.scaling import run_scaling_bench
    from linformer_cli.runtime import choose_device

    place = choose_device(device)
    talk(f"device {place.value} ({place.reason})")
    report = run_scaling_bench(
        options.choose_variants(names), lengths, repeats, seconds, heads, head_width, place.value, _report
    )
    if json:
        print_json(vars(report))
        return
    exponents = {row["name"]: row for row in report.exponents}
    rows = [flatten_scaling({**row, **exponents[row["name"]]}) for row in report.rows]
    tables = [(rows, _FILE_COLUMNS)]
    if style is not options.TableFormat.CSV:  # which holds one table
        tables = [(rows, SCALING_COLUMNS), (report.exponents, (Column("name", "exponents of"), *_EXPONENT_COLUMNS))]
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
