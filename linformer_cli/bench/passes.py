"""What `lintx bench attention` measures: one forward and backward pass of a mechanism alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from linformer_cli.attention import build_attention
from linformer_cli.attention.base import Attention, AttentionShape
from linformer_cli.config import ImageShape, ModelConfig
from linformer_cli.model.pixel_model import PixelModel

LEAST_TRAFFIC = (
    "inputs read and outputs written once, inputs and the gradient of the outputs read and the gradients of the inputs "
    "written once, against copying memory; what a mechanism keeps and moves besides is its own"
)

# The image on which a mechanism's two executions are compared before it is timed.
_CHECKED_IMAGE = ImageShape(height=12, width=12, levels=16)


@dataclass(frozen=True)
class PassSetup:
    """A mechanism at one length: `batch` sequences of `positions` in float32. `options` are plain values."""

    attention: str
    options: dict[str, Any]
    heads: int
    head_width: int
    positions: int
    batch: int = 1
    device: str = "cpu"


def build_pass(setup: PassSetup, seed: int = 0) -> Callable[[], None]:
    """Work that makes its inputs, attends from nothing, and goes back from a random gradient to inputs and parameters.

    Rows are as long as the image is high. All tensors of a pass are freed at its end.
    """
    attention = _build(setup, seed)
    shape = attention.shape  # a mechanism may have widths of its own

    def draw(channels: int) -> torch.Tensor:
        return torch.randn(setup.batch, shape.heads, shape.positions, channels, device=setup.device).requires_grad_()

    def work() -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            k, v = draw(shape.key_width), draw(shape.value_width)
            q = k if attention.shared_query_key else draw(shape.key_width)
            extra = draw(attention.extra_per_head) if attention.extra_per_head else None
            gradient = torch.randn_like(v)
        y, _ = attention.attend(q, k, v, None, extra)
        y.backward(gradient)
        attention.zero_grad(set_to_none=True)

    return work


def count_least_bytes(setup: PassSetup) -> int:
    """Bytes that a pass has to move whatever its mechanism: see `LEAST_TRAFFIC`."""
    attention = _build(setup)
    shape = attention.shape
    queries = 0 if attention.shared_query_key else shape.key_width
    inputs = queries + shape.key_width + shape.value_width + attention.extra_per_head
    return 4 * setup.batch * shape.heads * shape.positions * (3 * inputs + 2 * shape.value_width)


def _build(setup: PassSetup, seed: int = 0) -> Attention:
    width, row = setup.head_width, max(1, round(setup.positions**0.5))
    shape = AttentionShape(setup.heads, width, width, setup.positions, row)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_attention(setup.attention, setup.options, shape).to(setup.device).train()


def build_checked_model(setup: PassSetup) -> PixelModel:
    """A small model around the mechanism, for the comparison of its two executions."""
    config = ModelConfig(
        attention=setup.attention,
        attention_options=setup.options,
        layers=1,
        heads=setup.heads,
        head_width=setup.head_width,
        width=setup.heads * setup.head_width,
        feed_forward=setup.head_width,
        image=_CHECKED_IMAGE,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return PixelModel(config).eval()
