"""`lintx bench paper`: the tables and figures of Katharopoulos 2020 on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from linformer_cli.files import require_writable
from linformer_cli.system.signals import StopRequest
from . import options
from .config_options import duration, option, with_fields
from .output import info
from .reports import choose_place, run_and_show

if TYPE_CHECKING:
    from linformer_cli.bench.paper_report import PaperReport


@with_fields
def paper(
    budget: float = duration("10m", "Time for the whole benchmark."),
    out: Path = option(Path("bench-paper"), "Folder for paper.json, paper.md and the figures."),
    runs: options.Runs = None,
    device: options.Device = "auto",
    style: options.Style = "table",
    json: options.Json = False,
) -> None:
    """Repeat the figures of Katharopoulos 2020.

    Examples:

    - `lintx bench paper --budget 2m --out quick`
    - `lintx bench paper --budget 1h --runs runs/comparison --json`

    Measures softmax (re-run and with a cache), LSH with 1 and 4 rounds, and linear attention in the paper's two
    networks: sampling, training, time and memory against T, and the copy task, beside the published figures. The output
    lists all that is smaller than in the paper. Results are written every two minutes, at the end, and after Ctrl-C.
    """
    require_writable(out / "paper.json")

    from linformer_cli.bench.models import read_trained_runs
    from linformer_cli.bench.paper import PaperBench, PaperSettings
    from linformer_cli.units import format_duration

    def show_row(part: str, row: Any, number: int) -> None:
        info(f"{part if number == 1 else f'{part}, round {number}'}: {row.describe()}")

    trained = read_trained_runs(runs or [])
    settings = PaperSettings(budget, choose_place(device, f", about {format_duration(budget)}"), trained)

    def run(stop: StopRequest) -> "PaperReport":
        report = PaperBench(settings, show_row, lambda report: report.write(out, "paper"), stop).run()
        if report.has_figures:
            info(f"wrote {out}")
        return report

    run_and_show(style, json, run)
