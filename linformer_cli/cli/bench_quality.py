"""`lintx bench quality`: how close samples are to the images of a data set."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linformer_cli.errors import DataError, UsageError
from linformer_cli.system.signals import StopRequest
from . import options
from .config_options import option, with_fields
from .display import Bar
from .output import info, warn_smaller_batch
from .reports import run_and_show
from .session import load_images_to_fit, open_session

if TYPE_CHECKING:
    from linformer_cli.bench.quality import QualityReport
    from linformer_cli.data.images import ImageSet
    from linformer_cli.sampling.decode import Sampler

_SHOWN = 24


@dataclass(frozen=True, kw_only=True)
class QualityOptions:
    checkpoint: options.CheckpointArgument = None
    data: str | None = option(None, "Data set with labels. Default: the model's training data set.", metavar="NAME")
    data_dir: options.DataDir = None
    count: int = option(
        1000, "Number of samples, divided equally among the model's classes.", "-n", "--count", min=1, max=100_000
    )
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

    Samples, test images and training images are compared in the same way. A judge, which is a small classifier of the
    data set's images, is trained first (a minute or two for MNIST) and cached. Samples depend on --seed as in `lintx
    sample`; a model with classes draws the same number of images of each class, as with `--class all`.

    - Frechet distance: to all test images, between Gaussians in the features of the judge's hidden layer. It is not the
      published FID. The distance of the training images is about the lowest that a model can reach.
    - sure: share of images to which the judge gives one class with probability 0.9 or more.
    - right class: share of images that the judge assigns to the requested class, or to the label.
    - nearest training image: mean Euclidean distance to it, over all values from 0 to 255. A model that copies training
      images is far below the test images.
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
    """Raise an error if there are not more images than `features`, or if there is only one class."""
    if count <= features:
        raise UsageError(
            f"{count} samples are too few: the distance in {features} features needs more samples than features; "
            "increase --count"
        )
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
    """Draw a picture of samples spread over all of `samples`, each above its nearest image of `training`."""
    from linformer_cli.evaluation.nearest import find_nearest, render_nearest

    shown = samples[[index * len(samples) // _SHOWN for index in range(_SHOWN)]]
    return render_nearest(shown, training[find_nearest(shown, training).indices])
