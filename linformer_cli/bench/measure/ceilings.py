"""The ceilings of a machine: its highest rates of matrix products and memory copies. Each benchmark measures them."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated

import torch
from torch import nn
from torch.nn import functional

from linformer_cli.model.compile_step import compile_step
from linformer_cli.model.mixers import find_mixer
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.report.tables import Shown
from linformer_cli.system.device import torch_dtype
from linformer_cli.system.memory import allocate_zeros, measure_free_memory
from linformer_cli.system.timing import Timing, time_work

REPEATS = 5
_SAMPLE_SECONDS = 0.02  # in samples of this duration, the time for reading the clock is negligible
COPY_BYTES = 2**28  # this block is larger than the caches of most processors
# More rows are not expected to increase the rate of a product. A GPU needs more of them than a CPU.
MOST_ROWS, MOST_ROWS_ON_GPU = 1024, 2**16


@dataclasses.dataclass(frozen=True)
class ProductCeiling:
    """The GFLOP/s of a model's `products`, each with a matrix of its own, for `rows` positions at once."""

    products: Annotated[int, Shown("products")]
    rows: Annotated[int, Shown("rows at once", ",")]
    precision: Annotated[str, Shown("precision")]
    gigaflops: Annotated[float, Shown("GFLOP/s", ".4g")]
    flops: int
    samples_seconds: Sequence[float]


@dataclasses.dataclass(frozen=True)
class CopyCeiling:
    """The rate in GB/s of copying `copied_bytes` of memory. Each byte counts twice, as read and as written."""

    gigabytes_per_second: float
    copied_bytes: int
    samples_seconds: Sequence[float]


@dataclasses.dataclass(frozen=True)
class CeilingsReport:
    copy: CopyCeiling
    products: list[ProductCeiling]

    def __str__(self) -> str:
        best: dict[str, float] = {}
        for product in self.products:
            best[product.precision] = max(best.get(product.precision, 0.0), product.gigaflops)
        products = ", ".join(f"{speed:.0f} GFLOP/s in {kind}" for kind, speed in sorted(best.items(), reverse=True))
        copied = f"memory copies {self.copy.gigabytes_per_second:.0f} GB/s"
        return f"matrix products up to {products}; {copied}" if products else copied


def time_samples(work: Callable[[], object], device: str, repeats: int) -> tuple[float, ...]:
    """Return seconds per `work` in each sample, after a warm-up. In a sample, short work is repeated."""

    def run(times: int) -> float:
        def work_often() -> None:
            for _ in range(times):
                work()

        return time_work(work_often, device)

    run(1)
    times = max(1, round(_SAMPLE_SECONDS / max(run(1), 1e-9)))
    return tuple(run(times) / times for _ in range(repeats))


class Ceilings:
    """The ceilings that a benchmark needs. Each is measured once, on first use."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._products: dict[tuple[object, ...], ProductCeiling] = {}

    def product(self, shapes: Sequence[tuple[int, int]], rows: int, precision: str) -> ProductCeiling:
        """Measure the rate of multiplying [rows, inputs] by a matrix of each of `shapes` (inputs, outputs) in turn."""
        rows = min(rows, MOST_ROWS if self._device == "cpu" else MOST_ROWS_ON_GPU)
        key = (tuple(sorted(Counter(shapes).items())), rows, precision)
        if key not in self._products:
            self._products[key] = self._measure_product(shapes, rows, precision)
        return self._products[key]

    def both_products(self, shapes: Sequence[tuple[int, int]], rows: int) -> dict[str, ProductCeiling]:
        return {precision: self.product(shapes, rows, precision) for precision in ("fp32", "bf16")}

    @functools.cached_property
    def copy(self) -> CopyCeiling:
        """Copy a block of `COPY_BYTES`, or of an eighth of the free memory if that is less."""
        free = measure_free_memory(self._device)
        count = max(1, min(COPY_BYTES, COPY_BYTES if free is None else free // 8) // 4)
        source, target = (allocate_zeros((count,), torch.float32).to(self._device).fill_(1) for _ in range(2))
        timing = Timing(time_samples(lambda: target.copy_(source), self._device, REPEATS))
        return CopyCeiling(timing.rate(2 * 4 * count / 1e9), 4 * count, timing.samples)

    def describe(self) -> CeilingsReport:
        return CeilingsReport(self.copy, list(self._products.values()))

    def _measure_product(self, shapes: Sequence[tuple[int, int]], rows: int, precision: str) -> ProductCeiling:
        device, dtype = self._device, torch_dtype(precision)
        inputs = {width: torch.randn(rows, width, device=device).to(dtype) for width in {shape[0] for shape in shapes}}
        weights = [torch.randn(outputs, width, device=device).to(dtype) for width, outputs in shapes]

        @torch.no_grad()
        def work() -> None:
            for weight in weights:
                functional.linear(inputs[weight.shape[1]], weight)

        timing = Timing(time_samples(work, device, REPEATS))
        flops = sum(2 * rows * width * outputs for width, outputs in shapes)
        return ProductCeiling(len(shapes), rows, precision, timing.rate(flops / 1e9), flops, timing.samples)


# A backward pass adds two products per weight matrix: one for the gradient of its input, one for its own gradient.
TRAINING_FACTOR = 3
WHAT_IS_COUNTED = (
    "products with the weights of linear layers and LSTM cells, each once per position; the products inside attention "
    "and short convolutions are not counted, so that all mechanisms of one size are compared over the same work"
)


def list_products(model: nn.Module) -> list[tuple[int, int]]:
    """List (inputs, outputs) of every product of a vector with a weight matrix."""
    shapes = []
    for module in model.modules():
        if isinstance(module, nn.Linear) and getattr(module, "per_position", True):
            shapes.append((module.in_features, module.out_features))
        elif isinstance(module, nn.LSTM):
            shapes += [(module.input_size, 4 * module.hidden_size), (module.hidden_size, 4 * module.hidden_size)]
    return shapes


def count_product_flops(model: nn.Module) -> int:
    """Return FLOPs (2 for a multiply-add) of the matrix products of a forward pass at one value, on average."""
    total = sum_flops(model)
    if isinstance(model, PixelModel):
        shared = sum_flops(model.embedding) + sum_flops(model.blocks)
        total += shared // model.embedding.stride - shared
    return total


def sum_flops(module: nn.Module) -> int:
    return sum(2 * inputs * outputs for inputs, outputs in list_products(module))


def count_rerun_positions(positions: int) -> int:
    return positions * (positions + 1) // 2


def count_state_bytes(model: PixelModel, batch: int, products: torch.dtype | None = None) -> int:
    """Count the bytes of the state of `batch` images for `products` (None: the model's). Raises `NoProgram`."""
    return model.state_bytes(batch) if products is None else compile_step(model, products=products).state_bytes(batch)


def state_traffic_bytes(model: PixelModel, batch: int, products: torch.dtype | None = None) -> int | None:
    """Return the mean bytes of state that a step reads and writes, or None if the mechanism does not say."""
    share = find_mixer(model.config.attention).count_state_traffic(model.config.block_image.positions)
    whole = count_state_bytes(model, batch, products) // model.embedding.stride
    return None if share is None else round(share * whole)
