"""`lintx compare`: every mechanism trained alike, in one table."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linformer_cli.errors import Interrupted, LintxError, UsageError
from linformer_cli.report.tables import Column
from linformer_cli.units import format_bits, format_bytes, format_count

from . import options
from .images import load_training_images
from .output import print_json, print_records, talk
from .progress import TrainingDisplay

if TYPE_CHECKING:
    from linformer_cli.comparison import Entry
    from linformer_cli.data.images import ImageSet

_TABLE_COLUMNS = (
    Column("name", "attention"),
    Column("bits", "bits/dim"),
    Column("parameters", "parameters", format=format_count),
    Column("state_bytes_per_image", "state", format=format_bytes),
    Column("training_images_per_second", "train img/s", format=format_count),
    Column("images_per_second", "draw img/s", format=format_count),
)
_MISSING = Column("missing", "missing")
_CSV_COLUMNS = tuple(
    Column(key, key)
    for key in (
        *("name", "attention", "attention_options", "images", "bits_per_dim", "standard_error", "validation_images"),
        *("parameters", "state_bytes_per_image", "device", "training_batch", "training_precision"),
        *("training_images_per_second", "training_images_per_second_quartiles", "batch"),
        *("images_per_second", "images_per_second_quartiles", "missing"),
    )
)


def compare(
    names: options.Variants = None,
    runs: Annotated[
        Path, typer.Option("--runs", help="The folder of the runs, one for each mechanism.", metavar="FOLDER")
    ] = Path("runs/comparison"),
    images: Annotated[int, typer.Option("--images", min=1, help="Training images that each sees.")] = 16_000,
    data: Annotated[
        str | None,
        typer.Option("--data", help="As for lintx train.", metavar="NAME", show_default=False),
    ] = None,
    data_dir: options.DataDir = None,
    image_size: options.ImageSize = None,
    preset: Annotated[
        str | None, typer.Option("--preset", help="The network; default mnist-small.", show_default=False)
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="TOML with [model], [data], [train] for all of them.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    evaluate_images: Annotated[
        int | None,
        typer.Option(
            "--evaluate-images",
            min=1,
            help="Validation images, the first of the split; default 2000.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Images drawn at once when sampling is timed.")] = 64,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Of both timings; the median counts.")] = 3,
    train: Annotated[bool, typer.Option("--train/--no-train", help="Or only show what is there.")] = True,
    retime: Annotated[bool, typer.Option("--retime", help="Throw kept times away and take them anew.")] = False,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Of weights and order; default 0.", show_default=False)
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", help="auto (default), cpu, cuda, cuda:INDEX or mps.", metavar="DEVICE", show_default=False
        ),
    ] = None,
    precision: Annotated[
        options.PrecisionName | None,
        typer.Option(
            "--precision", help="Of training and its timing, auto by default; drawing in fp32.", show_default=False
        ),
    ] = None,
    style: options.Style = options.TableFormat.TABLE,
    json: options.Json = False,
) -> None:
    """Train every attention alike and compare.

    All have the same network but for the attention, the same images in the same order, and the same settings. Each is a
    run in a folder of its own: whoever runs the command again goes on where it was, and what is finished is not done
    again. Then a table: validation bits/dim at the end with the standard error, parameters, bytes of state, and
    images/s of whole training steps and of drawing, medians over --repeats in which the finished mechanisms take turns.
    Times are kept beside the runs; --retime takes them anew, on a quiet machine say. A grid of samples of each lies
    beside its run. Ctrl-C saves first; the table then says what is missing.

    Examples:

    - `lintx compare --data mnist --images 16000 --runs runs/comparison`
    - `lintx compare --attention softmax,linear,linear:feature_map=relu --images 4000 --runs runs/few`
    - `lintx compare --runs runs/comparison --no-train --format md`
    - `lintx compare --runs runs/comparison --retime --repeats 5`
    """
    if retime and not train:
        raise UsageError("--no-train only shows what is there; leave it or --retime out")

    from linformer_cli.comparison import choose_training, describe_entry, forget_speeds, plan_entries
    from linformer_cli.system.device import choose_device, choose_precision
    from linformer_cli.system.environment import describe_environment

    given = {"evaluate_images": evaluate_images, "seed": seed, "device": device}
    given["precision"] = precision and precision.value
    chosen = choose_training(config, {key: value for key, value in given.items() if value is not None}, talk)
    place = choose_device(chosen.device)
    kind = choose_precision(chosen.precision, place.value, "training")
    talk(f"device {place.value} ({place.reason}), precision {kind.value} ({kind.reason})")
    given_data = {"name": data, "data_dir": data_dir, "image_size": image_size}
    entries, training, validation = plan_entries(
        options.choose_variants(names, baselines=True),
        runs,
        images,
        config,
        preset,
        {key: value for key, value in given_data.items() if value is not None},
        chosen.model_dump(include={"evaluate_images", "seed", "device"}) | {"precision": kind.value},
        lambda settings: load_training_images(settings.data_config),
    )
    failures: dict[str, str] = {}
    for entry in entries if retime else []:
        forget_speeds(entry)
    stopped = _work(entries, training, validation, place.value, kind.value, batch, repeats, failures) if train else None
    rows = [
        describe_entry(entry, batch, place.value, kind.value, failures.get(entry.variant.label)) for entry in entries
    ]
    if json:
        first = entries[0].config
        settings = {"images": images, "batch": batch, "repeats": repeats, "data": first.data, "train": first.train}
        print_json({"rows": rows, "settings": settings, "environment": describe_environment()})
    elif style.value == "csv":
        print_records(rows, _CSV_COLUMNS, "csv")
    else:
        columns = (*_TABLE_COLUMNS, _MISSING) if any(row["missing"] for row in rows) else _TABLE_COLUMNS
        print_records([{**row, "bits": _show_bits(row)} for row in rows], columns, style.value)
    if stopped is not None:
        raise stopped
    if failures:
        raise LintxError(f"{len(failures)} of {len(entries)} failed: {', '.join(failures)}; the table says why")


def _work(
    entries: "list[Entry]",
    training: "ImageSet",
    validation: "ImageSet",
    device: str,
    precision: str,
    batch: int,
    repeats: int,
    failures: dict[str, str],
) -> Interrupted | None:
    """Everything that is still to be done, each mechanism's own failures aside; returns what a signal ended it with."""
    from linformer_cli.comparison import draw_grid, time_sampling_once, time_training_once, train_entry
    from linformer_cli.system.signals import catch_signals

    with catch_signals() as stop:
        check = stop.raise_if_set
        try:
            for entry in entries:
                if entry.finished is None:
                    talk(f"{entry.variant.label}: training in {entry.folder.path}")
                    with _noting(entry, failures), TrainingDisplay() as display:
                        train_entry(entry, training, validation, device, precision, display, stop)
            done = [entry for entry in entries if entry.finished is not None]
            for entry in done:
                check()
                with _noting(entry, failures):
                    if draw_grid(entry, device, check):
                        talk(f"wrote {entry.grid_file}")
            for _ in range(repeats):
                for entry in done:
                    check()
                    if entry.variant.label not in failures:
                        with _noting(entry, failures):
                            time_training_once(entry, training, validation, repeats, device, precision)
                            time_sampling_once(entry, batch, repeats, device, check)
        except Interrupted as signal:
            return Interrupted("Stopped; everything is saved, the same command goes on", signal.exit_code - 128)
    return None


@contextlib.contextmanager
def _noting(entry: "Entry", failures: dict[str, str]) -> Iterator[None]:
    """A mechanism that fails is no reason to leave out the others."""
    from linformer_cli.system.memory import is_out_of_memory

    try:
        yield
    except Interrupted:
        raise
    except Exception as error:
        if not isinstance(error, LintxError) and not is_out_of_memory(error):
            raise
        failures[entry.variant.label] = str(error) if isinstance(error, LintxError) else "out of memory"
        talk(f"{entry.variant.label}: {failures[entry.variant.label]}")


def _show_bits(row: dict[str, Any]) -> str | None:
    bits = row["bits_per_dim"]
    return None if bits is None else format_bits(bits, row["standard_error"], digits=3)
