"""`lintx sample`: draw images from a model."""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linformer_cli.config import DataConfig
from linformer_cli.errors import UsageError
from linformer_cli.files import STREAM
from linformer_cli.system.distributed import Team, join_team, notice_loss
from linformer_cli.units import WINDOWS, count_words, format_bytes, format_duration
from . import options
from .config_options import option, with_fields
from .output import info, print_json, show_preview, warn, warn_smaller_batch, write_gif, write_png
from .session import DrawingOptions, Session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from linformer_cli.evaluation.nearest import Copying
    from linformer_cli.sampling.decode import Sampler
    from linformer_cli.sampling.numbered import Drawn, ImageNumbers

# A grid of more images would be too large to look at. With --files, the other images are not kept in memory.
_MOST_IN_GRID = 10_000
# These bounds are far above any use. They keep image numbers within 63 bits, even with --first and classes.
_MOST_IMAGES, _LAST_FIRST = 2**40, 2**62
_IMAGES, _GRID = 16, "samples.png"


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    checkpoint: options.CheckpointArgument = None
    count: int | None = option(
        None,
        "Number of images (default: 16), or of bytes (default: without end, or one window if "
        "the model needs positions).",
        "-n",
        "--count",
        min=1,
        max=_MOST_IMAGES,
    )
    prompt: str | None = option(None, "Text that a model of bytes continues; '-' is stdin.", metavar="TEXT")
    batch: int = option(64, "Images drawn at once.", min=1)
    out: str | None = option(None, f"PNG of the grid; '-' is stdout. Default: {_GRID}.", "-o", "--out", metavar="FILE")
    class_name: str | None = option(
        None,
        "Draw -n images of each of these classes, such as 7 or '1,7', or of 'all', one row per "
        "class. Default: -n images without a class, or of all classes in turn if the model "
        "needs one.",
        "--class",
        metavar="CLASS",
    )
    files: Path | None = option(None, "Also write numbered PNGs to this folder, unless they exist.")
    first: int = option(0, "Number of the first image, or of the text.", min=0, max=_LAST_FIRST)
    columns: int | None = option(None, "Columns of the grid.", min=1)
    scale: options.Scale = None
    drawing: DrawingOptions
    gif: Path | None = option(None, "Also animate the drawing of the grid.", metavar="FILE")
    nearest: Path | None = option(None, "Also draw images above their nearest training images.", metavar="FILE")
    preview: bool = option(True, "Show some images in the terminal.")
    quiet: options.Quiet = False
    json: options.Json = False


@with_fields
def sample(asked: SampleOptions) -> None:
    """Draw images or text from a model.

    Examples:

    - `lintx sample -n 64 -o grid.png`
    - `lintx sample runs/first -n 16 --temperature 0.9 --files digits/`
    - `lintx sample -n 4 -o - | display`
    - `lintx sample -n 16 --gif drawing.gif`
    - `torchrun --nproc-per-node 8 -m linformer_cli sample runs/first -n 10000 --files drawn`
    - `lintx sample --class 7 -n 16`
    - `lintx sample runs/text --prompt 'import ' -n 500 --temperature 0.8`

    A model of bytes prints text while it draws it. Without filters and with --guidance 1, images are drawn from the
    distribution that bits/dim measure. Image number i depends on --seed and i, not on --batch.

    `torchrun` splits the images among its processes. With --files, repeating the command draws only missing images.
    """
    if asked.out == STREAM and asked.json:
        raise UsageError("-o - and --json would both write to stdout; give -o a file")
    options.require_output("-o", asked.out, ".png", stdout=True)
    options.require_output("--gif", asked.gif, ".gif")
    options.require_output("--nearest", asked.nearest, ".png")
    options.require_distinct(asked.out, asked.gif, asked.nearest)
    options.require_output("--files", None if asked.files is None else asked.files / "00000.png", ".png")
    with join_team(warn) as team, notice_loss("with --files, the same command draws what is missing"):
        session = asked.drawing.open(asked.checkpoint, team)
        sampler = asked.drawing.build_sampler(session, asked.class_name is not None)
        (_sample_text if session.words is WINDOWS else _sample_images)(asked, session, sampler, team)


