"""What commands open: a checkpoint, with its model on a device in a precision, and images."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linformer_cli.config import DataConfig
from linformer_cli.data import Split
from linformer_cli.errors import CheckpointError, DataError, UsageError, shorten
from linformer_cli.system.device import Choice, SamplingPrecision, product_dtype, torch_dtype
from linformer_cli.system.distributed import ALONE, Team
from linformer_cli.units import WINDOWS, Words, parse_count
from . import options
from .output import info, warn

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from linformer_cli.checkpoint import Checkpoint
    from linformer_cli.data.byte_windows import ByteWindows
    from linformer_cli.data.images import ImageSet
    from linformer_cli.data.look import Look
    from linformer_cli.data.pictures import Picture
    from linformer_cli.evaluation.bits import ImageNats
    from linformer_cli.model.pixel_model import PixelModel
    from linformer_cli.sampling.decode import Sampler


@dataclass(frozen=True)
class Session:
    """An opened model; `record` identifies it in results. `engine` is `parallel` if it predicts all values at once."""

    checkpoint: "Checkpoint"
    model: "PixelModel"
    device: str
    precision: str
    engine: str

    @property
    def record(self) -> dict[str, object]:
        return {
            "checkpoint": self.checkpoint.name,
            "checkpoint_sha256": self.checkpoint.digest,
            "attention": self.model.config.attention,
            "precision": self.precision,
            "device": self.device,
            "engine": self.engine,
        }

    @property
    def look(self) -> "Look":
        """How pictures become images for the model."""
        from linformer_cli.data.look import Look

        return Look.of(self.checkpoint.info)

    @property
    def words(self) -> Words:
        return self.checkpoint.info.data.words

    @property
    def products(self) -> "torch.dtype | None":
        """The argument `products` of an engine for this precision."""
        return product_dtype(self.precision)

    def read_pictures(self, files: Sequence[Path], failures: list[dict[str, Any]], **how: Any) -> "Iterator[Picture]":
        """Read pictures as `load_picture(..., **how)` does. Those of several that fail are added to `failures`."""
        from linformer_cli.data.pictures import load_picture

        look = self.look
        for path in files:
            try:
                first = load_picture(path, look, **how)
            except DataError as error:
                if len(files) == 1:
                    raise
                warn(f"Error: {error}")
                failures.append({"image": path, "error": str(error)})
                continue
            yield from (first, *first.others)

    def require_images(self, message: str) -> None:
        if self.words is WINDOWS:
            raise UsageError(message)

    def measure(
        self,
        images: "NDArray[np.uint8] | ByteWindows",
        batch: int,
        labels: "NDArray[np.int64] | None" = None,
        nats: "Callable[[Tensor, Tensor | None], Tensor] | None" = None,
    ) -> "ImageNats":
        """Do what `measure_nats` does. Raises `CheckpointError` if the model's predictions are not finite numbers."""
        from linformer_cli.evaluation.bits import measure_nats
        from linformer_cli.sampling.engines.base import DAMAGED

        measured = measure_nats(self.model, images, batch, nats=nats, labels=labels)
        if not measured.whole.isfinite().all():
            raise CheckpointError(f"'{self.checkpoint.name}': {DAMAGED}")
        return measured

    def choose_classes(self, wanted: str | None) -> list[int]:
        """Choose the classes that `--class` names: `7`, `1,7`, names, or `all`. Raises `UsageError` for others."""
        classes = self.model.config.classes
        if wanted is None:
            return []
        if not classes:
            raise UsageError(f"'{self.checkpoint.name}' was trained without --classes; drop --class {wanted}")
        if wanted.strip() == "all":
            return list(range(classes))
        names = {name: number for number, name in enumerate(self.checkpoint.info.data.class_names)}
        parts = [wanted] if wanted in names else [part.strip() for part in wanted.split(",")]
        chosen = [names.get(part, parse_count(part, classes - 1)) for part in parts]
        if None in chosen:
            known = f" or names ({shorten(', '.join(names))})" if names else ""
            listed = f"classes from 0 to {classes - 1}{known} separated by commas"
            raise UsageError(f"--class takes 'all' or {listed}, found '{wanted}'")
        return [number for number in chosen if number is not None]

    def choose_class(self, wanted: str | None, items: str) -> int | None:
        """Return the one class in the value of `--class`, or None. Raises `UsageError` unless the model can use it."""
        chosen, config = self.choose_classes(wanted), self.model.config
        if len(chosen) > 1 or (config.required_classes and not chosen):
            why = f"name the class of the {items}, 0 to {config.classes - 1}, with --class"
            raise UsageError(f"the model has classes: {why}")
        return chosen[0] if chosen else None


