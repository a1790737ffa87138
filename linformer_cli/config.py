"""Configurations: frozen, typed, and closed to keys they do not know. Nothing here needs torch.

A run is described by three tables, the same in `config.toml` and in memory: `[model]`, `[data]` and `[train]`.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from . import __version__
from .errors import UsageError, unknown_name

OptionValue = bool | int | float | str
Positive = Annotated[int, Field(gt=0)]
# Far above what anyone trains, and low enough that a damaged file cannot ask for all memory.
Size = Annotated[int, Field(gt=0, le=65_536)]
Layers = Annotated[int, Field(gt=0, le=1_024)]
LARGEST_IMAGE = 2**20
CHECKPOINT_FORMAT = 1
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Config(BaseModel):
    """Base of every configuration: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


ConfigType = TypeVar("ConfigType", bound=Config)


class ImageShape(Config):
    """Size of the images a model draws. `levels` is the number of values a channel can take."""

    height: Size
    width: Size
    channels: Literal[1, 3] = 1
    levels: Annotated[int, Field(ge=2, le=256)] = 256

    @model_validator(mode="after")
    def _not_too_large(self) -> Self:
        if self.positions > LARGEST_IMAGE:
            raise ValueError(f"an image can have {LARGEST_IMAGE:,} values, {self.positions:,} were asked for")
        return self

    @property
    def positions(self) -> int:
        """T, the number of values of one image."""
        return self.height * self.width * self.channels

    @property
    def values_per_row(self) -> int:
        return self.width * self.channels


class NetworkConfig(Config):
    """The network without the images: what a preset fixes.

    `context` says which known values a position sees directly: `previous` is the value before it, as in
    Katharopoulos 2020; `neighbours` also the pixels to the left, above and two rows above; `wide` beside these all
    pixels up to four columns away, of this row and of three above, as numbers; `hashed` beside all this the values of
    two, three and four neighbours together, in hashed tables. `embedding` is `grid`
    (learned row, column and channel tables, added) or `paper` (a value embedding of half the width beside a
    sinusoidal position of the other half).
    """

    attention: str = "linear"
    attention_options: dict[str, OptionValue] = {}
    layers: Layers = 4
    heads: Size = 4
    width: Size = 128
    head_width: Size = 32
    feed_forward: Size = 512
    activation: Literal["gelu", "relu"] = "gelu"
    norm: Literal["pre", "post"] = "pre"
    dropout: Fraction = 0.0
    context: Literal["previous", "neighbours", "wide", "hashed"] = "neighbours"
    embedding: Literal["grid", "paper"] = "grid"
    head: Literal["categorical", "mixture"] = "categorical"
    mixtures: Size = 10

    @model_validator(mode="after")
    def _paper_embedding_needs_an_even_half(self) -> Self:
        if self.embedding == "paper" and self.width % 4:
            raise ValueError(f"embedding 'paper' needs a width divisible by 4, found {self.width}")
        return self


class ModelConfig(NetworkConfig):
    """A whole model: the network and the images it draws. Enough to rebuild it.

    With `classes` it is told of each image which of so many classes it is; 0 is a model that knows of none.
    """

    image: ImageShape
    classes: Annotated[int, Field(ge=0, le=65_536)] = 0

    @property
    def class_bits_per_dim(self) -> float:
        """What an image's class, one of all alike, adds to its bits/dim: log2(classes) bits over all its values.

        bits/dim given the class may be held against those of a model without classes after this has been added:
        -log2 p(image) <= -log2 p(image | class) - log2 p(class).
        """
        return math.log2(self.classes) / self.image.positions if self.classes else 0.0


class DataConfig(Config):
    """Where images come from. `image_size` and `channels` are for sets that can be had so.

    With `labels` the model is told the classes of the images.
    """

    name: str = "mnist"
    data_dir: str | None = None
    image_size: Size | None = None
    channels: Literal[1, 3] | None = None
    labels: bool = False


