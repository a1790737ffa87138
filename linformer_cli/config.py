"""Configurations. They are immutable and typed, and unknown keys are errors. Nothing here needs torch.

The fields of `NetworkConfig` and `TrainConfig` are also the options of `lintx train`, with descriptions as help.
"""

import math
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from .documents import Config, setting
from .native.constants import LARGEST_GUIDANCE as LARGEST_GUIDANCE
from .units import IMAGES, WINDOWS, Words

# Ways to fit an image whose aspect ratio differs from the model's.
Fit = Literal["crop", "pad", "stretch"]
OptionValue = bool | int | float | str
LARGEST_IMAGE = 2**20
# The settings that can give a run's length, and the number of epochs if none is given.
LENGTHS = ("steps", "epochs", "max_time")
DEFAULT_EPOCHS = 3.0


class Duration:
    """Marks a setting in seconds, which the command line reads as text such as `90s`, `10m` or `1h30m`."""


# Far above any practical value, these keep damaged files from requesting all memory, and products within 64 bits.
LARGEST_SIZE = 65_536
LARGEST_STEP = 2**40
_LARGEST_MUON_RATE = 1e30
# With this guidance, a classifier recognises 99 % of the images of `mnist-deep` (docs/notes/classes.md).
CLASS_GUIDANCE = 2.5
# The part of a picture that is kept by default, and the images that are drawn for each completion of other parts.
DEFAULT_PART = "top:0.5"
PARTICLES = 128
Size = Annotated[int, Field(gt=0, le=LARGEST_SIZE)]
Layers = Annotated[int, Field(gt=0, le=1_024)]
Images = Annotated[int, Field(gt=0, le=2**20)]
Count = Annotated[int, Field(gt=0, le=LARGEST_STEP)]
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST_STEP)]
ImagesSeen = Annotated[int, Field(ge=0, le=2**62)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
PositiveOrZero = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0), Duration()]
# '#rrggbb', or '#rrggbbaa' for a colour that is not opaque.
Colour = Annotated[
    str,
    Field(pattern=r"^#[0-9a-f]{6}([0-9a-f]{2})?$"),
    AfterValidator(lambda text: text[:7] if text[7:] == "ff" else text),
]


def holds_bytes(data: str) -> bool:
    """Return whether a data set, given by its name, consists of bytes and not of images."""
    return data.startswith("bytes:")


def choose_words(data: str) -> Words:
    """Return the words for a data set, given by its name."""
    return WINDOWS if holds_bytes(data) else IMAGES


class ImageShape(Config):
    """The size of a model's images. `levels` is the number of values a channel can take.

    The channels are grey, RGB or RGBA. With a `palette`, the value of a pixel is the number of its colour, '#rrggbb' or
    '#rrggbbaa'; '#00000000', which is transparent, is number 0 if there is any. Windows of bytes are rows.
    """

    height: Size
    width: Size
    channels: Literal[1, 3, 4] = 1
    levels: Annotated[int, Field(ge=2, le=256)] = 256
    # Left out if empty, so that the files of models without a palette stay as they were.
    palette: tuple[Colour, ...] = Field((), exclude_if=lambda palette: not palette)

    def check(self) -> None:
        if self.positions > LARGEST_IMAGE:
            raise ValueError(f"an image can have at most {LARGEST_IMAGE:,} values, found {self.positions:,}")
        if self.palette and (self.channels, self.levels) != (1, len(self.palette)):
            found = f"{self.channels} and {self.levels}"
            palette = f"a palette of {len(self.palette)} colours"
            raise ValueError(f"{palette} needs 1 channel and as many levels, found {found}")
        if len(set(self.palette)) < len(self.palette):
            raise ValueError("the colours of a palette must differ from each other")

    @property
    def positions(self) -> int:
        """T, the number of values of one image."""
        return self.height * self.width * self.channels

    @property
    def colours(self) -> list[tuple[int, ...]]:
        """The red, green, blue and opacity of the palette's colours, 0 to 255."""
        return [tuple(bytes.fromhex(f"{colour[1:]:f<8}")) for colour in self.palette]

    @property
    def kind(self) -> str:
        return f"a palette of {len(self.palette)} colours" if self.palette else f"{self.levels} levels"

    @property
    def words(self) -> Words:
        return WINDOWS if self == ImageShape(height=1, width=self.width) else IMAGES

    @property
    def values_per_row(self) -> int:
        return self.width * self.channels

    @property
    def row_for_attention(self) -> int:
        """A row's length for mechanisms with windows; a single row, of bytes, counts as a square image."""
        return self.values_per_row if self.height > 1 else max(1, math.isqrt(self.positions))


