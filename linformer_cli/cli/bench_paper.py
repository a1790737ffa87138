"""`lintx bench paper`: the tables and figures of the 2020 paper on this machine."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linformer_cli.errors import Interrupted
from linformer_cli.files import require_writable
from linformer_cli.report import benchmarks
from linformer_cli.report.tables import Column, TableStyle
from linformer_cli.units import format_milliseconds

from . import options
from .bench_sample import print_speeds
from .output import print_json, print_records, talk

if TYPE_CHECKING:
    from linformer_cli.bench.paper import PaperReport


def paper(
    budget: Annotated[str, typer.Option("--budget", help="The time that all of it should take.")] = "10m",
    out: Annotated[Path, typer.Option("--out", help="Folder for paper.json, paper.md and the figures.")] = Path(
        "bench-paper"
    ),
    runs: options.Runs = None,
    device: options.Device = "auto",
    style: options.Style = options.TableFormat.TABLE,
    json: options.Json = False,
) -> None:
    """Measure the tables and figures of the 2020 paper.

    Its methods (softmax re-run and with a cache, hashing with 1 and 4 rounds, linear) in its two networks: images/s of
    sampling against the batch size and seconds of one image, images/s of training, time and memory of attention
    against T; with its published figures beside ours, and what this machine can do at best. The budget decides batch
    sizes, repeats and lengths; where that is less than the paper's, it says so. bits/dim come from --runs alone, whose
    models are timed too where they are of other networks.

    JSON, tables and figures are written every two minutes or so, at the end, and at Ctrl-C.

    Examples:

    - `lintx bench paper --budget 10m`
    - `lintx bench paper --budget 2m --out quick`
    - `lintx bench paper --budget 1h --runs runs/comparison --json`
    """
    seconds = options.parse_duration(budget)
    require_writable(out / "paper.json")

    from linformer_cli.bench.paper import PaperBench
    from linformer_cli.bench.trained import read_trained_runs
    from linformer_cli.system.device import choose_device
    from linformer_cli.system.signals import catch_signals

    trained = read_trained_runs(runs or [])
    place = choose_device(device)
    talk(f"device {place.value} ({place.reason}), about {budget}")
    with catch_signals() as stop:
        bench = PaperBench(
            seconds,
            place.value,
            trained,
            report=_report,
            save=lambda report: _write(out, report),
            stop=stop,
        )
        with contextlib.suppress(Interrupted):  # what there is by then is shown first
            bench.run()
    talk(f"wrote {out}")
    if json:
        print_json(bench.result)
    else:
        _print(bench.result, style)
    stop.raise_if_set("Stopped; what was measured is kept")


def _print(result: "PaperReport", style: options.TableFormat) -> None:
    print_speeds(result.sampling, "sampling", style)
    if style is options.TableFormat.CSV:  # which holds one table; the others are in paper.json
        return
    print_speeds(result.training, "training", style)
    scaling = [benchmarks.flatten_scaling(row) for row in result.scaling]
    parts: list[tuple[list[dict[str, Any]], Sequence[Column]]] = [(scaling, benchmarks.SCALING_COLUMNS)]
    parts += [(result.exponents, columns) for columns in (benchmarks.EXPONENT_COLUMNS, benchmarks.REACH_COLUMNS)]
    if result.copy is not None:
        parts.append((result.copy["rows"], benchmarks.COPY_COLUMNS))
    shape: TableStyle = "md" if style is options.TableFormat.MD else "table"
    for rows, columns in parts:
        if not rows:
            continue
        print()
        print_records(rows, columns, shape)
    for line in result.reduced:
        talk(f"less: {line}")
    options.talk_about(result.environment, result.ceilings)


def _report(part: str, row: dict[str, Any], number: int) -> None:
    part = part if number == 1 else f"{part}, round {number}"
    if "seconds_per_sequence" not in row:
        talk(f"{part}: {benchmarks.describe_speed(row)}")
        return
    found = f"left out, {row['left_out']}" if row["left_out"] else format_milliseconds(row["seconds_per_sequence"])
    talk(f"{part}: {row['name']}, T = {row['positions']:,}: {found}")


def _write(out: Path, report: "PaperReport") -> None:
    """All files of the folder, each whole or as it was."""
    import json

    from linformer_cli.files import write_file
    from linformer_cli.report.paper_page import render_figures, render_page
    from linformer_cli.report.tables import to_json

    text = to_json(report)
    plain = json.loads(text)
    write_file(out / "paper.json", (text + "\n").encode())
    write_file(out / "paper.md", render_page(plain).encode())
    for name, data in render_figures(plain).items():
        write_file(out / name, data)
