"""`lintx bench gpu`: correctness and speed on a GPU in one run.

The checks come first, those of what has never run on a GPU before the others. They compare the parallel and step forms
of every mechanism, replayed steps and training steps with plain ones, kernels with plain torch in float64, and the
sampling engine with the model's own step. The benchmark then times sampling at several batch sizes, training of linear
attention and softmax, sampling of many images at once, and attention alone. A part that fails, or that is out of time,
is recorded in the report and does not stop the others.
"""

import importlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from linformer_cli.checkpoint import open_checkpoint
from linformer_cli.config import ImageShape, ModelConfig
from linformer_cli.errors import Interrupted
from linformer_cli.evaluation.agreement import AgreementRow
from linformer_cli.model.mixers import parse_variants
from linformer_cli.native.gpu import triton_refusal
from linformer_cli.native.library import reference_only
from linformer_cli.sampling.engines import AUTO, REFERENCE
from linformer_cli.sampling.engines.ahead import AheadEngine
from linformer_cli.sampling.engines.cuda import FusedCudaEngine
from linformer_cli.system.environment import describe_environment
from linformer_cli.system.signals import Check, never_stop
from linformer_cli.system.timing import Timing, time_work
from . import sample, train
from .gpu_checks import (
    COMPARED,
    build_linear,
    check_attention,
    check_engines,
    check_look_ahead,
    check_mechanisms,
    check_training,
    differentiate,
    draw_inputs,
)
from .measure.ceilings import Ceilings, CeilingsReport
from .models import BenchModel, Network, build_models, preset_network
from .rounds import Bench, Measurement, measure_groups
from .rows import SamplingRow, TrainingRow
from .sample import SamplingSettings
from .train import GRAPH, TrainingSettings

_IMAGE = ImageShape(height=4, width=4, levels=16)
_TINY = ModelConfig(layers=1, heads=2, width=32, head_width=16, feed_forward=32, image=_IMAGE)


@dataclass(frozen=True)
class GpuSizes:
    """The sizes of all parts: by default, so small that every part takes only seconds on any device.

    `networks` holds pairs (name of the preset or None, network). `many` is the number of images drawn at once.
    Attention alone is timed at `lengths` and checked at `checked_lengths`. For attention alone, `heads` holds the
    number of images and the number of heads per image. `limit_seconds` is the time limit for one row of training or
    sampling, and `seconds` that for everything.
    """

    networks: Sequence[Network] = ((None, _TINY),)
    sampling_batches: Sequence[int] = (2,)
    training_batches: Sequence[int] = (2,)
    many: int = 3
    lengths: Sequence[int] = (20,)
    heads: tuple[int, int] = (1, 2)
    checked_lengths: Sequence[int] = (1, 20)
    repeats: int = 1
    limit_seconds: float = 5
    seconds: float = math.inf


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
        seconds=240,
    )


@dataclass(frozen=True)
class KernelRow:
    """The median time of a forward and backward pass of one implementation of attention."""

    name: str
    batch: int
    heads: int
    head_width: int
    positions: int
    seconds: float
    samples_seconds: Sequence[float]


@dataclass
class GpuReport:
    """The results so far, the errors of parts that failed, the parts that were out of time, and missing software."""

    device: str
    checks: list[AgreementRow] = field(default_factory=list)
    sampling: list[SamplingRow] = field(default_factory=list)
    training: list[TrainingRow] = field(default_factory=list)
    attention: list[KernelRow] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    cut: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    ceilings: CeilingsReport | None = None
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.failed and all(check.passed for check in self.checks)


class _OutOfTime(Interrupted):
    """A part has run out of time."""


