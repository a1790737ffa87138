"""`lintx complete`: complete the user's own images."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linformer_cli.config import PARTICLES, Fit
from linformer_cli.data import Framing
from linformer_cli.errors import DataError, LintxError, UsageError
from linformer_cli.units import WINDOWS

from . import options
from .config_options import option, with_fields
from .output import info, print_json, warn, warn_smaller_batch
from .session import DrawingOptions, Session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from linformer_cli.data.pictures import Picture
    from linformer_cli.sampling.complete import Completion
    from linformer_cli.sampling.decode import Sampler

_TOP = "top:0.5"
# The native engine has memory for so many.
_MOST_PARTICLES = 2**16
# All completions of an image are in one row of the result, so the number is limited.
_MOST_COMPLETIONS = 100_000
# With a smaller effective sample size, a completion rests on few particles.
_FEW = 2
# A kept part with so many times the bits/dim of validation images is unlike them.
_UNLIKE = 3


@dataclass(frozen=True, kw_only=True)
class CompleteOptions:
    """The options of the command."""

    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files of any size and format.")]
    checkpoint: options.CheckpointOption = None
    keep: str | None = option(
        None,
        "The part to keep: top:0.5 (fraction), top:50%, top:14rows (or top:14), top:392px, the same with left, right "
        "and bottom, or box:ROW,COLUMN,HEIGHT,WIDTH. Default: all that is not erased, masked or transparent, or else "
        f"{_TOP}.",
        metavar="PART",
    )
    erase: str | None = option(None, "A part to draw anew, such as box:8,8,12,12.", metavar="PART")
    mask: Path | None = option(
        None, "A picture of the size of the images, or of the model's: what is white is kept.", metavar="FILE"
    )
    particles: int = option(
        PARTICLES,
        "Images that are drawn for each completion, unless the first rows are kept. More take longer and follow the "
        "kept part better.",
        min=1,
        max=_MOST_PARTICLES,
    )
    class_name: str | None = option(None, "The class of the images, for a model with classes.", "--class")
    count: int = option(3, "Completions of each image.", "-n", "--count", min=1, max=_MOST_COMPLETIONS)
    out: Path = option(Path("completed.png"), "PNG file for the result.", "-o", "--out")
    frame: Framing = option(
        "auto",
        "'auto' matches the position, size, contrast and background of a drawing to those of the training images, "
        "unless the file already has the model's size. 'none' only resizes. --fit and --invert imply none.",
    )
    fit: Fit | None = option(
        None, "How to fit an image whose aspect ratio is not the model's. Default: as in training."
    )
    invert: bool = option(False, "Invert the brightness of the images before they are completed.", "--invert")
    scale: options.Scale = None
    gif: Path | None = option(None, "Also write an animation of the images being drawn.", metavar="FILE")
    drawing: DrawingOptions
    quiet: options.Quiet = False
    json: options.Json = False


@with_fields
def complete(asked: CompleteOptions) -> None:
    """Complete your own images.

    Keeps a part of each image, by default the top, and draws the rest with the model, several times. The result has a
    row for each image: given | completions | original. Bits/dim tell how likely the model finds the kept part, each
    completion, and the rest of the original; a lower figure means more likely. Images are rotated according to their
    EXIF data, and read as the training images were. Drawings are matched to the training images (see --frame).

    Examples:

    - `lintx complete digit.png --keep top:0.5 -n 3 -o completed.png`
    - `lintx complete photo-of-a-digit.jpg --keep top:0.6`
    - `lintx complete scans/*.jpg --invert --fit pad --keep top:10rows`
    - `lintx complete digit.png --erase box:9,9,10,10 --particles 256`
    """
    _check_outputs(asked)

    from linformer_cli.data.parts import choose_pixels
    from linformer_cli.data.pictures import open_picture, read_mask

    if len(asked.images) == 1:  # of several images, those that cannot be opened are skipped later
        with open_picture(asked.images[0], str(asked.images[0])):
            pass
    mask = None if asked.mask is None else read_mask(asked.mask)
    session = asked.drawing.open(asked.checkpoint)
    if session.words is WINDOWS:
        path = session.checkpoint.name
        raise UsageError(f"'{path}' draws bytes, not images; to continue a text: lintx sample {path} --prompt TEXT")
    given = [name for name in (asked.keep, asked.erase, asked.mask) if name is not None]
    keep = asked.keep if given else _TOP
    kept = None
    if keep is not None or asked.erase is not None:
        kept = choose_pixels(keep, asked.erase, session.model.config.image)
    label = session.choose_class(asked.class_name, "images")
    sampler = asked.drawing.build_sampler(session, label is not None)
    settings = {**session.record, "seed": sampler.seed, "batch": asked.count, **vars(sampler.filters)}
    settings |= {"keep": keep, "erase": asked.erase, "mask": asked.mask, "particles": asked.particles}
    settings |= {"invert": asked.invert, "class": label}
    work = _complete_all(_Task(asked, session, sampler, kept, mask, not given, label), asked.images)
    if work.done:
        record = {**settings, "images": [picture.path for picture, _ in work.done]}
        _write_pictures(asked, session, work.done, record)
    if asked.json:
        written = {"out": asked.out, "gif": asked.gif} if work.done else {"out": None, "gif": None}
        rows = [_describe(*pair) for pair in work.done]
        print_json({**settings, "images": len(rows), "rows": rows, "failures": work.failures, **written})
    if work.stopped is not None:
        if work.done:
            warn(f"stopped after {len(work.done)} of {len(asked.images)} images, which are kept")
        raise work.stopped
    if work.failures:
        others = "; the others were completed" if work.done else ""
        raise DataError(f"{len(work.failures)} of {len(asked.images)} images could not be read{others}")


def _check_outputs(asked: CompleteOptions) -> None:
    options.require_output("-o", asked.out, ".png")
    options.require_output("--gif", asked.gif, ".gif")
    options.require_distinct(asked.out, asked.gif)
    outputs = {os.path.realpath(file) for file in (asked.out, asked.gif) if file is not None}
    inputs = [*asked.images, *([asked.mask] if asked.mask is not None else [])]
    if given := [path for path in inputs if os.path.realpath(path) in outputs]:
        kind = "the mask" if given[0] == asked.mask else "one of the images"
        raise UsageError(f"'{given[0]}' is {kind} and would be replaced; choose another output file")


@dataclass(frozen=True)
class _Task:
    """The work to do on each image. `kept` bool [H, W] and `mask` are None for all; `erases` what is transparent."""

    asked: CompleteOptions
    session: Session
    sampler: "Sampler"
    kept: "NDArray[np.bool_] | None"
    mask: "NDArray[np.uint8] | None"
    erases: bool
    label: int | None

    def complete(self, path: Path) -> "Iterator[tuple[Picture, Completion]]":
        """Each drawing in the image at `path`, or the image, with its completions. Prints notes on stderr."""
        import torch

        from linformer_cli.data.pictures import border_brightness, load_picture
        from linformer_cli.data.sequence import images_to_values
        from linformer_cli.sampling.complete import complete_values

        asked, shape, data = self.asked, self.session.model.config.image, self.session.checkpoint.info.data
        framing = asked.frame == "auto" and asked.fit is None and not asked.invert
        first = load_picture(path, self.session.look, asked.fit, asked.invert, framing, self.mask, self.erases)
        is_grey = shape.channels == 1 and not shape.palette
        for picture in (first, *first.others):
            for note in picture.notes:
                info(f"{path}: {note}")
            if is_grey and abs((ours := border_brightness(picture.image)) - data.border_mean) > 128:
                colours = ("light", "dark") if ours > 127 else ("dark", "light")
                remedy = "leave out --invert" if asked.invert else "try --invert"
                grounds = f"a {colours[0]} background, but the model was trained on a {colours[1]} one"
                info(f"hint: {path} has {grounds}; {remedy}")
            values = images_to_values(picture.image[None], shape)[0]
            kept = torch.from_numpy(self._choose(picture)).flatten().repeat_interleave(shape.channels)
            done = complete_values(
                self.sampler, values, kept, asked.count, self.label, warn_smaller_batch, asked.particles
            )
            yield picture, done

    def _choose(self, picture: "Picture") -> "NDArray[np.bool_]":
        """The pixels [H, W] that are kept of a picture."""
        if picture.kept is None or self.kept is None or self.erases:
            kept = self.kept if picture.kept is None else picture.kept
            assert kept is not None, "without a mask, there is a default part"
            return kept
        return picture.kept & self.kept


@dataclass(frozen=True)
class _Work:
    """Completed images, errors of unreadable images, and the exception that ended the work early, if any."""

    done: "list[tuple[Picture, Completion]]"
    failures: list[dict[str, object]]
    stopped: BaseException | None


def _complete_all(task: _Task, images: Sequence[Path]) -> _Work:
    """Complete the images one by one. Skips unreadable images, unless there is only one image."""
    done: list[tuple[Picture, Completion]] = []
    failures: list[dict[str, object]] = []
    for path in images:
        try:
            for picture, completion in task.complete(path):
                done.append((picture, completion))
                usual = task.session.checkpoint.info.training.validation_bits_per_dim
                _show_bits(picture, completion, task.asked.particles, usual)
        except DataError as error:
            if len(images) == 1:
                raise
            warn(f"Error: {error}")
            failures.append({"image": path, "error": str(error)})
        except (KeyboardInterrupt, LintxError) as error:  # raised again after the finished images are written
            return _Work(done, failures, error)
    return _Work(done, failures, None)


def _write_pictures(
    asked: CompleteOptions, session: Session, done: "Sequence[tuple[Picture, Completion]]", record: dict[str, Any]
) -> None:
    """Write all rows as a PNG and, if requested, as an animation."""
    from linformer_cli.files import write_file
    from linformer_cli.report.animation import encode_gif, frame_rows
    from linformer_cli.report.grids import encode_png, stack_rows

    image = session.model.config.image
    write_file(asked.out, encode_png(stack_rows([_render(session, *pair, asked.scale) for pair in done]), record))
    info(f"wrote {asked.out}")
    if asked.gif is not None:
        first = min(int(completion.kept.int().argmin()) for _, completion in done)
        shown = frame_rows(image.height, first // image.values_per_row)
        frames = [stack_rows([_render(session, *pair, asked.scale, rows) for pair in done]) for rows in shown]
        write_file(asked.gif, encode_gif(frames, record))
        info(f"wrote {asked.gif}")


def _render(
    session: Session, picture: "Picture", completion: "Completion", scale: int | None, shown_rows: int | None = None
) -> Any:
    """Draw the row of one image. With `shown_rows`, only the first rows of pixels of each completion are shown."""
    from linformer_cli.data.sequence import paint, values_to_images
    from linformer_cli.report.animation import hide_rows
    from linformer_cli.report.grids import render_completion

    shape = session.model.config.image
    kept = completion.kept.view(shape.height, shape.width, shape.channels).numpy()
    completed = paint(values_to_images(completion.values, shape), shape)
    if shown_rows is not None:
        completed = hide_rows(completed, shown_rows, kept[..., 0])
    original = paint(picture.image[None], shape)[0]
    return render_completion(original, kept, completed, scale, picture.unframed)


def _show_bits(picture: "Picture", completion: "Completion", particles: int, usual: float | None) -> None:
    """Print the bits/dim of an image, and how well its kept part was followed with this number of particles.

    `usual` are the bits/dim of the model's validation images.
    """
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
        info(f"hint: {picture.path}: {found}; if they do not fit, try --particles {4 * particles}")
    if usual is not None and kept > _UNLIKE * usual:
        info(f"{picture.path}: the kept part is unlike the training images, whose bits/dim are {usual:.3f}")


def _describe(picture: "Picture", completion: "Completion") -> dict[str, object]:
    """Return the JSON record of one image. A part without values has no bits/dim."""
    kept = completion.kept_bits_per_dim
    return {
        "image": picture.path,
        "known_values": int(completion.kept.sum()),
        "kept_bits_per_dim": None if math.isnan(kept) else kept,
        "completed_bits_per_dim": completion.completed_bits_per_dim,
        "original_rest_bits_per_dim": completion.original_rest_bits_per_dim,
        "kept_bits": [image.bits for image in completion.particles],
        "effective_sample_size": [image.fewest for image in completion.particles],
        "notes": picture.notes,
    }
