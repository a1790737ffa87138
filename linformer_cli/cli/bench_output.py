"""What the commands of `lintx bench` share: running and showing a benchmark, its tables, and the machine."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from linformer_cli.bench import columns as shown
from linformer_cli.bench.growth import Exponents
from linformer_cli.bench.measure.ceilings import Ceilings, CeilingsReport
from linformer_cli.bench.rounds import Bench, BenchReport
from linformer_cli.bench.rows import AttentionRow, ModelRow
from linformer_cli.report.plots import PlotFormat
from linformer_cli.report.tables import Column, TableStyle
from linformer_cli.system.device import choose_device
from linformer_cli.system.environment import describe_machine
from linformer_cli.system.signals import catch_signals

from .options import STOPPED
from .output import info, print_json, print_records, print_tables, write_plot

Report = TypeVar("Report", bound=BenchReport[Any])
# The file of a plot and the function that draws it, by the plot's key in a JSON document.
Plots = dict[str, tuple[Path | None, Callable[[PlotFormat], bytes]]]


def choose_place(device: str, more: str = "") -> str:
    """Return the device for the value of --device, and print the choice on stderr, followed by `more`."""
    place = choose_device(device)
    info(f"device {place.value} ({place.reason}){more}")
    return place.value


def run_and_show(
    place: str,
    run: Callable[[Bench], Report],
    show: Callable[[Report], None],
    list_plots: Callable[[Report], Plots],
    document: Mapping[str, object] | None,
) -> None:
    """Run a benchmark on the device `place`, which prints its rows and stops after Ctrl-C, and show the report.

    The report completes `document`, which is printed as JSON on stdout. Without a document, `show` prints tables on
    stdout, and the machine is printed on stderr. Plots come last: if one cannot be written, the figures are not lost.
    After Ctrl-C, the rows so far are shown, and `Interrupted` is raised.
    """
    with catch_signals() as stop:
        report = run(Bench(Ceilings(place), show_row, stop.raise_if_set))
    if not report.rows:
        stop.raise_if_set("Stopped before anything was measured")
    plots = list_plots(report)
    if document is None:
        show(report)
        show_machine(report.environment, report.ceilings)
    else:
        print_json({**document, **{key: path for key, (path, _) in plots.items()}, **vars(report)})
    for path, render in plots.values():
        write_plot(path, render)
    stop.raise_if_set(STOPPED)


def print_speeds(rows: Sequence[ModelRow], columns: shown.SpeedColumns, style: TableStyle) -> None:
    """Print rows of sampling or training on stdout."""
    if style == "csv" or (style == "md" and rows):
        kept = columns.file if style == "csv" else shown.choose_columns(rows, columns.file, shown.QUALITY)
        print_records(rows, kept, style)
        return
    for preset in dict.fromkeys(row.preset for row in rows):
        if preset is not None:
            print(preset)
        for table in columns.tables:
            _print_table([row for row in rows if row.preset == preset], table)


def print_position_times(rows: Sequence[ModelRow]) -> None:
    """Print on stdout how the time per value depends on the number of positions."""

    def method(row: ModelRow) -> tuple[object, ...]:
        return row.network, row.name, row.engine, row.batch

    methods = list(dict.fromkeys(map(method, rows)))
    _print_table(sorted(rows, key=lambda row: (methods.index(method(row)), row.positions)), shown.POSITION_COLUMNS)


def _print_table(rows: Sequence[ModelRow], columns: Sequence[Column]) -> None:
    if chosen := shown.choose_columns(rows, columns):
        print_records(rows, chosen, "table")
        print()


def print_growth(rows: Sequence[AttentionRow], exponents: Sequence[Exponents], style: TableStyle) -> None:
    """Print time and memory against T on stdout, then the exponents. In CSV, all of it is one table."""
    if style == "csv":
        print_records(shown.join_exponents(rows, exponents), shown.SCALING_FILE_COLUMNS, "csv")
        return
    print_tables(
        style, (rows, shown.SCALING_COLUMNS), (exponents, shown.EXPONENT_COLUMNS), (exponents, shown.REACH_COLUMNS)
    )


def show_row(row: AttentionRow | ModelRow) -> None:
    """Print a row on stderr, in one line."""
    info(row.describe())


def show_machine(environment: Mapping[str, Any], ceilings: CeilingsReport) -> None:
    """Print the machine and its highest rates on stderr."""
    info(describe_machine(environment))
    best: dict[str, float] = {}
    for product in ceilings.products:
        best[product.precision] = max(best.get(product.precision, 0.0), product.gigaflops)
    products = ", ".join(f"{speed:.0f} GFLOP/s in {kind}" for kind, speed in sorted(best.items(), reverse=True))
    copied = f"memory copies {ceilings.copy.gigabytes_per_second:.0f} GB/s"
    info(f"matrix products up to {products}; {copied}" if products else copied)
