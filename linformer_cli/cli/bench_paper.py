"""`lintx bench paper`: the tables and figures of Katharopoulos 2020 on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING

from linformer_cli.files import require_writable
from linformer_cli.report.tables import TableStyle

from . import options
from .config_options import option, with_fields
from .output import info, print_json, print_records

if TYPE_CHECKING:
    from linformer_cli.bench.paper_report import PaperReport


@with_fields
def paper(
    budget: str = option("10m", "Time for the whole benchmark."),
    out: Path = option(Path("bench-paper"), "Folder for paper.json, paper.md and the figures."),
    runs: options.Runs = None,
    device: options.Device = "auto",
    style: options.Style = "table",
    json: options.Json = False,
) -> None:
    """Repeat the figures of Katharopoulos 2020.

    Measures softmax (re-run and with a cache), LSH with 1 and 4 rounds, and linear attention in the paper's two
    networks: speed of sampling and training, time and memory of attention against T, and the copy task. The output also
    shows the published figures and this machine's highest rates. The budget determines batch sizes, repeats and
    lengths; the output lists all that is smaller than in the paper. Models of --runs with other networks are also
    sampled. JSON, tables and figures are written about every two minutes, at the end, and after Ctrl-C.

    Examples:

    - `lintx bench paper --budget 2m --out quick`
    - `lintx bench paper --budget 1h --runs runs/comparison --json`
    """
    seconds = options.parse_duration(budget)
    require_writable(out / "paper.json")

    from linformer_cli.bench.models import read_trained_runs
    from linformer_cli.bench.paper import PaperBench, PaperSettings
    from linformer_cli.bench.rows import AttentionRow, ModelRow
    from linformer_cli.system.signals import catch_signals

    from .bench_output import choose_place

    def show_row(part: str, row: AttentionRow | ModelRow, number: int) -> None:
        info(f"{part if number == 1 else f'{part}, round {number}'}: {row.describe()}")

    trained = read_trained_runs(runs or [])
    settings = PaperSettings(seconds, choose_place(device, f", about {budget}"), trained)
    with catch_signals() as stop:
        report = PaperBench(settings, show_row, lambda report: report.write(out, "paper"), stop).run()
    if report.has_figures:
        info(f"wrote {out}")
    if json:
        print_json(report)
    else:
        _print(report, style)
    stop.raise_if_set("Stopped; the results so far are kept")


def _print(report: "PaperReport", style: TableStyle) -> None:
    from linformer_cli.bench.columns import SAMPLING, TRAINING, choose_columns
    from linformer_cli.bench.copy import COPY_COLUMNS

    from .bench_output import print_growth, print_speeds, show_machine

    print_speeds(report.sampling, SAMPLING, style)
    if style == "csv":  # CSV holds one table; the other tables are in paper.json
        return
    print_speeds(report.training, TRAINING, style)
    if report.scaling:
        print()
        print_growth(report.scaling, report.exponents, style)
    if report.copy is not None and report.copy.rows:
        print()
        print_records(report.copy.rows, choose_columns(report.copy.rows, COPY_COLUMNS), style)
    for line in report.reduced:
        info(f"reduced: {line}")
    show_machine(report.environment, report.ceilings)
