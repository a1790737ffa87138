"""`lintx bench sample`: images per second, measured so that the figure can be trusted."""

from typing import Annotated, Any

import typer

from linformer_cli.report.tables import Column
from linformer_cli.report.terminal import format_bytes

from . import options
from .output import print_json, print_records, talk
from .session import open_session

Batches = Annotated[str, typer.Option("--batch", help="Batch sizes, separated by commas.", metavar="LIST")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Repeats after one warm-up; the median counts.")]
Rerun = Annotated[
    bool, typer.Option("--rerun/--no-rerun", help="Also softmax without a cache, extrapolated from a few positions.")
]
Style = Annotated[options.TableFormat, typer.Option("--format", help="How to print.")]

_SHARED_COLUMNS = (Column("attention", "attention"), Column("engine", "engine"), Column("batch", "batch"))
_TABLE_COLUMNS = (
    *_SHARED_COLUMNS,
    Column("images_per_second", "images/s", format=".4g"),
    Column("quartiles", "quartiles"),
    Column("extrapolated", "extrapolated", format=".3g"),
    Column("state_bytes_per_image", "state/image", format=format_bytes),
)
_FILE_COLUMNS = (
    *_SHARED_COLUMNS,
    Column("precision", "precision"),
    Column("device", "device"),
    Column("images_per_second", "images/s", format=".4g"),
    Column("images_per_second_quartile_1", "quartile 1", format=".4g"),
    Column("images_per_second_quartile_3", "quartile 3", format=".4g"),
    Column("images_per_second_extrapolated", "extrapolated images/s", format=".3g"),
    Column("state_bytes_per_image", "state bytes an image", format=","),
)


def sample(
    checkpoint: options.OnlyCheckpointOption = None,
    batch: Batches = "1,64",
    repeats: Repeats = 3,
    rerun: Rerun = True,
    device: options.Device = "auto",
    precision: options.SamplingPrecision = options.PrecisionName.AUTO,
    style: Style = options.TableFormat.TABLE,
    json: options.Json = False,
) -> None:
    """Measure images/s of sampling against softmax.

    Whole images are drawn step by step by this model, and by softmax of the same size with a cache. One warm-up, then
    interleaved repeats; the median and quartiles of images per second, the bytes of state, and the environment. Softmax
    re-run at every value is timed at four positions and stands under `extrapolated`. Nothing is timed whose parallel
    and step form disagree. The softmax twin has random weights, on which time does not depend.

    Examples:

    - `lintx bench sample`
    - `lintx bench sample --checkpoint runs/first --batch 1,64 --json`
    - `lintx bench sample --batch 256 --format md --no-rerun`
    """
    batches = options.parse_sizes(batch, "--batch", "1,64")
    session = open_session(checkpoint, device, precision.value)

    from linformer_cli.bench.run import run_sampling_bench

    report = run_sampling_bench(session.model, batches, repeats, session.precision, rerun)
    if json:
        print_json({"checkpoint": str(session.checkpoint.path), **vars(report)})
        return
    columns = _TABLE_COLUMNS if style is options.TableFormat.TABLE else _FILE_COLUMNS
    print_records([_flatten(row) for row in report.rows], columns, style.value)
    machine = report.environment
    talk(f"{machine['processor']}, {machine['threads']} threads, torch {machine['versions']['torch']}")


def _flatten(row: dict[str, Any]) -> dict[str, Any]:
    """A record without nested parts, for a table; what was extrapolated keeps its own column."""
    low, high = row.get("images_per_second_quartiles", (None, None))
    extrapolated = row.get("extrapolated", {}).get("images_per_second")
    return {
        **row,
        "quartiles": None if low is None else f"{low:.3g}-{high:.3g}",
        "images_per_second_quartile_1": low,
        "images_per_second_quartile_3": high,
        "extrapolated": extrapolated,
        "images_per_second_extrapolated": extrapolated,
    }
