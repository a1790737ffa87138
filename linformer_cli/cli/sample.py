"""`lintx sample`: draw images from a model."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from linformer_cli.errors import UsageError
from linformer_cli.system.distributed import Team, join_team, notice_loss

from . import options
from .output import complain, print_json, say_halved, show_preview, talk
from .session import open_session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from linformer_cli.config import ImageShape
    from linformer_cli.report.numbered import NumberedImages
    from linformer_cli.sampling.decode import SampledBatch

# More images than that make no picture; where they are in files too, they need not be in memory.
_MOST_IN_GRID = 10_000


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
        typer.Option(
            "--files",
            help="Also every image as a numbered PNG in this folder; what is there already is not drawn again.",
            show_default=False,
        ),
    ] = None,
    first: Annotated[int, typer.Option("--first", min=0, max=2**62, help="The number of the first image.")] = 0,
    columns: Annotated[int | None, typer.Option("--columns", min=1, help="Of the grid.", show_default=False)] = None,
    scale: Annotated[
        int | None, typer.Option("--scale", min=1, max=64, help="Enlarges the grid's pixels.", show_default=False)
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

    `torchrun --nproc-per-node N -m linformer_cli sample ...` shares the images out among N processes. Whoever was
    stopped gives the same command again, with --files, and what is missing is drawn.

    Examples:

    - `lintx sample -n 64 -o grid.png`
    - `lintx sample runs/first -n 16 --temperature 0.9 --files digits/`
    - `lintx sample -n 4 -o - | display`
    - `lintx sample -n 16 --gif drawing.gif`
    - `torchrun --nproc-per-node 8 -m linformer_cli sample runs/first -n 10000 --files drawn`
    - `lintx sample runs/digits --class all -n 8`
    """
    if out == "-" and json:
        raise UsageError("-o - and --json both want stdout; give -o a file")
    options.require_output("-o", out, ".png")
    options.require_output("--gif", gif, ".gif")
    with join_team() as team, notice_loss("with --files, the same command draws what is missing"):
        session = open_session(
            options.one_checkpoint(checkpoint, checkpoint_option), device, precision.value, team=team
        )

        import numpy as np

        from linformer_cli.files import write_file
        from linformer_cli.report.animation import encode_gif, frame_rows, hide_rows
        from linformer_cli.report.grids import encode_png, render_grid
        from linformer_cli.report.numbered import NumberedImages
        from linformer_cli.sampling.choose import Filters
        from linformer_cli.sampling.decode import iter_samples
        from linformer_cli.units import format_bytes, format_duration

        filters = Filters(temperature, top_k, top_p)
        classed = session.model.config.classes
        labelled = [label for label in session.choose_classes(class_name) for _ in range(count)]
        if labelled:
            columns = columns or (count if len(labelled) > count else None)
            count = len(labelled)
        elif classed:
            talk(f"classes 0 to {classed - 1} in turn; --class chooses")
        chosen = session.choose_engine(engine)
        settings = {
            **session.record,
            "engine": chosen,
            "seed": seed,
            "batch": batch,
            **vars(filters),
            "class": class_name,
        }
        wanted = range(first, first + count)
        in_order = labelled or session.model.take_turns(wanted).tolist()
        labels = dict(zip(wanted, in_order, strict=True)) if classed else None

        def describe(index: int) -> dict[str, object]:
            return {**settings, "index": index, "class": None if labels is None else labels[index]}

        folder = None if files is None else NumberedImages(files, describe)
        there = _find(wanted, folder, team)
        if there:
            talk(f"{len(there)} of {count} images are in {files} already")
        # Dealt out in turn, so that it is the first ones that there are when a long job is stopped.
        missing = [index for index in wanted if index not in there] if there else wanted
        own = missing[team.rank :: team.count]
        began = time.perf_counter()
        work = _draw(
            lambda: iter_samples(session.model, own, batch, seed, filters, say_halved, None, chosen, labels),
            session.model.config.image,
            folder,
        )
        work = _add_up(team.gather(work))
        seconds = time.perf_counter() - began
        drawn, done = len(work.drawn), there.union(work.drawn)
        shown = [index for index in (wanted if folder is None else wanted[:_MOST_IN_GRID]) if index in done]
        if not shown:
            raise KeyboardInterrupt
        rate = drawn / seconds
        if team.leads:
            images = np.stack([work.images[index] for index in shown]) if folder is None else folder.read(shown)
            grid = encode_png(render_grid(images, columns, scale), {**settings, "count": len(shown)})
            if out == "-":
                sys.stdout.buffer.write(grid)
                sys.stdout.buffer.flush()
            else:
                write_file(out, grid)
            if gif is not None:
                rows = frame_rows(images.shape[1])
                frames = [render_grid(hide_rows(images, known), columns, scale) for known in rows]
                write_file(gif, encode_gif(frames, {**settings, "count": len(shown)}))
            if preview:
                show_preview(images)
        talk(
            f"{drawn} images in {format_duration(seconds)}: {rate:.3g} images/s, state {format_bytes(work.state_bytes)}"
        )
        if out != "-":
            talk(f"wrote {out}" + (f" and {drawn} files in {files}" if files else ""))
        if gif is not None:
            talk(f"wrote {gif}")
        if work.stopped:
            if team.leads:
                rest = "; the same command draws the rest" if files else ""
                complain(f"stopped after {len(done)} of {count} images, which are kept{rest}")
            team.wait()  # a process that ends sooner has the one that writes ended, too
            raise KeyboardInterrupt
        if json and team.leads:
            print_json(
                {
                    **settings,
                    "first": first,
                    "images": len(done),
                    "drawn": drawn,
                    "images_per_second": rate,
                    "seconds": seconds,
                    "state_bytes": work.state_bytes,
                    "values_per_pass": drawn * session.model.config.image.positions / work.passes if drawn else None,
                    "processes": team.count,
                    "out": out,
                    "gif": gif,
                    "files": files,
                }
            )


