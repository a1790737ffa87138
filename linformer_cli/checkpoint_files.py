"""The files of a checkpoint: where a name leads, what `config.json` records, and replacing one folder with another."""

import os
import shutil
import time
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from .config import (
    LARGEST_SIZE,
    Colour,
    Count,
    CountOrZero,
    Fit,
    ImagesSeen,
    ModelConfig,
    Origin,
    PositiveOrZero,
    Size,
    TrainConfig,
    choose_words,
)
from .documents import Config
from .errors import CheckpointError, describe_reason, unknown_name
from .files import flush_folder
from .hub import PREFIX, fetch_repository
from .units import WINDOWS, Words, format_bits
from .version import __version__

DEFAULT_CHECKPOINT = "mnist-deep"
WEIGHTS, CONFIG, TRAINING, CARD = "model.safetensors", "config.json", "training.safetensors", "README.md"
REPLACED = ".replaced"  # the end of the name of an older checkpoint, between the renames of a swap and until it is gone
CHECKPOINT_FORMAT = 1
LICENSE = r"^[a-z0-9][a-z0-9.-]*$"  # the identifiers of the Hub, such as mit or cc-by-4.0


def shipped_checkpoints() -> dict[str, Path]:
    """Return the folders of the shipped models by name. They are in the installed package or in the repository."""
    package = Path(__file__).resolve().parent
    folders = (package / "checkpoints", package.parent / "checkpoints")
    found = next((folder for folder in folders if folder.is_dir()), None)
    return {path.parent.name: path.parent for path in sorted(found.glob(f"*/{CONFIG}"))} if found else {}


def find_shipped_name(path: Path) -> str:
    """Find the name of the shipped model in folder `path`, or ""."""
    return next((name for name, folder in shipped_checkpoints().items() if folder == path.resolve()), "")


def find_checkpoint(name: str | Path | None = None) -> Path:
    """Find the checkpoint folder that `name` refers to.

    `name` is a run folder, a checkpoint folder, the name of a shipped model, or `hf:USER/NAME`, which is fetched from
    the Hub; None means the shipped default. Existing paths take precedence over shipped models. The checkpoint of a run
    is its best, or its last if there is no best yet.
    Raises `CheckpointError` for a path without a checkpoint, and `UsageError` for an unknown name.
    """
    if name is None:  # the shipped model, even if a folder here has the same name
        return find_shipped(DEFAULT_CHECKPOINT)
    if str(name).startswith(PREFIX):
        if (found := _settled(fetch_repository(str(name), (CONFIG, WEIGHTS, CARD)))) is None:
            raise CheckpointError(f"'{name}' is not a lintx checkpoint: it has no {CONFIG}")
        return found
    try:
        return _find(name, Path(name))
    except (OSError, ValueError) as error:  # the name cannot be a path, for example because it is too long
        raise CheckpointError(f"no checkpoint at '{str(name)[:200]}': {describe_reason(error)}") from None


def names_model(name: str) -> bool:
    """Return whether an argument that may be a picture is a model: a folder, `hf:USER/NAME`, or without ending."""
    path = Path(name)
    return name.startswith(PREFIX) or path.is_dir() or not (path.suffix or path.exists())


def _find(name: str | Path, path: Path) -> Path:
    if path.is_dir():
        for folder in (path, path / "best", path / "last"):
            if (found := _settled(folder)) is not None:
                return found
        raise CheckpointError(f"'{path}' holds no checkpoint: it has no {CONFIG}, best/ or last/")
    if path.is_file():
        if path.name in (WEIGHTS, CONFIG):
            return path.parent
        raise CheckpointError(
            f"'{path}' is a file; a lintx checkpoint is a folder with {WEIGHTS} and {CONFIG}, and pickled files "
            "(.pt, .pth, .ckpt) are never opened, since opening one can run any code"
        )
    if (found := _settled(path)) is not None:
        return found
    if os.sep in str(name) or path.suffix:
        raise CheckpointError(f"no checkpoint at '{name}'; shipped ones: {', '.join(shipped_checkpoints()) or 'none'}")
    return find_shipped(str(name))


def find_shipped(name: str) -> Path:
    shipped = shipped_checkpoints()
    if name in shipped:
        return shipped[name]
    raise unknown_name("checkpoint", name, shipped)


def holds_checkpoint(folder: Path) -> bool:
    """Return whether `folder` holds a checkpoint, or did until a crash interrupted its replacement."""
    return _settled(folder) is not None


def _settled(folder: Path) -> Path | None:
    """Return `folder` if it holds a checkpoint, or the older one if a swap was interrupted between its renames."""
    whole = Path(os.path.abspath(folder))
    aside = whole.parent / f".{whole.name}{REPLACED}"
    # A swap may end between the first two looks.
    return next((path for path in (folder, aside, folder) if (path / CONFIG).is_file()), None)


