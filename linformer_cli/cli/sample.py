"""`lintx sample`: draw images from a model."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from linformer_cli.errors import UsageError
from linformer_cli.files import STREAM
from linformer_cli.system.distributed import join_team, notice_loss
from linformer_cli.units import WINDOWS

from . import options
from .output import info, print_json, show_preview, warn, warn_smaller_batch
from .session import open_session
from .text import print_text, read_prompt, refuse_options

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# A grid of more images would be too large to look at. With --files, the other images are not kept in memory.
_MOST_IN_GRID = 10_000
# These bounds are far above any use. They keep image numbers within 63 bits, even with --first and classes.
_MOST_IMAGES, _LAST_FIRST = 2**40, 2**62
_IMAGES, _GRID = 16, "samples.png"


def sample(
    checkpoint: options.CheckpointArgument = None,
    count: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--count",
            min=1,
            max=_MOST_IMAGES,
            help="Number of images (default: 16), or of bytes (default: without end if the model needs no positions, "
            "otherwise one window).",
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            help="For a model of bytes: the text to continue, or '-' to read it from stdin.",
            metavar="TEXT",
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Images drawn at once.")] = 64,
    out: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--out",
            help=f"PNG file for the grid; '-' writes it to stdout. Default: {_GRID}.",
            metavar="FILE",
        ),
    ] = None,
    class_name: Annotated[
        str | None,
        typer.Option(
            "--class",
            help="For a model with classes: the classes to draw, separated by commas (for example '1,7'), or 'all'. "
            "Draws -n images of each class, one row per class. Default: -n images, without a class if the model was "
            "trained with --hide-class, or else all classes in turn.",
            metavar="CLASS",
        ),
    ] = None,
    files: Annotated[
        Path | None,
        typer.Option(
            "--files",
            help="Also write every image as a numbered PNG to this folder; existing images are not drawn again.",
        ),
    ] = None,
    first: Annotated[
        int, typer.Option("--first", min=0, max=_LAST_FIRST, help="Number of the first image, or of the text.")
    ] = 0,
    columns: Annotated[int | None, typer.Option("--columns", min=1, help="Columns of the grid.")] = None,
    scale: options.Scale = None,
    guidance: options.ClassGuidance = None,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    precision: options.SamplingPrecision = "auto",
    engine: options.Engine = "auto",
    gif: Annotated[
        Path | None,
        typer.Option("--gif", help="Also write an animation of the grid being drawn.", metavar="FILE"),
    ] = None,
    preview: Annotated[bool, typer.Option(help="Show some images in the terminal.")] = True,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Draw images or text from a model.

    A model of bytes prints text on stdout while it draws: safe characters in a terminal, and the bytes themselves in a
    pipe. With --json, it prints one document at the end. It takes no options about images.

    The model draws one value after another; with linear attention, its memory does not grow with the image. Filters
    apply in this order: temperature, top-k, top-p. Without filters and with --guidance 1, images are drawn from the
    distribution that bits/dim measure. Filters change the probabilities of the single values, even for a mixture of
    logistics. The random numbers for image number i depend on --seed and i, not on --batch.

    `torchrun --nproc-per-node N -m linformer_cli sample ...` splits the images among N processes. With --files, an
    interrupted command can be repeated: it draws only the missing images.

    Examples:

    - `lintx sample -n 64 -o grid.png`
    - `lintx sample runs/first -n 16 --temperature 0.9 --files digits/`
    - `lintx sample -n 4 -o - | display`
    - `lintx sample -n 16 --gif drawing.gif`
    - `torchrun --nproc-per-node 8 -m linformer_cli sample runs/first -n 10000 --files drawn`
    - `lintx sample --class 7 -n 16`
    - `lintx sample runs/text --prompt 'import ' -n 500 --temperature 0.8`
    """
    if out == STREAM and json:
        raise UsageError("-o - and --json both want stdout; give -o a file")
    options.require_output("-o", out, ".png", stdout=True)
    options.require_output("--gif", gif, ".gif")
    options.require_distinct(out, gif)
    options.require_output("--files", None if files is None else files / "00000.png", ".png")
    with join_team() as team, notice_loss("with --files, the same command draws what is missing"):
        from linformer_cli.sampling.choose import Filters
        from linformer_cli.sampling.decode import Sampler

        filters = Filters(temperature, top_k, top_p)
        session = open_session(checkpoint, device, precision, engine, team)
        filters = replace(filters, guidance=session.choose_guidance(guidance, class_name is not None))
        sampler = Sampler(session.model, seed, filters, session.engine, session.products)
        if session.checkpoint.info.data.words is WINDOWS:
            of_images = {"-o": out, "--class": class_name, "--files": files, "--columns": columns, "--scale": scale}
            refuse_options({**of_images, "--gif": gif, "--guidance": guidance})
            if team.count > 1:
                raise UsageError("several processes draw images only; start one process to draw text")
            of_text = {key: value for key, value in vars(filters).items() if key != "guidance"}
            record = {**session.record, "seed": seed, **of_text, "first": first} if json else None
            return print_text(sampler, read_prompt(prompt), count, first, record)
        if prompt is not None:
            raise UsageError(f"--prompt is for models of bytes, and '{session.checkpoint.name}' draws images; drop it")

        out = out or _GRID
        options.require_output("-o", out, ".png", stdout=True)

        from linformer_cli.report.numbered import NumberedImages
        from linformer_cli.units import count_words, format_bytes, format_duration

        from .drawing import ImageNumbers, add_up, draw

        count = _IMAGES if count is None else count
        numbers = ImageNumbers(first, count, session.choose_classes(class_name), session.model.config.required_classes)
        if session.model.config.classes and not numbers.chosen:
            drawn_as = f"classes 0 to {numbers.turns - 1} in turn" if numbers.turns else "images without a class"
            info(f"{drawn_as}; select with --class")
        asked = {"seed": seed, "batch": batch, **vars(filters), "class": class_name}
        settings = {**session.record, **asked}

        def describe(index: int) -> dict[str, object]:
            return {**settings, "index": index, "class": numbers.class_of(index)}

        wanted = numbers.all
        folder = None if files is None else NumberedImages(files, describe)
        own = draw(sampler, numbers, batch, folder, _MOST_IN_GRID, team, warn_smaller_batch)
        work = add_up(team.gather(own))
        drawn, done, shown = work.drawn, work.drawn + work.found, work.shown
        if work.found:
            info(f"{work.found} of {len(wanted)} images are already in {files}")
        if not shown:
            raise KeyboardInterrupt
        rate = drawn / work.seconds if drawn else 0.0
        if team.leads:
            images = work.stack(shown) if folder is None else folder.read(shown)
            row = columns or (count if len(numbers.chosen) > 1 else None)
            _write_pictures(images, out, gif, (row, scale), {**settings, "count": len(shown)})
            if preview:
                show_preview(images)
        state = format_bytes(work.state_bytes)
        info(f"{count_words(drawn, 'image')} in {format_duration(work.seconds)}: {rate:.3g} images/s, state {state}")
        if out != STREAM:
            info(f"wrote {out}" + (f" and {drawn} files in {files}" if files else ""))
        if gif is not None:
            info(f"wrote {gif}")
        if json and team.leads:
            print_json(
                {
                    **settings,
                    "first": first,
                    "images": done,
                    "drawn": drawn,
                    "images_per_second": rate,
                    "seconds": work.seconds,
                    "state_bytes": work.state_bytes,
                    "values_per_pass": drawn * session.model.config.image.positions / work.passes if drawn else None,
                    "processes": team.count,
                    "out": out,
                    "gif": gif,
                    "files": files,
                }
            )
        if work.stopped:
            if team.leads:
                rest = "; the same command draws the rest" if files else ""
                warn(f"stopped after {done} of {len(wanted)} images, which are kept{rest}")
            team.wait()  # the end of one process ends the others, and one of them may still be writing
            raise KeyboardInterrupt


def _write_pictures(
    images: "NDArray[np.uint8]",
    out: str,
    gif: Path | None,
    layout: tuple[int | None, int | None],
    record: dict[str, object],
) -> None:
    """Write the grid as a PNG and, if requested, an animation; `layout` is (columns, scale)."""
    from linformer_cli.files import write_file
    from linformer_cli.report.animation import encode_gif, frame_rows, hide_rows
    from linformer_cli.report.grids import encode_png, render_grid

    grid = encode_png(render_grid(images, *layout), record)
    if out == STREAM:
        sys.stdout.buffer.write(grid)
        sys.stdout.buffer.flush()
    else:
        write_file(out, grid)
    if gif is not None:
        frames = [render_grid(hide_rows(images, known), *layout) for known in frame_rows(images.shape[1])]
        write_file(gif, encode_gif(frames, record))