class NetworkConfig(Config):
    """A network without its image size, as in a preset. A gated mechanism has one head with its own width."""

    attention: str = setting("linear", "The mechanism that mixes positions; see lintx attentions.")
    attention_options: dict[str, OptionValue] = setting({}, "An option of the mechanism; repeatable.")
    layers: Layers = setting(4, "Number of blocks.")
    heads: Size = setting(4, "Attention heads of a block.")
    width: Size = setting(128, "Width of the residual stream.")
    head_width: Size = setting(32, "Width of a head's queries, keys and values.")
    feed_forward: Size = setting(512, "Hidden width of the feed-forward layers.")
    feed_forward_kind: Literal["dense", "boom"] = setting(
        "dense", "boom sums chunks of the hidden vector, without a second matrix (Merity 2019)."
    )
    short_convolution: Annotated[int, Field(ge=0, le=1_024)] = setting(
        0, "Width of a causal convolution of queries, keys and values, such as 4; 0: none."
    )
    normalise_keys: bool = setting(False, "Scale the queries and keys of each head to length 1.")
    norm_heads: bool = setting(False, "RMSNorm, with weights, of each head's output.")
    output_gate: bool = setting(False, "Multiply the heads' outputs by a gate.")
    activation: Literal["gelu", "relu"] = setting("gelu", "Activation of the feed-forward layers.")
    norm: Literal["pre", "post"] = setting("pre", "pre: LayerNorm before each branch. post: after the sum.")
    dropout: Fraction = setting(0.0, "Share of a branch's outputs that training sets to 0.")
    context: Literal["previous", "recent", "neighbours", "wide", "hashed", "residual"] = setting(
        "neighbours",
        "Known values that a position sees directly. recent: the last four. neighbours: six nearby ones. wide: also "
        "three rows above, as numbers. hashed: also groups of neighbours. residual, for colour: differences from "
        "neighbours, with blocks that step over whole pixels.",
    )
    embedding: Literal["grid", "paper", "none"] = setting(
        "grid",
        "Positions. grid: learned tables. paper: sinusoids (Katharopoulos 2020). none: no positions, for any length.",
    )
    head: Literal["categorical", "mixture"] = setting(
        "categorical", "Distribution of a value: one logit per level, or a mixture of logistics."
    )
    mixtures: Size = setting(10, "Number of logistics of a mixture head.")

    def check(self) -> None:
        if self.embedding == "paper" and self.width % 4:
            raise ValueError(f"embedding 'paper' needs a width divisible by 4, found {self.width}")
        if self.feed_forward_kind == "boom" and self.feed_forward % self.width:
            multiple = f"a feed_forward that is a multiple of width ({self.width})"
            raise ValueError(f"feed_forward_kind 'boom' needs {multiple}, found {self.feed_forward}")
        if self.short_convolution == 1:
            raise ValueError("short_convolution must be 0 (none) or at least 2, found 1")

    @property
    def steps_over_pixels(self) -> bool:
        """Whether a position of the blocks is a whole pixel, not a single value."""
        return self.context == "residual"

    @property
    def layer_parts(self) -> list[str]:
        names = ("short_convolution", "normalise_keys", "norm_heads", "output_gate")
        return [name for name in names if getattr(self, name)]


class ModelConfig(NetworkConfig):
    """A network and its images. It may be conditioned on `classes`, with `optional_class` by default on none."""

    image: ImageShape
    classes: Annotated[int, Field(ge=0, le=LARGEST_SIZE)] = 0
    optional_class: bool = False

    def check(self) -> None:
        super().check()
        if self.steps_over_pixels and self.image.channels == 1:
            raise ValueError("context 'residual' needs three or four channels; with one, values are pixels: use 'wide'")
        if self.image.palette and self.head == "mixture":
            raise ValueError("head 'mixture' needs values with an order, and a palette has none; use 'categorical'")

    @property
    def block_image(self) -> ImageShape:
        """The image that the blocks step over: all values, or one position for each pixel."""
        return self.image.model_copy(update={"channels": 1}) if self.steps_over_pixels else self.image

    @property
    def required_classes(self) -> int:
        """The number of classes if every image needs one, or 0 if images need no class."""
        return 0 if self.optional_class else self.classes

    @property
    def label_count(self) -> int:
        """The number of labels. They are the classes and, if the class is optional, one more label for no class."""
        return self.classes + self.optional_class

    @property
    def default_label(self) -> int:
        """The label of an image without a class."""
        return self.classes if self.optional_class else 0

    @property
    def class_bits_per_dim(self) -> float:
        """The bits/dim that encoding an image's class adds: log2(classes) bits per T values, for uniform classes.

        Add them to bits/dim given the class before comparing with bits/dim without a class:
        -log2 p(image) <= -log2 p(image | class) - log2 p(class).
        """
        return math.log2(self.classes) / self.image.positions if self.classes else 0.0


