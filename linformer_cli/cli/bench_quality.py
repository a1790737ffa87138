"""Benchmarks of quality: of samples (`quality`), of compression (`codec`) and of random features (`approximation`)."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from linformer_cli.config import LARGEST_SIZE
from linformer_cli.data import Split
from linformer_cli.errors import DataError, UsageError
from linformer_cli.system.signals import StopRequest
from . import options
from .config_options import count, numbers, option, several, sizes, with_fields
from .display import Bar
from .output import info, warn_smaller_batch
from .reports import run_and_show
from .session import load_images_to_fit, open_session

if TYPE_CHECKING:
    from linformer_cli.bench.codec import CodecReport
    from linformer_cli.bench.quality import QualityReport
    from linformer_cli.data.images import ImageSet
    from linformer_cli.sampling.decode import Sampler

_SHOWN, _DRAWN = 24, 12


@dataclass(frozen=True, kw_only=True)
class QualityOptions:
    checkpoint: options.CheckpointArgument = None
    data: str | None = option(None, "Data set with labels. Default: the model's training data set.", metavar="NAME")
    data_dir: options.DataDir = None
    count: int = option(1000, "Number of samples, divided among the classes.", "-n", "--count", min=1, max=100_000)
    batch: int = option(64, "Images drawn at once.", min=1)
    guidance: options.Guidance = 1.0
    temperature: options.Temperature = 1.0
    top_k: options.TopK = None
    top_p: options.TopP = None
    seed: options.Seed = 0
    precision: options.SamplingPrecision = "auto"
    engine: options.Engine = "auto"
    image: Path | None = option(None, "Also draw samples to a .png file, each above its nearest training image.")
    style: options.Style = "table"
    json: options.Json = False


@with_fields
def quality(asked: QualityOptions) -> None:
    """Compare samples with test images.

    Examples:

    - `lintx bench quality fashion-wide --temperature 0.9 --image nearest.png`
    - `lintx bench quality runs/first --data mnist -n 5000 --json`

    A judge, a small classifier of the data set's images, compares samples, test images and training images. It is
    trained first (a minute or two for MNIST) and cached. The table shows the Frechet distance to all test images in
    the judge's features (not the published FID), how many images the judge is sure of and recognises, and the distance
    to the nearest training image.
    """
    options.require_output("--image", asked.image, ".png")
    session = open_session(asked.checkpoint, "cpu", asked.precision, asked.engine)
    session.require_images("bench quality is for models of images; 'lintx eval' measures a model of bytes")

    import numpy as np

    from linformer_cli.bench.quality import RECIPE, load_judge, measure_quality
    from linformer_cli.data.sequence import paint
    from linformer_cli.report.grids import encode_png
    from linformer_cli.sampling.choose import Filters, check_guidance
    from linformer_cli.sampling.decode import Sampler

    check_guidance(session.model, asked.guidance, session.model.config.classes > 0)
    record, model, shape = session.checkpoint.info, session.model, session.model.config.image
    filters = Filters(asked.temperature, asked.top_k, asked.top_p, asked.guidance)
    name = asked.data or record.data.name
    sets = [load_images_to_fit(name, split, asked.data_dir, session.look) for split in ("train", "test")]
    train, test = (replace(images, images=paint(images.images[:], shape)) for images in sets)
    classes, own = max(train.classes, test.classes), model.config.classes
    labels, _ = (images.require_labels(classes, "the judge") for images in (train, test))
    if own not in (0, classes):
        raise UsageError(f"the model has {own} classes, and '{name}' has {classes}; name its own data set with --data")
    given = np.arange(own).repeat(asked.count // own) if own else None
    total = asked.count if given is None else len(given)
    _require_enough(RECIPE.features, total, train, test)
    pictures: dict[str, Any] = {}

    def run(stop: StopRequest) -> "QualityReport":
        with Bar("training the judge", RECIPE.updates, "updates") as bar:

            def on_update(update: int) -> None:
                stop.raise_if_set()
                bar.show(update)

            judge = load_judge(train.images[:], labels, classes, RECIPE, on_update)
        sampler = Sampler(model, asked.seed, filters, session.engine, session.products)
        samples = _draw(sampler, total, asked.batch, given, stop)
        pictures["image"] = lambda kind: encode_png(_draw_nearest(samples, train.images[:]), session.record)
        info("comparing the samples with the test and training images")
        bits = record.training.validation_bits_per_dim if name == record.data.name else None
        return measure_quality(judge, samples, given, train, test, bits, stop.raise_if_set)

    drawn = {"count": total, "seed": asked.seed, "batch": asked.batch, **vars(filters)}
    document = {**session.record, "data": name, **drawn}
    run_and_show(asked.style, asked.json, run, {"image": asked.image}, document, pictures)


def _require_enough(features: int, count: int, train: "ImageSet", test: "ImageSet") -> None:
    if count <= features:
        why = f"the distance in {features} features needs more samples than features; increase --count"
        raise UsageError(f"{count} samples are too few: {why}")
    for images in (train, test):
        if len(images) <= features:
            raise DataError(f"'{images.name}' has {len(images)} {images.split} images; more than {features} are needed")
    if train.classes == 1:
        raise DataError(f"all images of '{train.name}' have the same label; the judge needs at least 2 classes")


def _draw(sampler: "Sampler", count: int, batch: int, asked: Any, stop: StopRequest) -> Any:
    """Draw `count` images, uint8 [count, H, W, C], of the classes `asked` if any."""
    import torch

    from linformer_cli.data.sequence import paint, values_to_images

    values: list[torch.Tensor] = []
    with Bar("drawing", count, "samples") as bar:
        for part in sampler.iter_batches(range(count), batch, asked, stop.raise_if_set, warn_smaller_batch):
            values.append(part.values)
            bar.show(sum(map(len, values)))
    shape = sampler.model.config.image
    return paint(values_to_images(torch.cat(values), shape), shape)


def _draw_nearest(samples: Any, training: Any) -> Any:
    from linformer_cli.evaluation.nearest import find_nearest, render_nearest

    shown = samples[[index * len(samples) // _SHOWN for index in range(_SHOWN)]]
    return render_nearest(shown, training[find_nearest(shown, training).indices])


@with_fields
def codec(
    checkpoint: options.CheckpointOption = None,
    data: options.ModelData = None,
    split: Split = option("test", "The split of the data set."),
    data_dir: options.DataDir = None,
    limit: int = option(1000, "Use only the first N images.", min=1),
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

    Stores the same images as `lintx compress`, as PNG, lossless WebP and JPEG XL (if its plugin is installed), and all
    together with gzip, xz and zstd. Every format must give the same pixels back. Needs `pip install '.[compress]'`.
    """
    options.require_output("--picture", picture, ".png")
    session = open_session(checkpoint, "cpu", "int8", "native")
    session.require_images("bench codec is for models of images; 'lintx compress' compares models of bytes with others")

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
    shown = images[:_DRAWN], None if labels is None else labels[:_DRAWN]
    pictures: dict[str, Any] = {}

    def run(stop: StopRequest) -> "CodecReport":
        report = run_codec_bench(model, name, images, labels, settings, stop.raise_if_set)
        if report.ended == "finished":
            pictures["picture"] = lambda kind: encode_png(draw_bits(model, *shown), session.record)
        return report

    document = {**session.record, "data": name, "split": split}
    run_and_show(style, json, run, {"picture": picture}, document, pictures)