def replace_folder(writing: Path, folder: Path) -> None:
    """Put the folder `writing` in the place of `folder`. Between the two renames, the older one is still found."""
    aside = folder.with_name(f".{folder.name}{REPLACED}")
    if folder.exists():
        shutil.rmtree(aside, ignore_errors=True)
        if aside.exists():  # on a network file system, files that another process has opened remain
            os.rename(aside, aside.with_name(f"{aside.name}-{time.time_ns()}"))
        os.rename(folder, aside)
    os.rename(writing, folder)
    flush_folder(folder.parent)
    (aside / CONFIG).unlink(missing_ok=True)  # first, because a folder with this file is taken for whole
    shutil.rmtree(aside, ignore_errors=True)


class Frame(Config):
    """The place and the grey levels of the drawings of a data set.

    ground: brightness of the background, 0 or 255
    ink: typical difference of the ink from the ground, above 0 and at most 255
    box: longer side of the box around a drawing, in pixels
    centre: row and column of the centre of mass, in pixels from the top left corner of the image
    """

    ground: Literal[0, 255]
    ink: float = Field(gt=0, le=255)
    box: float = Field(ge=1, le=LARGEST_SIZE)
    centre: tuple[float, float]


class DataSummary(Config):
    """The training images. `border_mean` is from 0 to 255; `data.look.Look` explains the fields after `frame`."""

    name: str
    train_images: CountOrZero
    border_mean: float
    frame: Frame | None = None
    fit: Fit = "crop"
    ground: Colour | None = None
    range: tuple[float, float] | None = None
    smooth: bool = True
    tile: Size | None = None
    class_names: tuple[str, ...] = ()

    @property
    def words(self) -> Words:
        return choose_words(self.name)


class TrainingSummary(Config):
    """The training of a model, and its validation bits/dim if these weights were validated."""

    step: CountOrZero
    images_seen: ImagesSeen
    elapsed_seconds: PositiveOrZero
    validation_bits_per_dim: float | None = None
    validation_standard_error: float | None = None
    validation_images: Count | None = None
    preset: str | None = None
    init_from: Origin | None = None
    distill_from: tuple[Origin, ...] = ()
    settings: TrainConfig


class CheckpointInfo(Config):
    format: Annotated[int, Field(strict=True, ge=1, le=CHECKPOINT_FORMAT)] = CHECKPOINT_FORMAT
    lintx_version: str = __version__
    model: ModelConfig
    data: DataSummary
    training: TrainingSummary
    license: Annotated[str, Field(pattern=LICENSE)] | None = None
    weights_sha256: str = ""
    training_sha256: str | None = None
    # The digest of config.json without this key. To edit the file by hand, remove the key.
    config_sha256: str | None = None


def render_card(name: str, info: CheckpointInfo, parameters: int, mixing: str) -> str:
    """Render the model card of a checkpoint in Markdown."""
    model, training, words = info.model, info.training, info.data.words
    size = f"{model.image.height} x {model.image.width} x {model.image.channels}"
    if words is WINDOWS:
        size = f"{model.image.positions:,} bytes"
    # The Hub reads the lines before the title.
    header = [] if info.license is None else ["---", "library_name: lintx", f"license: {info.license}", "---", ""]
    lines = [
        *header,
        f"# {name}",
        "",
        f"A lintx {'byte' if words is WINDOWS else 'pixel'} model: {mixing}, {model.layers} layers of width "
        f"{model.width}, {parameters:,} parameters, {words.items} of {size}"
        f"{f', conditional on one of {model.classes} classes' if model.classes else ''}"
        f"{' or on none' if model.optional_class else ''}.",
        "",
        f"- Trained on {info.data.name}: {training.images_seen:,} {words.items} in {training.step:,} steps, "
        f"{training.elapsed_seconds:,.0f} seconds.",
    ]
    if training.init_from is not None:
        lines.append(f"- Initialised from {_describe(training.init_from)}.")
    lines += [f"- Distilled from {_describe(teacher)}." for teacher in training.distill_from]
    if training.validation_bits_per_dim is not None:
        lines.append(
            f"- Validation: {format_bits(training.validation_bits_per_dim, training.validation_standard_error)} "
            f"{words.bits} over {training.validation_images} {words.items}, including the first value of each "
            f"{words.item}{', given the class' if model.required_classes else ''}."
        )
    return "\n".join([*lines, f"- Written by lintx {info.lintx_version}.", ""])


def _describe(origin: Origin) -> str:
    return f"{origin.checkpoint} ({origin.attention} attention, {origin.step:,} steps, sha256 {origin.weights_sha256})"