class GpuBench:
    """Runs all parts in turn. `save` gets the report after each part or group of rows; `check` may raise to stop."""

    def __init__(
        self,
        device: str,
        sizes: GpuSizes,
        save: Callable[[GpuReport], None] = lambda report: None,
        info: Callable[[str], None] = lambda line: None,
        check: Check = never_stop,
    ) -> None:
        self._device, self._sizes = device, sizes
        self._save, self._info, self._stop = save, info, check
        self._until = math.inf
        self._bench = Bench(Ceilings(device), lambda row: self._info(row.describe()), self._check)
        self.result = GpuReport(device, environment=describe_environment())

    def run(self) -> GpuReport:
        """Run all parts. If `check` raises, the error is passed on, and `result` has the measurements so far."""
        if (refusal := triton_refusal(torch.device(self._device))) is not None:
            self.result.missing.append(refusal)
        device, sizes, started = self._device, self._sizes, time.monotonic()
        # Each part has to end by a share of the time.
        parts: dict[str, tuple[float, Callable[[], None]]] = {
            "mechanism checks": (0.25, lambda: self.record(check_mechanisms(device))),
            "training checks": (0.35, lambda: self.record(check_training(device))),
            "attention checks": (0.4, lambda: self.record(check_attention(device, sizes.checked_lengths))),
            "engine checks": (0.5, lambda: self.record(check_engines(device, sizes.networks))),
            "look-ahead": (0.55, self.measure_look_ahead),
            "sampling": (0.75, self.measure_sampling),
            "training": (0.85, self.measure_training),
            "many": (0.92, self.measure_many),
            "attention": (1.0, self.measure_attention),
        }
        for name, (share, part) in parts.items():
            self._until = started + share * sizes.seconds
            self._stop()
            try:
                part()
                self._stop()
            except _OutOfTime:
                self.result.cut.append(name)
                self._info(f"{name}: out of time")
            except Interrupted:
                raise
            except Exception as error:  # the other parts still run
                self.result.failed[name] = f"{type(error).__name__}: {error}"
                self._info(f"{name} failed: {self.result.failed[name].splitlines()[0]}")
            self.result.ceilings = self._bench.ceilings.describe()
            self._save(self.result)
        return self.result

    def _check(self) -> None:
        """Raise `Interrupted` if the benchmark or its part shall end."""
        self._stop()
        if time.monotonic() > self._until:
            raise _OutOfTime("out of time", 0)

    def record(self, rows: Iterable[AgreementRow]) -> None:
        for row in rows:
            self.result.checks.append(row)
            self._info(f"{'ok' if row.passed else 'WRONG'}: {row}")
            self._check()

    def measure_look_ahead(self) -> None:
        """Check look-ahead, and time it and single steps, with the default model, whose guesses are often right."""
        found, model = open_checkpoint(None, self._device, torch.float32)
        if (refusal := AheadEngine.refusal(model)) is not None:
            self.result.missing.append(f"look-ahead: {refusal}")
            return
        self.record(check_look_ahead(model))
        engines, limit = (FusedCudaEngine.name, AheadEngine.name), self._sizes.limit_seconds
        settings = SamplingSettings((1,), self._sizes.repeats, engines, rerun=False, limit_seconds=limit)
        groups = sample.prepare([BenchModel(found.name, model)], settings, self._bench)
        self._measure(groups, self.result.sampling)

    def measure_sampling(self) -> None:
        """Time linear attention and softmax, each in the engine for this device and in plain torch."""
        sizes = self._sizes
        timed: dict[str, Any] = {"repeats": sizes.repeats, "limit_seconds": sizes.limit_seconds}
        settings = SamplingSettings(sizes.sampling_batches, engines=(AUTO, REFERENCE), rerun=False, **timed)
        for precision in ("fp32", "bf16"):
            models = build_models(parse_variants(COMPARED), sizes.networks, self._device, precision)
            self._measure(sample.prepare(models, settings, self._bench), self.result.sampling)

    def measure_many(self) -> None:
        """Time the drawing of many images as one batch, with the first network in bfloat16."""
        models = build_models(parse_variants(["linear"]), self._sizes.networks[:1], self._device, "bf16")
        settings = SamplingSettings((self._sizes.many,), self._sizes.repeats, rerun=False)
        self._measure(sample.prepare(models, settings, self._bench), self.result.sampling)

    def measure_training(self) -> None:
        sizes = self._sizes
        models = build_models(parse_variants(COMPARED), sizes.networks, self._device, "fp32")
        engines = [(AUTO, "bf16"), (GRAPH, "bf16")]
        settings = TrainingSettings(sizes.training_batches, engines, sizes.repeats, sizes.limit_seconds)
        self._measure(train.prepare(models, settings, self._bench), self.result.training)

    def _measure(self, groups: Iterable[Sequence[Measurement[Any, Any]]], results: list[Any]) -> None:
        for group in groups:
            self._check()
            rows, _ = measure_groups([group], self._bench)
            results += rows
            self._save(self.result)
        self._check()

    def measure_attention(self) -> None:
        """Time linear attention alone, torch's softmax and flash-linear-attention, forward and backward in bfloat16."""
        batch, heads = self._sizes.heads
        foreign = find_flash_linear_attention()
        if foreign is None:
            self.result.missing.append("flash-linear-attention")
        for length in self._sizes.lengths:
            inputs = draw_inputs(batch, heads, length, 32, self._device, torch.bfloat16)
            attention = build_linear("elu", 32, heads)
            softmax = partial(functional.scaled_dot_product_attention, is_causal=True)
            works: dict[str, Callable[[], object]] = {
                "linear": partial(differentiate, attention.attend, inputs),
                "linear, plain torch": partial(_differentiate_plainly, attention.attend, inputs),
                "torch's softmax": partial(differentiate, softmax, inputs),
            }
            if foreign is not None:
                swapped = [part.transpose(1, 2).contiguous() for part in inputs]  # [B, T, H, K]
                works["flash-linear-attention"] = partial(differentiate, foreign, swapped)
            samples: dict[str, list[float]] = {name: [] for name in works}
            for _ in range(1 + self._sizes.repeats):
                for name, work in works.items():
                    self._check()
                    samples[name].append(time_work(work, self._device))
            for name, (_, *seconds) in samples.items():  # the first is the warm-up
                timing = Timing(seconds)
                self.result.attention.append(KernelRow(name, batch, heads, 32, length, timing.median, timing.samples))
                self._info(f"attention, {name}, T = {length:,}: {1e3 * timing.median:.4g} ms")


def _differentiate_plainly(attend: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
    with reference_only():
        differentiate(attend, inputs)


def find_flash_linear_attention() -> Callable[..., Any] | None:
    """Find flash-linear-attention's chunked form for [B, T, H, K], normalised after the map in plain torch; or None."""
    try:
        attend: Callable[..., Any] = importlib.import_module("fla.ops.linear_attn").chunk_linear_attn
    except (ImportError, AttributeError):
        return None
    return lambda q, k, v: attend(functional.elu(q) + 1, functional.elu(k) + 1, v, scale=1.0, normalize=True)
