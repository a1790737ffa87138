"""`lintx bench codec`: sizes and speeds of compressed images."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from linformer_cli.data import Split
from linformer_cli.errors import UsageError
from linformer_cli.report.tables import list_columns
from linformer_cli.system.environment import describe_machine
from linformer_cli.units import WINDOWS

from . import options
from .config_options import option, with_fields
from .output import info, print_json, print_tables
from .session import load_images_to_fit, open_session

if TYPE_CHECKING:
    from linformer_cli.bench.codec import CodecReport

_SHOWN = 12


@with_fields
def codec(
    checkpoint: options.CheckpointOption = None,
    data: options.ModelData = None,
    split: Split = option("test", "The split of the data set."),
    data_dir: options.DataDir = None,
    limit: int = option(1000, "Use only the first N images of the split.", min=1),
    batch: int = option(256, "Images coded at once, and images of a block.", min=1, max=2**16),
    repeats: options.Repeats = 3,
    picture: Path | None = option(None, "Also draw where the bits go, to a .png file."),
    style: options.Style = "table",
    json: options.Json = False,
) -> None:
    """Measure size and speed of compression.

    The same images are stored as by `lintx compress`, as optimised PNGs, as lossless WebP and JPEG XL (if its plugin is
    installed), and all together with gzip, xz and zstd. Every format must give the same pixels back. Speeds are medians
    over interleaved rounds; those of lintx are also shown relative to drawing images. Published figures for the same
    data set follow. Needs the packages of `pip install '.[compress]'`.

    Examples:

    - `lintx bench codec`
    - `lintx bench codec --checkpoint fashion-wide --limit 256 --picture bits.png`
    """
    options.require_output("--picture", picture, ".png")
    session = open_session(checkpoint, "cpu", "int8", "native")
    if session.checkpoint.info.data.words is WINDOWS:
        raise UsageError("bench codec is for models of images; 'lintx compress' compares a model of bytes with others")

    from linformer_cli.bench.codec import CodecSettings, draw_bits, run_codec_bench
    from linformer_cli.files import write_file
    from linformer_cli.report.grids import encode_png
    from linformer_cli.system.signals import catch_signals

    name, model = data or session.checkpoint.info.data.name, session.model
    found = load_images_to_fit(name, split, data_dir, session.look)
    classes = model.config.required_classes
    labels = found.require_labels(classes)[:limit] if classes else None
    images = found.images[:limit]
    info(f"{len(images):,} of {len(found):,} {split} images of {name}")
    at_once = min(batch, len(images))
    settings = CodecSettings(len(images), at_once, repeats, at_once)
    with catch_signals() as stop:
        report = run_codec_bench(model, name, images, labels, settings, stop.raise_if_set)
    if report.ended != "finished":
        picture = None
    if json:
        print_json({**session.record, "data": name, "split": split, "picture": picture, **vars(report)})
    else:
        _print(report, style)
    if picture is not None:
        shown = images[:_SHOWN], None if labels is None else labels[:_SHOWN]
        write_file(picture, encode_png(draw_bits(model, *shown), session.record))
        info(f"wrote {picture}")
    stop.raise_if_set(options.STOPPED)


def _print(report: "CodecReport", style: Any) -> None:
    from linformer_cli.bench.codec import CodecRow
    from linformer_cli.bench.published import PublishedSize

    published = report.published, list_columns(PublishedSize)
    print_tables(style, (report.rows, list_columns(CodecRow)), published)
    if style == "csv":
        return
    if report.model_bits_per_dim is not None and report.drawn_per_second is not None:
        info(
            f"the model's own {report.model_bits_per_dim:.4f} bits/dim; drawing: {report.drawn_per_second:.3g} images/s"
        )
    info(describe_machine(report.environment))
