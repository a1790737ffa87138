"""One forward and backward pass of a mechanism alone: the work that `lintx bench attention` measures."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import torch

from linformer_cli.attention.base import Attention, AttentionShape
from linformer_cli.config import ImageShape, ModelConfig
from linformer_cli.documents import parse_config
from linformer_cli.model.mixers import Variant, build_attention
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.system.device import seeded

LEAST_TRAFFIC = (
    "the rate of the least possible traffic, as a share of the rate of memory copies. The forward pass reads inputs "
    "and writes outputs. The backward pass reads inputs and output gradients, and writes input gradients"
)

# A warm-up at this length loads what torch loads on first use and creates torch's buffers, so neither is counted.
WARM_UP_POSITIONS = 256
_KINDS = ("q", "k", "v", "extra", "gradient")

# The image on which the parallel and the step form of a mechanism are compared before it is timed.
_CHECKED_IMAGE = ImageShape(height=12, width=12, levels=16)


@dataclass(frozen=True)
class PassSetup:
    """A mechanism at one length: `batch` sequences of `positions` in float32."""

    variant: Variant
    heads: int
    head_width: int
    positions: int
    batch: int = 1
    device: str = "cpu"


# Random inputs by kind and width. An input is freed when no pass uses it any more.
Inputs = WeakValueDictionary[tuple[str, int], torch.Tensor]


def build_pass(setup: PassSetup, inputs: Inputs | None = None) -> Callable[[], None]:
    """Build a forward pass from the initial state, and a backward pass. The first call also draws the inputs."""
    attention = _build(setup)
    shape = attention.shape  # a mechanism may have its own widths
    shared = Inputs() if inputs is None else inputs
    kept: dict[tuple[str, int], torch.Tensor] = {}

    def draw(kind: str, channels: int) -> torch.Tensor:
        tensor = shared.get((kind, channels))
        if tensor is None:
            size = (setup.batch, shape.heads, shape.positions, channels)
            with seeded(_KINDS.index(kind)):
                tensor = torch.randn(size, device=setup.device).requires_grad_(kind != "gradient")
            shared[kind, channels] = tensor
        kept[kind, channels] = tensor
        return tensor

    def work() -> None:
        k = draw("k", shape.key_width)
        v = k if attention.shared_key_value else draw("v", shape.value_width)
        q = k if attention.shared_query_key else draw("q", shape.key_width)
        extra = draw("extra", attention.extra_per_head) if attention.extra_per_head else None
        y, _ = attention.attend(q, k, v, None, extra)
        y.backward(draw("gradient", shape.value_width))
        attention.zero_grad(set_to_none=True)
        for tensor in kept.values():
            tensor.grad = None

    return work


def build_warm_pass(setup: PassSetup) -> Callable[[], None]:
    """Build a pass after a short one. Its peak memory includes its inputs."""
    build_pass(replace(setup, positions=min(setup.positions, WARM_UP_POSITIONS), batch=1))()
    return build_pass(setup)


def count_least_bytes(setup: PassSetup) -> int:
    """Count the bytes that every mechanism has to move in a pass, as `LEAST_TRAFFIC` explains."""
    attention = _build(setup)
    shape = attention.shape
    queries = 0 if attention.shared_query_key else shape.key_width
    values = 0 if attention.shared_key_value else shape.value_width
    inputs = queries + shape.key_width + values + attention.extra_per_head
    return 4 * setup.batch * shape.heads * shape.positions * (3 * inputs + 2 * shape.value_width)


def _build(setup: PassSetup) -> Attention:
    width, row = setup.head_width, max(1, round(setup.positions**0.5))
    shape = AttentionShape(setup.heads, width, width, setup.positions, row)
    with seeded(0):
        return build_attention(setup.variant.attention, setup.variant.options, shape).to(setup.device).train()


def build_checked_model(setup: PassSetup) -> PixelModel:
    """Build a small model to compare a mechanism's forms. Raises `UsageError` for sizes that a model cannot have."""
    sizes = {
        "attention": setup.variant.attention,
        "attention_options": setup.variant.options,
        "layers": 1,
        "heads": setup.heads,
        "head_width": setup.head_width,
        "width": setup.heads * setup.head_width,
        "feed_forward": setup.head_width,
        "image": _CHECKED_IMAGE,
    }
    config = parse_config(ModelConfig, sizes, f"{setup.heads} heads of {setup.head_width}")
    with seeded(0):
        return PixelModel(config).eval()
