"""`lintx bench codec`: sizes and speeds of compressed images."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from linformer_cli.data import Split
from linformer_cli.system.signals import StopRequest
from . import options
from .config_options import option, with_fields
from .output import info
from .reports import run_and_show
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

    Examples:

    - `lintx bench codec`
    - `lintx bench codec --checkpoint fashion-wide --limit 256 --picture bits.png`

    The same images are stored as by `lintx compress`, as optimised PNGs, as lossless WebP and JPEG XL (if its plugin is
    installed), and all together with gzip, xz and zstd. Every format must give the same pixels back. Speeds are medians
    over interleaved rounds; those of lintx are also shown relative to drawing images. Published figures for the same
    data set follow. Needs the packages of `pip install '.[compress]'`.
    """
    options.require_output("--picture", picture, ".png")
    session = open_session(checkpoint, "cpu", "int8", "native")
    session.require_images(
        "bench codec is for models of images; 'lintx compress' compares a model of bytes with others"
    )

    from linformer_cli.bench.codec import CodecSettings, draw_bits, run_codec_bench
    from linformer_cli.report.grids import encode_png

    name, model = data or session.checkpoint.info.data.name, session.model
    found = load_images_to_fit(name, split, data_dir, session.look)
    classes = model.config.required_classes
    labels = found.require_labels(classes)[:limit] if classes else None
    images = found.images[:limit]
    info(f"{len(images):,} of {len(found):,} {split} images of {name}")
    at_once = min(batch, len(images))
    settings = CodecSettings(len(images), at_once, repeats, at_once)
    shown = images[:_SHOWN], None if labels is None else labels[:_SHOWN]
    pictures: dict[str, Any] = {}

    def run(stop: StopRequest) -> "CodecReport":
        report = run_codec_bench(model, name, images, labels, settings, stop.raise_if_set)
        if report.ended == "finished":
            pictures["picture"] = lambda kind: encode_png(draw_bits(model, *shown), session.record)
        return report

    document = {**session.record, "data": name, "split": split}
    run_and_show(style, json, run, {"picture": picture}, document, pictures)