def _sample_text(asked: SampleOptions, session: Session, sampler: "Sampler", team: Team) -> None:
    of_images: dict[str, object] = {"-o": asked.out, "--class": asked.class_name, "--files": asked.files}
    of_images |= {"--columns": asked.columns, "--scale": asked.scale, "--gif": asked.gif}
    of_images |= {"--guidance": asked.drawing.guidance, "--nearest": asked.nearest}
    if given := [flag for flag, value in of_images.items() if value is not None]:
        raise UsageError(f"{given[0]} is for images, and the model draws bytes; drop it")
    if team.count > 1:
        raise UsageError("several processes draw images only; start one process to draw text")
    filters = {key: value for key, value in vars(sampler.filters).items() if key != "guidance"}
    record = {**session.record, "seed": sampler.seed, **filters, "first": asked.first} if asked.json else None
    prompt = sys.stdin.buffer.read() if asked.prompt == STREAM else os.fsencode(asked.prompt or "")
    print_text(sampler, prompt, asked.count, asked.first, record)


def _sample_images(asked: SampleOptions, session: Session, sampler: "Sampler", team: Team) -> None:
    if asked.prompt is not None:
        raise UsageError(f"--prompt is for models of bytes, and '{session.checkpoint.name}' draws images; drop it")
    asked = replace(asked, out=asked.out or _GRID)
    options.require_output("-o", asked.out, ".png", stdout=True)

    from linformer_cli.data.sequence import paint
    from linformer_cli.sampling.numbered import NumberedImages, draw_images

    numbers = _choose_numbers(asked, session)
    settings = {**session.record, "seed": sampler.seed, "batch": asked.batch, **vars(sampler.filters)}
    settings["class"] = asked.class_name

    def describe(index: int) -> dict[str, object]:
        return {**settings, "index": index, "class": numbers.class_of(index)}

    image = session.model.config.image
    folder = None if asked.files is None else NumberedImages(asked.files, describe, image.colours)
    work = draw_images(sampler, numbers, asked.batch, folder, _MOST_IN_GRID, team, warn_smaller_batch)
    if work.found:
        info(f"{work.found} of {len(numbers.all)} images are already in {asked.files}")
    if not work.shown:
        raise KeyboardInterrupt
    if team.leads:
        images = work.stack(work.shown) if folder is None else folder.read(work.shown)
        row = asked.columns or (numbers.each if len(numbers.chosen) > 1 else None)
        _write_pictures(asked, paint(images, image), row, {**settings, "count": len(work.shown)})
        if asked.nearest is not None:
            settings["copying"] = _compare(asked.nearest, images, session)
    _show_result(asked, session, work, team, settings)
    if work.stopped:
        if team.leads:
            rest = "; the same command draws the rest" if asked.files else ""
            warn(f"stopped after {work.done} of {len(numbers.all)} images, which are kept{rest}")
        team.wait()  # the end of one process ends the others, and one of them may still be writing
        raise KeyboardInterrupt


def _choose_numbers(asked: SampleOptions, session: Session) -> "ImageNumbers":
    from linformer_cli.sampling.numbered import ImageNumbers

    count = _IMAGES if asked.count is None else asked.count
    classes = session.choose_classes(asked.class_name)
    numbers = ImageNumbers(asked.first, count, classes, session.model.config.required_classes)
    if session.model.config.classes and not numbers.chosen:
        drawn_as = f"classes 0 to {numbers.turns - 1} in turn" if numbers.turns else "images without a class"
        info(f"{drawn_as}; select with --class")
    return numbers


def _show_result(asked: SampleOptions, session: Session, work: "Drawn", team: Team, settings: dict[str, Any]) -> None:
    rate = work.drawn / work.seconds if work.drawn else 0.0
    took = f"{count_words(work.drawn, 'image')} in {format_duration(work.seconds)}"
    info(f"{took}: {rate:.3g} images/s, state {format_bytes(work.state_bytes)}")
    if asked.files:
        info(f"wrote {work.drawn} files in {asked.files}")
    if asked.json and team.leads:
        values = work.drawn * session.model.config.image.positions
        print_json(
            {
                **settings,
                "first": asked.first,
                "images": work.done,
                "drawn": work.drawn,
                "images_per_second": rate,
                "seconds": work.seconds,
                "state_bytes": work.state_bytes,
                "values_per_pass": values / work.passes if work.drawn else None,
                "processes": team.count,
                "out": asked.out,
                "gif": asked.gif,
                "nearest": asked.nearest,
                "files": asked.files,
            }
        )