@dataclass(frozen=True, kw_only=True)
class DrawingOptions:
    """The options of `sample` and `complete` that choose how values are drawn."""

    guidance: options.ClassGuidance = None
    temperature: options.Temperature = 1.0
    top_k: options.TopK = None
    top_p: options.TopP = None
    seed: options.Seed = 0
    device: options.Device = "auto"
    precision: options.SamplingPrecision = "auto"
    engine: options.Engine = "auto"

    def open(self, checkpoint: str | None, team: Team = ALONE, forks: bool = False) -> Session:
        """Do what `open_session` does, after a check of the filters."""
        from linformer_cli.sampling.choose import Filters

        Filters(self.temperature, self.top_k, self.top_p)
        return open_session(checkpoint, self.device, self.precision, self.engine, team, forks)

    def build_sampler(self, session: Session, has_class: bool) -> "Sampler":
        """Return the sampler for images with a class or without. A default guidance other than 1 is said."""
        from linformer_cli.sampling.choose import Filters, choose_guidance
        from linformer_cli.sampling.decode import Sampler

        weight = choose_guidance(session.model, self.guidance, has_class)
        if self.guidance is None and weight != 1:
            info(f"with --guidance {weight}, so that images follow their class; 1 draws from p(image | class)")
        filters = Filters(self.temperature, self.top_k, self.top_p, weight)
        return Sampler(session.model, self.seed, filters, session.engine, session.products)


def open_session(
    name: str | None,
    device: str,
    precision: SamplingPrecision,
    engine: str | None = None,
    team: Team = ALONE,
    forks: bool = False,
) -> Session:
    """Load a checkpoint, and print the choices. Without `engine`, `auto` is fp32. `Engine.doubt` explains `forks`."""
    from linformer_cli.checkpoint import open_checkpoint
    from linformer_cli.model.mixers import describe_mixing

    place = team.choose_device(device)
    checkpoint, model = open_checkpoint(name, place.value, torch_dtype(precision))
    info(f"{checkpoint.name}: {describe_mixing(model.config.attention)}, {model.parameter_count():,} parameters")
    kind = Choice("fp32", "the default") if precision == "auto" else Choice(precision, "requested")
    chosen = "parallel"
    if engine is not None:
        from linformer_cli.sampling.engines import choose_engine
        from linformer_cli.sampling.precision import choose_sampling_precision

        choice = choose_engine(engine, model, product_dtype(precision), forks)
        chosen = choice.value
        info(f"engine {choice.value} ({choice.reason})")
        if precision == "auto":
            kind = team.from_leader(lambda: choose_sampling_precision(model, choice.value))
    info(f"device {place.value} ({place.reason}), precision {kind.value} ({kind.reason})")
    return Session(checkpoint, model, place.value, kind.value, chosen)


def load_training_images(
    data: DataConfig, team: Team = ALONE, look: "Look | None" = None
) -> "tuple[ImageSet, ImageSet]":
    """Load and count the training and validation images for a process of `team`; without `look`, one is measured."""
    from linformer_cli.data.images import load_for_training

    with team.leader_first():  # the leader may download the images
        train, validation = load_for_training(data, look)
    _show_notes(train)
    info(f"{data.name}: {len(train):,} training and {len(validation):,} validation {data.words.items}")
    return train, validation


def load_images_to_fit(name: str, split: Split, data_dir: str | None, look: "Look") -> "ImageSet":
    """Load one split of the data set `name` with a model's look. Raises `UsageError` for images of another size."""
    from linformer_cli.data.images import load_images

    images = load_images(name, split, data_dir, look)
    _show_notes(images)
    images.require_shape(look.shape)
    return images


def _show_notes(images: "ImageSet") -> None:
    for note in (*images.notes, *images.skipped):
        info(f"{images.name}: {note}")
