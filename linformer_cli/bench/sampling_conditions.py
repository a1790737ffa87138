"""What the rows of `lintx bench sample` depend on: the networks, and how they were timed."""

from dataclasses import dataclass

from linformer_cli.config import ImageShape
from linformer_cli.evaluation.agreement import CHECKED_POSITIONS
from linformer_cli.sampling.whole_images import WARM_UP_STEPS

from .measure.costs import WHAT_IS_COUNTED, count_product_flops
from .models import CHECKED_LAYERS, BenchModel


@dataclass(frozen=True)
class NetworkFacts:
    """The size of a model."""

    name: str
    preset: str | None
    image: ImageShape
    layers: int
    heads: int
    width: int
    parameters: int
    product_flops_per_position: int


@dataclass(frozen=True)
class SamplingConditions:
    """The settings that the rows depend on."""

    repeats: int
    limit_seconds: float | None
    peak_memory: str | None
    networks: list[NetworkFacts]
    peak_memory_bytes: int
    warm_up_steps: int = WARM_UP_STEPS
    interleaved: bool = True
    checked: str = f"the first {CHECKED_POSITIONS} positions; {CHECKED_LAYERS} layers of untrained models"
    product_share: str = WHAT_IS_COUNTED
    copy_share: str = (
        "the rate of reading and writing the state in a step, as a share of the rate of memory copies; see "
        "docs/guide/benchmark.md"
    )


def describe_network(timed: BenchModel) -> NetworkFacts:
    model, config = timed.model, timed.model.config
    return NetworkFacts(
        timed.name,
        timed.preset,
        config.image,
        config.layers,
        config.heads,
        config.width,
        model.parameter_count(),
        count_product_flops(model),
    )
