"""Named networks and the settings they are trained with. Image size and channels come from the data."""

from collections.abc import Mapping
from typing import Any

from .config import ImageShape, NetworkConfig, TrainConfig, holds_bytes
from .errors import UsageError, unknown_name

DEFAULT_PRESET = "mnist-wide"
COLOUR_PRESET = "colour-pixel"
BYTES_PRESET = "bytes-small"
RENAMED_PRESETS = {"cifar10-pixel": COLOUR_PRESET}  # old names, which the files of runs and checkpoints may have

_PAPER = NetworkConfig(
    layers=8,
    heads=8,
    width=256,
    head_width=32,
    feed_forward=1024,
    activation="relu",
    norm="post",
    dropout=0.1,
    context="previous",
    embedding="paper",
    head="mixture",
    mixtures=10,
)

PRESETS: dict[str, NetworkConfig] = {
    # The two models of Katharopoulos 2020 (arXiv 2006.16236), section 4.2, as its released code builds them.
    "mnist-paper": _PAPER,
    "cifar10-paper": _PAPER.model_copy(update={"layers": 16}),
    # The network that comparisons use. It has 1.03 million parameters on MNIST.
    "mnist-small": NetworkConfig(),
    # The best network found among those that two CPU cores train in an hour or two (docs/notes/recipe.md).
    DEFAULT_PRESET: NetworkConfig(context="wide"),
    # For colour images. Its blocks step over whole pixels.
    COLOUR_PRESET: NetworkConfig(context="residual", head="mixture", width=192, heads=6, feed_forward=768),
    # For windows of bytes. Without positions, a model can draw text of any length.
    BYTES_PRESET: NetworkConfig(context="recent", embedding="none"),
    # For tests and first trials. It trains in seconds.
    "tiny": NetworkConfig(layers=2, heads=2, width=32, head_width=16, feed_forward=64),
}

# Training settings that differ from the defaults: the best found, or those of Katharopoulos 2020, section 4.2.
_PAPER_RECIPE = {
    "optimizer": "radam",
    "learning_rate": 1e-4,
    "schedule": "constant",
    "warmup_steps": 0,
    "weight_decay": 0.01,
    "batch": 16,
}
RECIPES: dict[str, dict[str, Any]] = {
    DEFAULT_PRESET: {"optimizer": "muon"},
    COLOUR_PRESET: {"optimizer": "muon", "batch": 8, "flip": True},
    BYTES_PRESET: {"optimizer": "muon", "sample_images": 4},
    "mnist-paper": _PAPER_RECIPE,
    "cifar10-paper": _PAPER_RECIPE,
}

# For folders of pictures (docs/guide/your-pictures.md). Icons and pixel art often have a direction: no flip.
FOLDER_RECIPE: dict[str, Any] = {
    "epochs": 8.0,
    "max_time": 900.0,
    "batch": 8,
    "schedule": "trapezoid",
    "warmup_share": 0.05,
    "check_every": 120.0,
    "patience": 3,
    "flip": False,
}
# The share of pictures that are trained on without their class, if their folders or labels.csv name classes.
FOLDER_HIDE_CLASS = 0.2
# With fewer training images, a new run decays its weights more (docs/notes/own-pictures.md#weight-decay).
SCARCE_PICTURES = 1000
SCARCE_WEIGHT_DECAY = 0.5
FEW_PICTURES = 300  # with fewer training images, a run says what to expect (docs/guide/your-pictures.md)

# Default learning rates of optimizers whose learning rate differs from AdamW's. `RECIPES` may override them.
LEARNING_RATES = {"muon": 8e-3}


def complete_recipe(train: Mapping[str, Any]) -> dict[str, Any]:
    """Return `train`, completed with the default learning rate of its optimizer if it has none."""
    optimizer = train.get("optimizer")
    known = isinstance(optimizer, str) and optimizer in LEARNING_RATES  # a settings file may hold any type
    return {"learning_rate": LEARNING_RATES[str(optimizer)], **train} if known else dict(train)


def find_default_preset(data: str, images_preset: str | None = None) -> str:
    """Find the preset for the data set `data` unless another is named: for images, `images_preset` if that is given."""
    if holds_bytes(data):
        return BYTES_PRESET
    return images_preset or (COLOUR_PRESET if data == "cifar10" else DEFAULT_PRESET)


def preset_defaults(name: str) -> dict[str, Any]:
    training = {key: field.default for key, field in TrainConfig.model_fields.items()}
    return {**training, **find_preset(name).model_dump(), **complete_recipe(RECIPES.get(name, {}))}


def find_preset(name: str) -> NetworkConfig:
    """Find the network called `name`. Raises `UsageError` with a suggestion for an unknown name."""
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    return PRESETS[name]


def find_preset_data(name: str) -> str:
    """Find the data set that the preset `name` is made for. Raises `UsageError` if the user must name it."""
    find_preset(name)
    if name == BYTES_PRESET:
        raise UsageError(f"--preset {name} needs bytes; name a file or a folder with --data bytes:PATH")
    return "cifar10" if name in (COLOUR_PRESET, "cifar10-paper") else "mnist"


def find_preset_image(name: str) -> ImageShape:
    """Find the images that the preset `name` is made for: those of MNIST or CIFAR-10, or windows of 1,024 bytes."""
    if name == BYTES_PRESET:
        return ImageShape(height=1, width=1024)
    if find_preset_data(name) == "cifar10":
        return ImageShape(height=32, width=32, channels=3)
    return ImageShape(height=28, width=28)