@dataclass
class _Work:
    """What was drawn: the numbers, and the images themselves where no folder has them."""

    drawn: list[int] = field(default_factory=list)
    images: "dict[int, NDArray[np.uint8]]" = field(default_factory=dict)
    state_bytes: int = 0
    passes: int = 0  # through the layers, of all images together
    stopped: bool = False


def _find(wanted: range, folder: "NumberedImages | None", team: Team) -> set[int]:
    """Which of the `wanted` images are in the folder; each process looks for its share of them."""
    if folder is None:
        return set()
    mine = team.share(len(wanted)) if folder.folder.exists() else range(0)
    found = {index for index in wanted[mine.start : mine.stop] if folder.holds(index)}
    return set[int]().union(*team.gather(found))


def _draw(parts: "Callable[[], Iterator[SampledBatch]]", shape: "ImageShape", folder: "NumberedImages | None") -> _Work:
    """Draw all `parts`, into the folder if there is one. Ctrl-C ends it, and what is done is kept."""
    from linformer_cli.data.sequence import values_to_images

    work = _Work()
    try:
        for part in parts():
            work.state_bytes = max(work.state_bytes, part.state_bytes)
            work.passes += part.passes * len(part.indices)
            for index, image in zip(part.indices, values_to_images(part.values, shape), strict=True):
                if folder is None:
                    work.images[index] = image
                else:
                    folder.write(index, image)  # as they come: whoever stops a long job keeps what is done
                work.drawn.append(index)
    except KeyboardInterrupt:
        work.stopped = True
    return work


def _add_up(works: list[_Work]) -> _Work:
    """What all processes drew."""
    total = _Work()
    for work in works:
        total.drawn += work.drawn
        total.images |= work.images
        total.state_bytes = max(total.state_bytes, work.state_bytes)
        total.passes += work.passes
        total.stopped = total.stopped or work.stopped
    return total