def _parse_sides(value: Any) -> Any:
    """Return height and width, from one side of a square, from a text such as `48x64`, or as they are."""
    sides = re.fullmatch(r"(\d+)(?:x(\d+))?", value) if isinstance(value, str) else None
    if sides is not None:
        return int(sides[1]), int(sides[2] or sides[1])
    return (value, value) if isinstance(value, int) else value


def _parse_colour(value: Any) -> Any:
    from PIL import ImageColor

    if not isinstance(value, str):
        return value
    red, green, blue, *_ = ImageColor.getrgb(value)  # raises ValueError
    return f"#{red:02x}{green:02x}{blue:02x}"


def _check_range(value: tuple[float, float]) -> tuple[float, float]:
    if value[0] >= value[1]:
        raise ValueError(f"the number for black must be less than the one for white, found {value}")
    return value


_READ_PARTS = BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)
_READ_NUMBER = BeforeValidator(lambda value: int(value) if str(value).isdecimal() else value)
# The settings that change the look of a data set.
LOOK_SETTINGS = ("image_size", "fit", "ground", "range", "colours", "channels", "tile")


class DataConfig(Config):
    """The source of the images. `LOOK_SETTINGS` change the look that is measured over pictures of the user.

    `length` is that of a window of `bytes:PATH`. With `labels`, the model is conditioned on classes.
    """

    name: str = "mnist"
    data_dir: str | None = None
    image_size: Annotated[tuple[Size, Size], BeforeValidator(_parse_sides)] | None = setting(
        None,
        "Pixels, or the side of a square. For folders (default: the size of most pictures, if at most 64) and glyphs "
        "(8 to 512; default: 28).",
    )
    fit: Fit | None = setting(None, "How to fit pictures of another size (default: crop). Pixel art is never resized.")
    ground: Annotated[Colour, BeforeValidator(_parse_colour)] | None = setting(
        None, "Colour behind transparent parts and padded pictures, such as white or #204060."
    )
    range: Annotated[tuple[float, float], _READ_PARTS, AfterValidator(_check_range)] | None = setting(
        None, "Numbers that become black and white, such as 900,1330, for 16 bits or floats."
    )
    colours: Annotated[int, Field(ge=2, le=256)] | None = setting(
        None, "Use one palette of up to N colours. Default: 256 if they suffice or for pixel art."
    )
    channels: Annotated[Literal[1, 3, 4], _READ_NUMBER] | None = setting(
        None, "1 (grey), 3 (RGB) or 4 (RGB with opacity) instead of a palette. Default: as in the pictures."
    )
    tile: Size | None = setting(None, "Cut each picture into squares of this side.")
    length: Size | None = None
    labels: bool = False

    def check(self) -> None:
        if self.colours is not None and self.channels is not None:
            raise ValueError("colours and channels cannot both be set: with a palette, a pixel is one value")

    @property
    def words(self) -> Words:
        return choose_words(self.name)