class TrainConfig(Config):
    """How a model is trained. Exactly one of `steps`, `epochs` and `max_time` (seconds) sets the length.

    `clip` bounds the norm of the gradient; 0 leaves it. `ema` is the decay of an exponential moving average of the
    weights (less in the first steps), which is then what is evaluated, sampled from and saved as the model; 0 keeps
    none. `muon` trains the matrices of hidden layers and leaves the rest to AdamW, at the same learning rate.
    `shift` moves every training image by up to so many pixels along each axis, anew each time; 0 leaves them.
    `keep_last` is how many of the newest saves stay: `last/`, and older ones in `kept/`. None is only ever a default,
    since TOML cannot say it.
    """

    steps: Positive | None = None
    epochs: Annotated[float, Field(gt=0)] | None = None
    max_time: Annotated[float, Field(gt=0)] | None = None
    batch: Positive = 16
    accumulation: Positive = 1
    shift: Annotated[int, Field(ge=0)] = 0
    optimizer: Literal["adamw", "radam", "muon"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0)] = 2e-3
    final_learning_rate_fraction: Annotated[float, Field(ge=0, le=1)] = 0.02
    schedule: Literal["cosine", "trapezoid", "constant"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 100
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    beta1: Fraction = 0.9
    beta2: Fraction = 0.98
    clip: Annotated[float, Field(ge=0)] = 1.0
    ema: Fraction = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    log_every: Positive = 20
    evaluate_every: Positive = 500
    evaluate_images: Positive = 512
    sample_every: Annotated[int, Field(ge=0)] = 500
    sample_images: Positive = 16
    save_every: Positive = 200
    keep_last: Positive = 1

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        given = [name for name in ("steps", "epochs", "max_time") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of steps, epochs and max_time sets the length, found {given or 'none'}")
        return self


class InitFrom(Config):
    """The checkpoint whose weights a run began with, its mechanism, and how many steps it had been trained for."""

    checkpoint: str
    weights_sha256: str
    attention: str
    step: int


class RunConfig(Config):
    """Everything that a training run was told; `config.toml` in its folder."""

    preset: str | None = None
    init_from: InitFrom | None = None
    model: ModelConfig
    data: DataConfig = DataConfig()
    train: TrainConfig

    @model_validator(mode="after")
    def _shift_leaves_something(self) -> Self:
        side = min(self.model.image.height, self.model.image.width)
        if self.train.shift >= side:
            raise ValueError(f"train.shift must be less than the {side} pixels of an image, found {self.train.shift}")
        return self


class DataSummary(Config):
    """The images a model was trained on. `border_mean` (0 .. 255) tells a dark background from a light one."""

    name: str
    train_images: int
    border_mean: float


class TrainingSummary(Config):
    """How far training had come, and what these weights, if they were validated, reached on the validation images."""

    step: int
    images_seen: int
    elapsed_seconds: float
    validation_bits_per_dim: float | None = None
    validation_standard_error: float | None = None
    validation_images: int | None = None
    preset: str | None = None
    init_from: InitFrom | None = None
    settings: TrainConfig


class CheckpointInfo(Config):
    """`config.json`."""

    format: int = CHECKPOINT_FORMAT
    lintx_version: str = __version__
    model: ModelConfig
    data: DataSummary
    training: TrainingSummary
    weights_sha256: str = ""
    training_sha256: str | None = None
    # Of this document without this line: whoever changes something on purpose leaves the line out.
    config_sha256: str | None = None


def parse_config(kind: type[ConfigType], values: Mapping[str, Any], where: str) -> ConfigType:
    """Build `kind` from plain values; every fault becomes one `UsageError` that names `where` and the key."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise describe_validation_error(kind, error, where) from None


def describe_validation_error(kind: type[BaseModel], error: ValidationError, where: str) -> UsageError:
    """The first fault of a pydantic error as one line, with a suggestion where a key is unknown."""
    faults = error.errors()
    # A misspelt key is also a missing one; the first says more.
    first = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        *parents, name = [str(part) for part in first["loc"]]
        fault = unknown_name("key", name, _fields_at(kind, parents))
        return UsageError(f"{'.'.join([where, *parents])}: {fault}")
    message = first["msg"].removeprefix("Value error, ")
    # A table that does not fit together says so itself; only a single value is worth showing again.
    found = "" if isinstance(first["input"], dict) else f", found {first['input']!r}"
    return UsageError(f"{where}: {f'{path}: ' if path else ''}{message}{found}")


def _fields_at(kind: type[BaseModel], parents: list[str]) -> list[str]:
    for parent in parents:
        annotation = kind.model_fields[parent].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        kind = annotation
    return list(kind.model_fields)
