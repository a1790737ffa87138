"""Running work that ends in a report, such as a benchmark, and showing the report."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linformer_cli.errors import LintxError
from linformer_cli.report.tables import Plots, Report, TableStyle
from linformer_cli.system.device import choose_device
from linformer_cli.system.environment import describe_machine
from linformer_cli.system.signals import StopRequest, catch_signals
from .output import info, print_json, print_tables, write_plot

if TYPE_CHECKING:
    from linformer_cli.bench.rounds import Bench


def choose_place(device: str, more: str = "") -> str:
    """Return the device for the value of --device, and print the choice on stderr, followed by `more`."""
    place = choose_device(device)
    info(f"device {place.value} ({place.reason}){more}")
    return place.value


def build_bench(place: str, stop: StopRequest) -> "Bench":
    """Return what the measurements on a device share. Rows are printed on stderr."""
    from linformer_cli.bench.measure.ceilings import Ceilings
    from linformer_cli.bench.rounds import Bench

    return Bench(Ceilings(place), show_row, stop.raise_if_set)


def show_row(row: Any) -> None:
    info(row.describe())


def run_and_show(
    style: TableStyle,
    json: bool,
    run: Callable[[StopRequest], Report],
    files: Mapping[str, Path | None] | None = None,
    document: Mapping[str, object] | None = None,
    pictures: Plots | None = None,
) -> None:
    """Run the work and show its report: on stdout as tables, or as JSON that begins with `document`.

    `files` has the file of each plot. `run` puts plots that need more than the report into `pictures`. Plots come last,
    so that figures are not lost. After Ctrl-C, the results so far are shown, and `Interrupted` is raised.
    """
    with catch_signals() as stop:
        report = run(stop)
    output = report.show(style)
    if not any(table.records for table in output.tables):
        stop.raise_if_set("Stopped before anything was measured")
    named, plots = files or {}, {**output.plots, **(pictures or {})}
    drawn = {key: path if key in plots else None for key, path in named.items()}
    if json:
        print_json({**(document or {}), **drawn, **vars(report)})
    else:
        if output.title and style != "csv":
            print(f"{output.title}\n")
        print_tables(style, *output.tables)
        for line in output.findings if style != "csv" else ():
            print(f"\n{line}")
    for line in (*output.remarks, describe_machine(report.environment)):
        info(line)
    for key, path in named.items():
        if key in plots:
            write_plot(path, plots[key])
        elif path is not None:
            info(f"did not write '{path}': nothing was measured that it would show")
    stop.raise_if_set(output.stopped)
    if output.failure is not None:
        raise LintxError(output.failure)
