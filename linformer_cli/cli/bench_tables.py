"""Output shared by benchmark commands: tables of speed, lines about each measured row, and the machine."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linformer_cli.report import benchmarks
from linformer_cli.report.tables import Column, TableStyle, to_json
from linformer_cli.system.environment import describe_machine

from .output import info, print_json, print_records

if TYPE_CHECKING:
    from linformer_cli.bench.growth import Exponents
    from linformer_cli.bench.measure.ceilings import CeilingsReport
    from linformer_cli.bench.rounds import BenchReport
    from linformer_cli.bench.rows import AttentionRow, ModelRow, SamplingRow
    from linformer_cli.system.signals import StopRequest

Tables = Sequence[Sequence[Column]]


def show_report(
    report: "BenchReport[Any]", stop: "StopRequest", document: Mapping[str, object] | None, show: Callable[[], None]
) -> None:
    """Print `document` as JSON on stdout. Without a document, call `show` and print the machine on stderr.

    Raises `Interrupted` if the user stopped the benchmark before anything was measured.
    """
    if not report.rows:
        stop.raise_if_set("Stopped before anything was measured")
    if document is not None:
        print_json({**document, **vars(report)})
    else:
        show()
        show_machine(report.environment, report.ceilings)


def print_sampling(rows: "Sequence[SamplingRow]", style: TableStyle) -> None:
    """Print rows of sampling on stdout."""
    _print_speeds(rows, benchmarks.SAMPLING_TABLES, benchmarks.SAMPLING_FILE_COLUMNS, style)


def print_training(rows: "Sequence[ModelRow]", style: TableStyle) -> None:
    """Print rows of training on stdout."""
    _print_speeds(rows, benchmarks.TRAINING_TABLES, benchmarks.TRAINING_FILE_COLUMNS, style)


def _print_speeds(rows: "Sequence[ModelRow]", tables: Tables, columns: Sequence[Column], style: TableStyle) -> None:
    flat = [benchmarks.flatten_speed(row) for row in rows]
    if style == "csv":
        print_records(flat, columns, "csv")
        return
    if style == "md" and flat:
        print_records(flat, benchmarks.choose_columns(flat, columns, benchmarks.QUALITY), "md")
        return
    for preset in dict.fromkeys(row["preset"] for row in flat):
        if preset is not None:
            print(preset)
        of_preset = [row for row in flat if row["preset"] == preset]
        for table in tables:
            if shown := benchmarks.choose_columns(of_preset, table):
                print_records(of_preset, shown, "table")
                print()


def print_position_times(rows: "Sequence[SamplingRow]") -> None:
    """Print on stdout how the time per value depends on the number of positions."""
    # The name of a resized preset is the name of its network and the size of its images, separated by a comma.
    flat = [{**benchmarks.flatten_speed(row), "network": (row.preset or "").partition(",")[0]} for row in rows]

    def method(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[key] for key in ("network", "name", "engine", "batch"))

    methods = list(dict.fromkeys(map(method, flat)))
    flat.sort(key=lambda row: (methods.index(method(row)), row["positions"]))
    print_records(flat, benchmarks.choose_columns(flat, benchmarks.POSITION_COLUMNS), "table")
    print()


def print_growth(rows: "Sequence[AttentionRow]", exponents: "Sequence[Exponents]", style: TableStyle) -> None:
    """Print time and memory against T on stdout, then the exponents. In CSV, there is only the first table."""
    flat = benchmarks.flatten_growth(rows, exponents)
    if style == "csv":
        print_records(flat, benchmarks.SCALING_FILE_COLUMNS, "csv")
        return
    print_records(flat, benchmarks.SCALING_COLUMNS, style)
    for columns in (benchmarks.EXPONENT_COLUMNS, benchmarks.REACH_COLUMNS):
        print()
        print_records(exponents, columns, style)


def show_row(row: "AttentionRow | ModelRow") -> None:
    """Print a row on stderr, in one line."""
    info(row.describe())


def write_report(out: Path, name: str, report: object, page: str, figures: Mapping[str, bytes]) -> None:
    """Write NAME.json, NAME.md and the figures. After an interruption, each file is either complete or unchanged."""
    from linformer_cli.files import write_file

    write_file(out / f"{name}.json", (to_json(report) + "\n").encode())
    write_file(out / f"{name}.md", page.encode())
    for file, picture in figures.items():
        write_file(out / file, picture)


def show_machine(environment: Mapping[str, Any], ceilings: "CeilingsReport") -> None:
    """Print the machine and its highest rates on stderr."""
    info(describe_machine(environment))
    best: dict[str, float] = {}
    for product in ceilings.products:
        best[product.precision] = max(best.get(product.precision, 0.0), product.gigaflops)
    products = ", ".join(f"{speed:.0f} GFLOP/s in {kind}" for kind, speed in sorted(best.items(), reverse=True))
    copied = f"memory copies {ceilings.copy.gigabytes_per_second:.0f} GB/s"
    info(f"matrix products up to {products}; {copied}" if products else copied)
