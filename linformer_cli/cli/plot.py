"""`lintx plot`: the curves and the samples of training runs."""

from pathlib import Path
from typing import Annotated

import typer

from linformer_cli.errors import UsageError

from . import options
from .output import print_json, talk

DEFAULT_PLOT = Path("plot.png")


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The curves: .png or .svg. Default plot.png, unless --samples or --json is given.",
            show_default=False,
            metavar="FILE",
        ),
    ] = None,
    samples: Annotated[
        Path | None,
        typer.Option(
            "--samples",
            help="The grids of samples over training, one strip a run: .png.",
            show_default=False,
            metavar="FILE",
        ),
    ] = None,
    grids: Annotated[
        int | None,
        typer.Option(
            "--grids",
            min=1,
            help="At most so many grids a strip, evenly chosen over training; default 8.",
            show_default=False,
        ),
    ] = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Draw how runs went, in one picture.

    Bits/dim of training and of validation, with its standard error as a band, and the learning rate: over training
    images seen, and over time. Each run has a colour. A run may still be training.

    With --samples, the grids that `lintx train` draws every --sample-every steps, beside each other: each run is a
    strip. With --json, the series that the curves are made of.

    Examples:

    - `lintx plot runs/first -o first.png`
    - `lintx plot runs/linear runs/softmax -o both.svg --samples samples.png`
    - `lintx plot runs/first --json`
    """
    from linformer_cli.files import write_file
    from linformer_cli.metrics import load_runs
    from linformer_cli.report.grids import encode_png
    from linformer_cli.report.plots import parse_plot_format
    from linformer_cli.report.runs import render_runs, render_strips

    if grids is not None and samples is None:
        raise UsageError("--grids is for the strips of --samples FILE")
    if out is None and samples is None and not json:
        out = DEFAULT_PLOT
    kind = None if out is None else parse_plot_format(out)
    options.require_output("--samples", samples, ".png")
    series = load_runs(runs) if out is not None or json else []
    if out is not None and kind is not None:
        write_file(out, render_runs(series, kind))
        talk(f"wrote {out}")
    if samples is not None:
        write_file(samples, encode_png(render_strips(runs, grids or 8), {"runs": [str(run) for run in runs]}))
        talk(f"wrote {samples}")
    if json:
        print_json({"rows": series, "plot": out, "samples": samples})
