"""`lintx complete`: finish the user's own pictures."""

import math
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linformer_cli.errors import DataError, LintxError, UsageError

from . import options
from .output import complain, print_json, say_halved, talk
from .session import Session, open_session

if TYPE_CHECKING:
    from linformer_cli.data.pictures import Picture
    from linformer_cli.sampling.choose import Filters
    from linformer_cli.sampling.complete import Completion


class FitName(StrEnum):
    CROP = "crop"
    PAD = "pad"
    STRETCH = "stretch"


def complete(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Pictures of any size and format.")],
    checkpoint: options.OnlyCheckpointOption = None,
    keep: Annotated[
        str,
        typer.Option(
            "--keep",
            help="What is given: top:0.5 (fraction), top:50%, top:14rows (or top:14), top:392px.",
            metavar="PART",
        ),
    ] = "top:0.5",
    class_name: Annotated[
        str | None,
        typer.Option("--class", help="What the pictures show, for a model with classes.", show_default=False),
    ] = None,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="Completions of each picture.")] = 3,
    out: Annotated[Path, typer.Option("-o", "--out", help="One PNG for all pictures.")] = Path("completed.png"),
    fit: Annotated[FitName, typer.Option("--fit", help="How another format becomes the model's.")] = FitName.CROP,
    invert: Annotated[bool, typer.Option("--invert", help="Swap dark and light first.")] = False,
    scale: Annotated[
        int | None, typer.Option("--scale", min=1, max=64, help="Enlarges the pixels.", show_default=False)
    ] = None,
    gif: Annotated[
        Path | None,
        typer.Option(
            "--gif", help="Also an animation of the pictures being drawn.", show_default=False, metavar="FILE"
        ),
    ] = None,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    precision: options.SamplingPrecision = options.PrecisionName.AUTO,
    engine: options.Engine = "auto",
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Complete your own pictures.

    The top of each picture is kept and the model draws the rest, several times. The result shows a row per picture:
    given | completions | original. The bits/dim of the kept part, of each completion and of the original's rest tell
    how likely the model finds them. Pictures are turned as their EXIF says, transparency is flattened, and they are
    resized to the model's size. The given part is read in parallel.

    Examples:

    - `lintx complete digit.png --keep top:0.5 -n 3 -o completed.png`
    - `lintx complete scans/*.jpg --invert --fit pad --keep top:10rows`
    """
    options.require_output("-o", out, ".png")
    options.require_output("--gif", gif, ".gif")
    outputs = {os.path.realpath(file) for file in (out, gif) if file is not None}
    if given := [path for path in images if os.path.realpath(path) in outputs]:
        raise UsageError(f"'{given[0]}' is one of the pictures and would be replaced; name another file to write")
    session = open_session(checkpoint, device, precision.value)

    from linformer_cli.files import write_file
    from linformer_cli.report.animation import encode_gif, frame_rows
    from linformer_cli.report.grids import encode_png, stack_rows
    from linformer_cli.sampling.choose import Filters
    from linformer_cli.sampling.complete import parse_keep

    filters = Filters(temperature, top_k, top_p)
    known = parse_keep(keep, session.model.config.image)
    label = _choose_class(session, class_name)
    chosen = session.choose_engine(engine)
    asked = {"seed": seed, "batch": count, "keep": keep, "invert": invert, **vars(filters), "class": label}
    settings = {**session.record, "engine": chosen, **asked}
    done: list[tuple[Picture, Completion]] = []
    results, failures = [], []
    stopped: BaseException | None = None
    for path in images:
        try:
            picture, completion = _complete_one(session, path, known, count, seed, filters, fit, invert, chosen, label)
        except DataError as error:
            if len(images) == 1:
                raise
            complain(f"Error: {error}")
            failures.append({"image": path, "error": str(error)})
            continue
        except (KeyboardInterrupt, LintxError) as error:  # what is done is written first
            stopped = error
            break
        done.append((picture, completion))
        results.append(_describe(picture, completion))
    if done:
        record = {**settings, "images": [result["image"] for result in results]}
        height = session.model.config.image.height
        write_file(out, encode_png(stack_rows([_render(session, *pair, scale) for pair in done]), record))
        talk(f"wrote {out}")
        if gif is not None:
            shown = frame_rows(height, known // session.model.config.image.values_per_row)
            frames = [stack_rows([_render(session, *pair, scale, rows) for pair in done]) for rows in shown]
            write_file(gif, encode_gif(frames, record))
            talk(f"wrote {gif}")
    if json:
        written = {"out": out, "gif": gif} if done else {"out": None, "gif": None}
        print_json({**settings, "images": len(results), "rows": results, "failures": failures, **written})
    if stopped is not None:
        if done:
            complain(f"stopped after {len(done)} of {len(images)} pictures, which are kept")
        raise stopped
    if failures:
        rest = "; the others were completed" if done else ""
        raise DataError(f"{len(failures)} of {len(images)} pictures could not be read{rest}")


def _choose_class(session: Session, wanted: str | None) -> int | None:
    """The one class of all pictures; None in a model without classes. Raises `UsageError` unless there is just one."""
    chosen, classes = session.choose_classes(wanted), session.model.config.classes
    if classes and len(chosen) != 1:
        raise UsageError(f"the model has classes: say with --class which of 0 to {classes - 1} the pictures show")
    return chosen[0] if chosen else None


def _complete_one(
    session: Session,
    path: Path,
    known: int,
    count: int,
    seed: int,
    filters: "Filters",
    fit: FitName,
    invert: bool,
    engine: str,
    label: int | None,
) -> "tuple[Picture, Completion]":
    from linformer_cli.data.pictures import border_brightness, load_picture
    from linformer_cli.data.sequence import images_to_values
    from linformer_cli.sampling.complete import complete_values

    shape = session.model.config.image
    picture = load_picture(path, shape, fit.value, invert)
    for note in picture.notes:
        talk(f"{path}: {note}")
    if shape.channels == 1 and abs(border_brightness(picture.image) - session.checkpoint.info.data.border_mean) > 128:
        ours, theirs = ("light", "dark") if border_brightness(picture.image) > 127 else ("dark", "light")
        remedy = "leave out --invert" if invert else "try --invert"
        talk(f"hint: {path} has a {ours} background, the model learned a {theirs} one; {remedy}")
    values = images_to_values(picture.image[None], shape.levels)[0]
    return picture, complete_values(session.model, values, known, count, seed, filters, say_halved, engine, label)


def _render(
    session: Session, picture: "Picture", completion: "Completion", scale: int | None, shown_rows: int | None = None
) -> Any:
    """The row of one picture; of the completions only the first `shown_rows` rows, where that is given."""
    from linformer_cli.data.sequence import values_to_images
    from linformer_cli.report.animation import hide_rows
    from linformer_cli.report.grids import render_completion

    completed = values_to_images(completion.values, session.model.config.image)
    if shown_rows is not None:
        completed = hide_rows(completed, shown_rows)
    return render_completion(picture.image, completion.known, completed, picture.image, scale)


def _describe(picture: "Picture", completion: "Completion") -> dict[str, Any]:
    """One picture's record; a part without values has no bits/dim."""
    kept = None if math.isnan(completion.kept_bits_per_dim) else completion.kept_bits_per_dim
    completed = completion.completed_bits_per_dim
    mean = sum(completed) / len(completed)
    shown = "none" if kept is None else f"{kept:.3f}"
    talk(
        f"{picture.path}: bits/dim kept {shown}, completions {mean:.3f} on average, "
        f"original's rest {completion.original_rest_bits_per_dim:.3f}"
    )
    return {
        "image": picture.path,
        "known_values": completion.known,
        "kept_bits_per_dim": kept,
        "completed_bits_per_dim": completed,
        "original_rest_bits_per_dim": completion.original_rest_bits_per_dim,
        "notes": picture.notes,
    }
