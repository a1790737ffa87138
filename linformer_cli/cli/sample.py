"""`lintx sample`: draw images from a model."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from linformer_cli.errors import UsageError

from . import options
from .output import complain, print_json, say_halved, show_preview, talk
from .session import open_session


def sample(
    checkpoint: options.CheckpointArgument = None,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many images.")] = 16,
    batch: Annotated[int, typer.Option("--batch", min=1, help="How many at once.")] = 64,
    out: Annotated[
        str, typer.Option("-o", "--out", help="The grid as PNG; - writes it to stdout.", metavar="FILE")
    ] = "samples.png",
    class_name: Annotated[
        str | None,
        typer.Option(
            "--class",
            help="Of a model with classes: 7, or 1,7, or all; -n images of each, a row for each. Default: all in turn.",
            show_default=False,
            metavar="CLASS",
        ),
    ] = None,
    files: Annotated[
        Path | None,
        typer.Option("--files", help="Also every image as a numbered PNG in this folder.", show_default=False),
    ] = None,
    columns: Annotated[int | None, typer.Option("--columns", min=1, help="Of the grid.", show_default=False)] = None,
    scale: Annotated[
        int | None, typer.Option("--scale", min=1, help="Enlarges the grid's pixels.", show_default=False)
    ] = None,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    precision: options.SamplingPrecision = options.PrecisionName.AUTO,
    engine: options.Engine = "auto",
    gif: Annotated[
        Path | None,
        typer.Option("--gif", help="Also an animation of the grid being drawn.", show_default=False, metavar="FILE"),
    ] = None,
    preview: Annotated[bool, typer.Option(help="Show some images in the terminal.")] = True,
    checkpoint_option: options.CheckpointOption = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Draw images from a model.

    The model is stepped value by value; with linear attention its memory does not grow with the image. Filters act in
    this order: temperature, top-k, top-p; by default none does, and images are drawn from exactly the distribution that
    bits/dim are counted with. They act on the probabilities of the 256 values, also where the model is a mixture of
    logistics. Image number i depends on --seed and i, not on --batch.

    Examples:

    - `lintx sample -n 64 -o grid.png`
    - `lintx sample runs/first -n 16 --temperature 0.9 --files digits/`
    - `lintx sample -n 4 -o - | display`
    - `lintx sample -n 16 --gif drawing.gif`
    - `lintx sample runs/digits --class all -n 8`
    """
    if out == "-" and json:
        raise UsageError("-o - and --json both want stdout; give -o a file")
    options.require_ending("-o", out, ".png")
    options.require_ending("--gif", gif, ".gif")
    session = open_session(options.one_checkpoint(checkpoint, checkpoint_option), device, precision.value)

    import numpy as np
    from numpy.typing import NDArray

    from linformer_cli.data.sequence import values_to_images
    from linformer_cli.files import write_file
    from linformer_cli.report.animation import encode_gif, frame_rows, hide_rows
    from linformer_cli.report.grids import encode_png, render_grid
    from linformer_cli.report.terminal import format_bytes, format_duration
    from linformer_cli.sampling.choose import Filters
    from linformer_cli.sampling.decode import iter_samples

    filters = Filters(temperature, top_k, top_p)
    classes = session.choose_classes(class_name)
    labels: list[int] | None = None
    if classes:
        labels = [label for label in classes for _ in range(count)]
        columns = columns or (count if len(classes) > 1 else None)
        count = len(labels)
    elif session.model.config.classes:
        labels = session.model.take_turns(range(count)).tolist()
        talk(f"classes 0 to {session.model.config.classes - 1} in turn; --class chooses")
    chosen = session.choose_engine(engine)
    settings = {**session.record, "engine": chosen, "seed": seed, "batch": batch, **vars(filters), "class": class_name}
    began = time.perf_counter()
    batches: list[NDArray[np.uint8]] = []
    drawn, state_bytes, stopped = 0, 0, False
    try:
        for part in iter_samples(session.model, count, batch, seed, filters, say_halved, None, chosen, labels):
            images = values_to_images(part.values, session.model.config.image)
            if files is not None:
                # Written as they come: whoever stops a long job keeps what is done.
                for index, image in enumerate(images, start=drawn):
                    about = {**settings, "index": index, "class": None if labels is None else labels[index]}
                    png = encode_png(render_grid(image[None], scale=1), about)
                    write_file(files / f"{index:05d}.png", png)
            batches.append(images)
            drawn += len(images)
            state_bytes = max(state_bytes, part.state_bytes)
    except KeyboardInterrupt:
        if not drawn:
            raise
        stopped = True
    seconds = time.perf_counter() - began
    everything = np.concatenate(batches)
    png = encode_png(render_grid(everything, columns, scale), {**settings, "count": drawn})
    if out == "-":
        sys.stdout.buffer.write(png)
        sys.stdout.buffer.flush()
    else:
        write_file(out, png)
    if gif is not None:
        shown = frame_rows(everything.shape[1])
        frames = [render_grid(hide_rows(everything, rows), columns, scale) for rows in shown]
        write_file(gif, encode_gif(frames, {**settings, "count": drawn}))
    if preview:
        show_preview(everything)
    rate = drawn / seconds
    talk(f"{drawn} images in {format_duration(seconds)}: {rate:.3g} images/s, state {format_bytes(state_bytes)}")
    if out != "-":
        talk(f"wrote {out}" + (f" and {drawn} files in {files}" if files else ""))
    if gif is not None:
        talk(f"wrote {gif}")
    if stopped:
        complain(f"stopped after {drawn} of {count} images, which are kept")
        raise KeyboardInterrupt
    if json:
        print_json(
            {
                **settings,
                "images": drawn,
                "images_per_second": rate,
                "seconds": seconds,
                "state_bytes": state_bytes,
                "out": out,
                "gif": gif,
                "files": files,
            }
        )
