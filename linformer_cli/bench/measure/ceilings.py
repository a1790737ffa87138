"""What this machine can do at best, measured in the same run: matrix products and copying memory."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from linformer_cli.system.device import synchronize, torch_dtype
from linformer_cli.system.memory import measure_free_memory

from .timing import Timing

REPEATS = 5
# Large enough that the products of one sample are not lost in the clock, and that no cache holds what is copied.
_SAMPLE_SECONDS = 0.02
_COPY_BYTES = 2**28
# More rows than that make a product no faster.
MOST_ROWS = 1024


@dataclass(frozen=True)
class ProductCeiling:
    """The products that one position asks a model for, `rows` positions at once: GFLOP/s by `precision`.

    Every product is with a matrix of its own, as in the model, so that the weights come from where they come from
    there; the median over repeats, and every sample in seconds.
    """

    rows: int
    precision: str
    gigaflops: float
    gigaflops_quartiles: tuple[float, float]
    flops: int
    samples_seconds: tuple[float, ...]


@dataclass(frozen=True)
class CopyCeiling:
    """Copying `copied_bytes` of memory: GB/s, each byte counted once as read and once as written."""

    gigabytes_per_second: float
    copied_bytes: int
    samples_seconds: tuple[float, ...]


def measure_product_ceiling(
    shapes: Sequence[tuple[int, int]], rows: int, precision: str, device: str, repeats: int = REPEATS
) -> ProductCeiling:
    """Multiply [rows, inputs] by every matrix of `shapes` (inputs, outputs), one after another."""
    rows = min(rows, MOST_ROWS)
    dtype = torch_dtype(precision)
    inputs = {width: torch.randn(rows, width, device=device).to(dtype) for width in {shape[0] for shape in shapes}}
    weights = [torch.randn(outputs, width, device=device).to(dtype) for width, outputs in shapes]

    @torch.no_grad()
    def work() -> None:
        for weight in weights:
            functional.linear(inputs[weight.shape[1]], weight)

    samples = _time(work, device, repeats)
    flops = sum(2 * rows * width * outputs for width, outputs in shapes)
    timing = Timing(samples)
    first, third = (flops / seconds / 1e9 for seconds in reversed(timing.quartiles))
    return ProductCeiling(rows, precision, flops / timing.median / 1e9, (first, third), flops, samples)


def measure_copy_ceiling(device: str, copied_bytes: int = _COPY_BYTES, repeats: int = REPEATS) -> CopyCeiling:
    """Copy a block that no cache holds, or an eighth of the memory that is free, where that is less."""
    free = measure_free_memory(device)
    count = max(1, min(copied_bytes, copied_bytes if free is None else free // 8) // 4)
    source, target = torch.ones(count, device=device), torch.empty(count, device=device)
    samples = _time(lambda: target.copy_(source), device, repeats)
    return CopyCeiling(2 * 4 * count / Timing(samples).median / 1e9, 4 * count, samples)


def _time(work: Callable[[], object], device: str, repeats: int) -> tuple[float, ...]:
    """Seconds of one `work` in each of `repeats` samples, warmed up; a short work is made several times in a sample."""

    def run(times: int) -> float:
        synchronize(device)
        began = time.perf_counter()
        for _ in range(times):
            work()
        synchronize(device)
        return time.perf_counter() - began

    run(1)
    times = max(1, round(_SAMPLE_SECONDS / max(run(1), 1e-9)))
    return tuple(run(times) / times for _ in range(repeats))


class Ceilings:
    """The ceilings that a benchmark asks for, each measured once."""

    def __init__(self, device: str, repeats: int = REPEATS) -> None:
        self._device, self._repeats = device, repeats
        self._products: dict[tuple[Any, ...], ProductCeiling] = {}
        self._copy: CopyCeiling | None = None

    def product(self, shapes: Sequence[tuple[int, int]], rows: int, precision: str) -> ProductCeiling:
        key = (tuple(sorted(Counter(shapes).items())), min(rows, MOST_ROWS), precision)
        if key not in self._products:
            self._products[key] = measure_product_ceiling(shapes, rows, precision, self._device, self._repeats)
        return self._products[key]

    @property
    def copy(self) -> CopyCeiling:
        if self._copy is None:
            self._copy = measure_copy_ceiling(self._device, repeats=self._repeats)
        return self._copy

    def describe(self) -> dict[str, Any]:
        """All that was measured, as a record."""
        products = [
            {"products": sum(count for _, count in shapes), **vars(ceiling)}
            for (shapes, _, _), ceiling in self._products.items()
        ]
        return {"copy": vars(self.copy), "products": products}
