"""What a checkpoint records about its model, data and training: the contents of `config.json`."""

from typing import Annotated, Literal

from pydantic import Field

from .config import (
    LARGEST_SIZE,
    Count,
    CountOrZero,
    ImagesSeen,
    ModelConfig,
    Origin,
    PositiveOrZero,
    TrainConfig,
    choose_words,
)
from .documents import Config
from .units import Words
from .version import __version__

CHECKPOINT_FORMAT = 1


class Frame(Config):
    """Where the drawings of a data set are, and their grey levels.

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
    """The images a model was trained on. `border_mean` (0 to 255) distinguishes a dark background from a light one.

    `frame` is None if the images are not drawings on a plain ground.
    """

    name: str
    train_images: CountOrZero
    border_mean: float
    frame: Frame | None = None

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
    """The contents of `config.json`."""

    format: Annotated[int, Field(strict=True, ge=1, le=CHECKPOINT_FORMAT)] = CHECKPOINT_FORMAT
    lintx_version: str = __version__
    model: ModelConfig
    data: DataSummary
    training: TrainingSummary
    weights_sha256: str = ""
    training_sha256: str | None = None
    # The digest of config.json without this key. To edit the file by hand, remove the key.
    config_sha256: str | None = None