def _compare(path: Path, images: "NDArray[np.uint8]", session: Session) -> "Copying":
    """Write a picture of the images, each above its nearest training image; print and return their distances."""
    from linformer_cli.data.images import load_for_training
    from linformer_cli.data.sequence import paint
    from linformer_cli.evaluation.nearest import measure_copying, render_nearest
    from linformer_cli.training.run_folder import RunFolder

    shape = session.model.config.image
    data = DataConfig(name=session.checkpoint.info.data.name)
    run = RunFolder(session.checkpoint.path.parent)
    if run.config_file.is_file():  # the images of a run are where it found them
        data = data.model_copy(update={"data_dir": run.read_config().data.data_dir})
    train, held_out = load_for_training(data, session.look)
    train.require_shape(shape)
    copying, nearest = measure_copying(images, train, held_out, shape)
    pairs = (paint(each, shape) for each in (images, train.images[nearest.indices]))
    write_png(path, render_nearest(*pairs), session.record)
    info(copying.describe())
    return copying


def _write_pictures(asked: SampleOptions, images: "NDArray[np.uint8]", row: int | None, record: dict[str, Any]) -> None:
    from linformer_cli.report.grids import frame_rows, hide_rows, render_grid

    write_png(str(asked.out), render_grid(images, row, asked.scale), record)
    frames = frame_rows(images.shape[1])
    write_gif(asked.gif, lambda shown: render_grid(hide_rows(images, shown), row, asked.scale), frames, record)
    if asked.preview:
        show_preview(images)


def print_text(
    sampler: "Sampler", prompt: bytes, count: int | None, index: int, record: Mapping[str, object] | None = None
) -> None:
    """Print `prompt` and the bytes that follow it on stdout, for a terminal as safe text, or at the end as JSON.

    Without `count`, the text goes on without end if the model allows it, and otherwise to the end of a window. The JSON
    document begins with `record`. Raises `UsageError` if its text had no end.
    """
    import torch

    from linformer_cli.report.terminal import SafeText
    from linformer_cli.sampling.decode import Stream

    model = sampler.model
    if count is None and model.find_bound() is not None:
        count = max(0, model.config.image.positions - len(prompt))
    stream = Stream(sampler, torch.tensor(list(prompt), dtype=torch.int64), count)
    if count is None and record is not None:
        raise UsageError("--json prints the text when it is complete, and this one never ends; limit the bytes with -n")
    if count is None:
        info("without end; stop with Ctrl-C, or limit the bytes with -n")
    text = SafeText() if sys.stdout.isatty() else None
    whole = bytearray()

    def write(data: bytes, last: bool = False) -> None:
        if record is not None:
            whole.extend(data)
            return
        if text is None:
            sys.stdout.buffer.write(data)
        else:
            sys.stdout.write(text.decode(data, last) + "\n" * last)
        sys.stdout.flush()

    drawn, began = 0, time.perf_counter()

    def finish() -> None:
        seconds = time.perf_counter() - began
        write(b"", last=True)
        state = format_bytes(model.state_bytes(1))
        info(f"{drawn:,} bytes in {format_duration(seconds)}: {drawn / seconds:.3g} bytes/s, state {state}")
        if record is not None:
            print_json(
                {
                    **record,
                    "text": whole.decode(errors="replace"),
                    "prompt_bytes": len(prompt),
                    "bytes": drawn,
                    "bytes_per_second": drawn / seconds,
                    "seconds": seconds,
                    "state_bytes": model.state_bytes(1),
                }
            )

    try:
        write(prompt)
        for part in stream.draw(index):
            write(part)
            drawn += len(part)
    except KeyboardInterrupt:  # the usual end of a text without end
        finish()
        raise
    finish()