@with_fields
def approximation(
    features: list[int] = sizes("16,32,64,128,256", "Numbers of features m."),
    norms: list[float] = numbers("0.25,0.5,1,2", "Lengths of queries and keys in units of sqrt(K)."),
    maps: str = several("positive,hyperbolic,trig", "Feature maps: positive, hyperbolic, trig."),
    draws: int = count(20, "Number of draws of random inputs and directions."),
    positions: int = option(128, "Sequence length T.", min=2, max=LARGEST_SIZE),
    head_width: int = option(32, "Width K of a head.", min=2, max=LARGEST_SIZE),
    seed: options.Seed = 0,
    plot: Path | None = option(None, "Also plot medians and quartiles (.png or .svg)."),
    error: Literal["output", "bounded-output", "kernel", "small-kernel"] = option(
        "output", "The error that the table and the plot show."
    ),
    style: options.Style = "table",
    json: options.Json = False,
) -> None:
    """Measure the errors of random features.

    Examples:

    - `lintx bench approximation --features 32,64,128 --norms 1,2 --plot errors.svg`
    - `lintx bench approximation --maps positive --draws 100 --format csv`

    Reports mean squared errors of performer attention relative to causal softmax attention in float64, with orthogonal
    or independent random directions. `output` and `bounded-output` are errors of the outputs, without and with the
    mechanism's bound on the denominator of `trig`; `kernel` and `small-kernel` are errors of the estimates of
    exp(q . k / sqrt(K)), over all pairs and over the smallest quarter. Ctrl-C shows the results so far.
    """
    options.require_plots(plot)

    from linformer_cli.bench.approximation import Draws, measure_approximation

    names = [name.strip() for name in maps.split(",")]
    settings = Draws(positions, head_width, draws, seed)
    run_and_show(
        style,
        json,
        lambda stop: measure_approximation(
            features, norms, names, draws=settings, error=error, check=stop.raise_if_set
        ),
        {"plot": plot},
    )
