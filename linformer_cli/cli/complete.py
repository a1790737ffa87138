"""`lintx complete`: complete the user's own images."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linformer_cli.checkpoint_files import DEFAULT_CHECKPOINT, names_model
from linformer_cli.config import DEFAULT_PART, PARTICLES, Fit
from linformer_cli.data import Framing
from linformer_cli.errors import DataError, LintxError, UsageError
from linformer_cli.units import WINDOWS
from . import options
from .config_options import option, with_fields
from .output import info, print_json, warn, warn_smaller_batch, write_gif, write_png
from .session import DrawingOptions, Session

if TYPE_CHECKING:
    from PIL import Image

    from linformer_cli.data.parts import Part
    from linformer_cli.data.pictures import Picture
    from linformer_cli.sampling.complete import Completion
    from linformer_cli.sampling.decode import Sampler
    from linformer_cli.sampling.numbered import NumberedImages

# The native engine takes so many at most.
_MOST_PARTICLES = 2**16
# All completions of an image are in one row of the result, so the number is limited.
_MOST_COMPLETIONS = 100_000
# With a smaller effective sample size, a completion rests on few particles.
_FEW = 2
# A kept part with so many times the bits/dim of validation images is unlike them.
_UNLIKE = 3


@dataclass(frozen=True, kw_only=True)
class CompleteOptions:
    images: Annotated[
        list[Path], typer.Argument(metavar="[CHECKPOINT] IMAGE...", help="The model, and image files of any format.")
    ]
    checkpoint: options.CheckpointOption = None
    keep: str | None = option(
        None,
        "The part to keep: top:0.5, top:50%, top:14rows, top:392px, the same with left, right "
        f"and bottom, or box:ROW,COLUMN,HEIGHT,WIDTH. Default: all that is not erased, masked "
        f"or transparent, or else {DEFAULT_PART}.",
        metavar="PART",
    )
    erase: str | None = option(None, "A part to draw anew, such as box:8,8,12,12.", metavar="PART")
    mask: Path | None = option(
        None, "A picture in which white is kept, of the images' or the model's size.", metavar="FILE"
    )
    particles: int = option(
        PARTICLES,
        "Images drawn for each completion of a part other than the top. More follow the kept part better.",
        min=1,
        max=_MOST_PARTICLES,
    )
    class_name: str | None = option(None, "Class of all pictures, for a model with classes.", "--class")
    count: int = option(3, "Completions of each image.", "-n", "--count", min=1, max=_MOST_COMPLETIONS)
    out: Path = option(Path("completed.png"), "PNG file for the result.", "-o", "--out")
    files: Path | None = option(None, "Also write each completion in its true size, as a numbered PNG in this folder.")
    frame: Framing = option(
        "auto",
        "'auto' gives a drawing the position, size and contrast of the training images, unless "
        "it has the model's size. 'none' only resizes, as --fit and --invert do.",
    )
    fit: Fit | None = option(None, "How to fit an image of another shape. Default: as in training.")
    invert: bool = option(False, "Invert the images first.", "--invert")
    scale: options.Scale = None
    gif: Path | None = option(None, "Also animate the drawing.", metavar="FILE")
    drawing: DrawingOptions
    quiet: options.Quiet = False
    json: options.Json = False


@with_fields
def complete(asked: CompleteOptions) -> None:
    """Complete your own images.

    Examples:

    - `lintx complete digit.png --keep top:0.5 -n 3 -o completed.png`
    - `lintx complete runs/mine sprite.png -n 8 --files finished/`
    - `lintx complete scans/*.jpg --invert --fit pad --keep top:10rows`
    - `lintx complete digit.png --erase box:9,9,10,10 --particles 256`

    Keeps a part of each image, by default the top, and draws the rest several times. Each image gives a row: given |
    completions | original. Lower bits/dim mean that the model finds a part more likely.
    """
    asked = _take_model(asked)
    options.require_output("-o", asked.out, ".png")
    options.require_output("--gif", asked.gif, ".gif")
    options.require_output("--files", None if asked.files is None else asked.files / "00000.png", ".png")
    options.require_distinct(asked.out, asked.gif)
    options.require_inputs_kept(filter(None, (*asked.images, asked.mask)), asked.out, asked.gif)

    from linformer_cli.data.parts import choose_part
    from linformer_cli.data.pictures import open_picture, read_mask

    if len(asked.images) == 1:  # of several images, those that cannot be opened are skipped later
        with open_picture(asked.images[0], str(asked.images[0])):
            pass
    mask = None if asked.mask is None else read_mask(asked.mask)
    session = asked.drawing.open(asked.checkpoint, forks=True)
    if session.words is WINDOWS:
        path = session.checkpoint.name
        raise UsageError(f"'{path}' draws bytes, not images; to continue a text: lintx sample {path} --prompt TEXT")
    part = choose_part(asked.keep, asked.erase, mask, session.model.config.image)
    label = session.choose_class(asked.class_name, "images")
    sampler = asked.drawing.build_sampler(session, label is not None)
    settings = {**session.record, "seed": sampler.seed, "batch": asked.count, **vars(sampler.filters)}
    settings |= {"keep": DEFAULT_PART if part.yields else asked.keep, "erase": asked.erase, "mask": asked.mask}
    settings |= {"particles": asked.particles, "invert": asked.invert, "class": label}
    files = _number_files(asked, session, settings)
    done: list[tuple[Picture, Completion]] = []
    failures: list[dict[str, object]] = []
    stopped: BaseException | None = None
    try:
        for pair in _complete_all(asked, session, sampler, part, label, failures):
            done.append(pair)
    except DataError:  # of the only image
        raise
    except (KeyboardInterrupt, LintxError) as error:  # raised again after the finished images are written
        stopped = error
    if done:
        _write_pictures(asked, session, done, {**settings, "images": [picture.path for picture, _ in done]})
        if files is not None:
            _write_files(files, done, session)
    if asked.json:
        written = {name: getattr(asked, name) if done else None for name in ("out", "gif", "files")}
        rows = [_describe(*pair) for pair in done]
        print_json({**settings, "images": len(rows), "rows": rows, "failures": failures, **written})
    if stopped is not None:
        if done:
            last = done[-1][1]
            cut = f", the last with {len(last.values)} of {asked.count} completions" if last.stopped else ""
            warn(f"stopped after {len(done)} of {len(asked.images)} images{cut}, which are kept")
        raise stopped
    if failures:
        others = "; the others were completed" if done else ""
        raise DataError(f"{len(failures)} of {len(asked.images)} images could not be read{others}")


def _take_model(asked: CompleteOptions) -> CompleteOptions:
    """Read a first argument that names a model as `--checkpoint`, if pictures follow."""
    model, *images = asked.images
    if not images or not names_model(str(model)):
        return asked
    if asked.checkpoint is not None:
        raise UsageError(f"'{model}' and --checkpoint {asked.checkpoint} are two models; name one")
    return replace(asked, checkpoint=str(model), images=images)


def _number_files(asked: CompleteOptions, session: Session, settings: dict[str, Any]) -> "NumberedImages | None":
    """List the files of --files. Raises `UsageError` if the first exists and was not written by such a command."""
    from linformer_cli.sampling.numbered import NumberedImages

    if asked.files is None:
        return None
    record = {**settings, "count": asked.count, "images": asked.images}
    colours = session.model.config.image.colours
    files = NumberedImages(asked.files, lambda index: {**record, "index": index}, colours)
    files.holds(0)
    return files


def _complete_all(
    asked: CompleteOptions,
    session: Session,
    sampler: "Sampler",
    part: "Part",
    label: int | None,
    failures: list[dict[str, object]],
) -> "Iterator[tuple[Picture, Completion]]":
    """Complete the drawings in the images one by one. `Session.read_pictures` explains `failures`."""
    import torch

    from linformer_cli.data.sequence import images_to_values
    from linformer_cli.sampling.complete import complete_values

    shape = session.model.config.image
    framing = asked.frame == "auto" and asked.fit is None and not asked.invert
    how = {"fit": asked.fit, "invert": asked.invert, "framing": framing, "part": part}
    for picture in session.read_pictures(asked.images, failures, **how):
        _show_notes(picture, session, asked.invert)
        values = images_to_values(picture.image[None], shape)[0]
        kept = torch.as_tensor(picture.kept).flatten().repeat_interleave(shape.channels)
        work = complete_values(sampler, values, kept, asked.count, label, warn_smaller_batch, asked.particles)
        _show_bits(picture, work, asked, session.checkpoint.info.training.validation_bits_per_dim)
        yield picture, work
        if work.stopped:
            raise KeyboardInterrupt


def _show_notes(picture: "Picture", session: Session, inverted: bool) -> None:
    from linformer_cli.data.pictures import border_brightness

    for note in picture.notes:
        info(f"{picture.path}: {note}")
    shape, usual = session.model.config.image, session.checkpoint.info.data.border_mean
    if shape.channels == 1 and not shape.palette and abs((ours := border_brightness(picture.image)) - usual) > 128:
        colours = ("light", "dark") if ours > 127 else ("dark", "light")
        remedy = "leave out --invert" if inverted else "try --invert"
        grounds = f"a {colours[0]} background, but the model was trained on a {colours[1]} one"
        info(f"hint: {picture.path} has {grounds}; {remedy}")


def _write_pictures(
    asked: CompleteOptions, session: Session, done: "Sequence[tuple[Picture, Completion]]", record: dict[str, Any]
) -> None:
    from linformer_cli.data.sequence import paint, values_to_images
    from linformer_cli.report.grids import frame_rows, hide_rows, render_completion, stack_rows

    shape = session.model.config.image

    def render(shown_rows: int) -> "Image.Image":
        """Draw all rows with the first rows of pixels of each completion."""
        rows = []
        for picture, completion in done:
            kept = completion.kept.view(shape.height, shape.width, shape.channels).numpy()
            completed = hide_rows(paint(values_to_images(completion.values, shape), shape), shown_rows, kept[..., 0])
            original = paint(picture.image[None], shape)[0]
            rows.append(render_completion(original, kept, completed, asked.scale, picture.unframed))
        return stack_rows(rows)

    first = min(int(completion.kept.int().argmin()) for _, completion in done)
    write_png(asked.out, render(shape.height), record)
    write_gif(asked.gif, render, frame_rows(shape.height, first // shape.values_per_row), record)


def _write_files(files: "NumberedImages", done: "Sequence[tuple[Picture, Completion]]", session: Session) -> None:
    from linformer_cli.data.sequence import values_to_images

    shape = session.model.config.image
    images = [image for _, work in done for image in values_to_images(work.values, shape)]
    for index, image in enumerate(images):
        files.holds(index)  # raises for the file of another command
        files.write(index, image)
    info(f"wrote {len(images)} files in {files.folder}")


def _show_bits(picture: "Picture", completion: "Completion", asked: CompleteOptions, usual: float | None) -> None:
    """Print the bits/dim of an image, and how well its kept part was followed. `usual`: of validation images."""
    kept, completed = completion.kept_bits_per_dim, completion.completed_bits_per_dim
    shown = "none" if math.isnan(kept) else f"{kept:.3f}"
    info(
        f"{picture.path}: bits/dim kept {shown}, completions {sum(completed) / len(completed):.3f} on average, "
        f"rest of the original {completion.original_rest_bits_per_dim:.3f}"
    )
    for number, image in enumerate(completion.particles, 1):
        info(f"{picture.path}: {number}: kept part {image.bits:.1f} bits, effective sample size {image.fewest:.1f}")
    if few := sum(image.fewest < _FEW for image in completion.particles):
        found = f"{few} of {len(completed)} completions rest on one or two particles"
        info(f"hint: {picture.path}: {found}; if they do not fit, try --particles {4 * asked.particles}")
    if usual is not None and kept > _UNLIKE * usual:
        other = f"; another model than {DEFAULT_CHECKPOINT}: lintx complete MODEL {picture.path}"
        info(
            f"{picture.path}: the kept part is unlike the training images, whose bits/dim are {usual:.3f}"
            f"{other if asked.checkpoint is None else ''}"
        )


def _describe(picture: "Picture", completion: "Completion") -> dict[str, object]:
    kept = completion.kept_bits_per_dim
    return {
        "image": picture.path,
        "known_values": int(completion.kept.sum()),
        "kept_bits_per_dim": None if math.isnan(kept) else kept,
        "completed_bits_per_dim": completion.completed_bits_per_dim,
        "original_rest_bits_per_dim": completion.original_rest_bits_per_dim,
        "kept_bits": [image.bits for image in completion.particles],
        "effective_sample_size": [image.fewest for image in completion.particles],
        "final_sample_size": [image.effective for image in completion.particles],
        "notes": picture.notes,
    }
