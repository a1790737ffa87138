"""The sizes of `lintx bench gpu`."""

from collections.abc import Sequence
from dataclasses import dataclass

from linformer_cli.config import ImageShape, ModelConfig

from .models import preset_network


@dataclass(frozen=True)
class GpuSizes:
    """The sizes of all parts.

    `networks` holds pairs (name of the preset or None, network). `many` is the number of images drawn at once.
    Attention alone is timed at `lengths` and checked at `checked_lengths`. For attention alone, `heads` holds the
    number of images and the number of heads per image. `limit_seconds` is the time limit for one row of training or
    sampling.
    """

    networks: Sequence[tuple[str | None, ModelConfig]]
    sampling_batches: Sequence[int]
    training_batches: Sequence[int]
    many: int
    lengths: Sequence[int]
    heads: tuple[int, int]
    checked_lengths: Sequence[int]
    repeats: int
    limit_seconds: float


def full_sizes() -> GpuSizes:
    """Return the sizes for a GPU, with the two networks of Katharopoulos 2020."""
    networks = [preset_network(name) for name in ("mnist-paper", "cifar10-paper")]
    return GpuSizes(
        networks,
        sampling_batches=(1, 64, 1024),
        training_batches=(16, 64),
        many=10_000,
        lengths=(784, 3072, 16_384),
        heads=(16, 8),
        checked_lengths=(1, 70, 784),
        repeats=3,
        limit_seconds=2,
    )


def tiny_sizes() -> GpuSizes:
    """Return sizes small enough for every part to take only seconds on any device."""
    network = ModelConfig(
        layers=1, heads=2, width=32, head_width=16, feed_forward=32, image=ImageShape(height=4, width=4, levels=16)
    )
    return GpuSizes(
        [(None, network)],
        sampling_batches=(2,),
        training_batches=(2,),
        many=3,
        lengths=(20,),
        heads=(1, 2),
        checked_lengths=(1, 20),
        repeats=1,
        limit_seconds=5,
    )