class TrainConfig(Config):
    """Training settings. `steps`, `epochs` or `max_time` gives the length; with two of them, the run ends at the first.

    Optional settings default to None, because a TOML file cannot set None.
    """

    steps: Count | None = setting(None, "Optimizer steps.")
    epochs: Positive | None = setting(None, f"Passes over the images; {DEFAULT_EPOCHS:g} without another length.")
    max_time: Seconds | None = setting(None, "Training time, such as 10m or 1h30m, also as a limit of steps or epochs.")
    batch: Images = setting(16, "Images in a batch.")
    accumulation: Images = setting(1, "Batches whose gradients are summed for one step.")
    shift: CountOrZero = setting(0, "Shift each image at random by up to N pixels.")
    flip: bool = setting(False, "Mirror half of the images, at random.")
    hide_class: Fraction = setting(0.0, "With --classes: share of images whose class is hidden.")
    distill_share: Share = setting(0.5, "With --distill-from: share of the teachers in the loss.")
    optimizer: Literal["adamw", "radam", "muon"] = setting("adamw", "muon trains hidden matrices, and AdamW the rest.")
    learning_rate: Positive = setting(2e-3, "Peak learning rate.")
    final_learning_rate_fraction: Share = setting(0.02, "Final learning rate, as a share of the peak.")
    schedule: Literal["cosine", "trapezoid", "constant"] = setting(
        "cosine", "Learning rate after warm-up. trapezoid falls in the last quarter."
    )
    warmup_steps: CountOrZero = setting(100, "Steps of linear warm-up.")
    warmup_share: Share = setting(0.0, "End the warm-up after this share of the run; 0: only after its steps.")
    weight_decay: PositiveOrZero = setting(0.05, "Decoupled weight decay of matrices.")
    beta1: Fraction = setting(0.9, "Adam's decay rate for the mean of gradients.")
    beta2: Fraction = setting(0.98, "Adam's decay rate for the mean of squared gradients.")
    clip: PositiveOrZero = setting(1.0, "Largest gradient norm; 0 turns clipping off.")
    ema: Fraction = setting(
        0.0,
        "Decay of a moving average of the weights, such as 0.999, which is then validated, "
        "sampled from and saved; 0: none.",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = setting(0, "Seed of initial weights, image order and dropout.")
    device: str = setting("auto", "auto, cpu, cuda, cuda:INDEX or mps.")
    precision: Literal["auto", "fp32", "bf16"] = setting("auto", "auto is the faster of fp32 and bf16.")
    graph: bool = setting(False, "On a CUDA device, replay forward and backward pass as a graph. Checked on CPUs only.")
    log_every: Count = setting(20, "Steps between rows of metrics.csv.")
    evaluate_every: Count = setting(500, "Steps between validations.")
    evaluate_images: Count = setting(512, "Number of validation images.")
    check_every: Seconds | None = setting(
        None,
        "Validate, draw samples and save at this interval, and first after half of it, instead "
        "of after steps. For folders: 2m.",
    )
    patience: CountOrZero = setting(0, "Stop after so many validations without a better one; 0: never. For folders: 3.")
    sample_every: CountOrZero = setting(500, "Steps between sample grids; 0 turns them off.")
    sample_images: Images = setting(16, "Images in a sample grid.")
    save_every: Count = setting(200, "Steps between saves.")
    keep_last: Count = setting(1, "Number of newest saves to keep.")

    def check(self) -> None:
        given = [name for name in LENGTHS if getattr(self, name) is not None]
        if not given or {"steps", "epochs"} <= set(given):
            raise ValueError(f"set the length by steps or epochs, by max_time, or by both, found {given or 'none'}")
        # Other optimizers overflow to infinity, which the next loss shows; Muon fails instead.
        if self.optimizer == "muon" and self.learning_rate * max(1, self.weight_decay) > _LARGEST_MUON_RATE:
            bound = f"at most {_LARGEST_MUON_RATE:g} with optimizer 'muon'"
            raise ValueError(f"learning_rate, also times weight_decay, must be {bound}")


class Origin(Config):
    """A checkpoint that a run started from or learns from: its mechanism, and the number of its training steps."""

    checkpoint: str
    weights_sha256: str
    attention: str
    step: CountOrZero


class RunConfig(Config):
    """All settings of a training run: `config.toml` in its folder."""

    preset: str | None = None
    init_from: Origin | None = None
    distill_from: tuple[Origin, ...] = ()
    model: ModelConfig
    data: DataConfig = DataConfig()
    train: TrainConfig

    def check(self) -> None:
        side = min(self.model.image.height, self.model.image.width)
        if self.train.shift >= side:
            bound = f"less than an image's shorter side ({side} pixels)"
            raise ValueError(f"train.shift must be {bound}, found {self.train.shift}")
        if self.train.flip and holds_bytes(self.data.name):
            raise ValueError("train.flip mirrors images, and the data are bytes; drop it")
        if self.train.hide_class and not self.model.optional_class:
            raise ValueError("train.hide_class hides classes, and the model has none; give --classes, or hide_class 0")
