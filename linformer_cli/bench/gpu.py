"""All that is to be known of a GPU in one go: is it right there, and how fast.

Checks come first: kernels against their textbook in float64, the graph engine against the model's own step, and every
mechanism's two executions on the device. Then sampling at several batch sizes, many images at once, training against
softmax, and attention alone. A part that fails says so in the report and does not stop the others.
"""

import functools
import importlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from linformer_cli.attention.linear import LinearAttention
from linformer_cli.config import ImageShape, ModelConfig
from linformer_cli.errors import Interrupted
from linformer_cli.native.compiler import textbook_only
from linformer_cli.native.gpu import triton_refusal
from linformer_cli.report.benchmarks import describe_speed
from linformer_cli.sampling.decode import Sampler
from linformer_cli.sampling.engines import TEXTBOOK, choose_engine
from linformer_cli.system.device import synchronize
from linformer_cli.system.environment import describe_environment
from linformer_cli.system.memory import measure_peak_memory

from .cases import Check
from .ceilings import Ceilings
from .gpu_checks import (
    Found,
    build_linear,
    check_attention,
    check_engines,
    check_mechanisms,
    differentiate,
    draw_inputs,
    name_engine,
)
from .run import SamplingPlan, run_sampling_bench
from .subjects import build_subjects, preset_network
from .timing import Timing, measure_interleaved
from .training import run_training_bench
from .variants import parse_variants


@dataclass(frozen=True)
class GpuSizes:
    """How much is measured.

    `networks` are (name of the preset or None, network); `many` images are drawn at once; attention alone is timed at
    `lengths` for `heads` (images, heads of each), and checked at `checked_lengths`. `textbook_seconds` is what one row
    of torch's own steps may take.
    """

    networks: Sequence[tuple[str | None, ModelConfig]]
    sampling_batches: Sequence[int]
    training_batches: Sequence[int]
    many: int
    lengths: Sequence[int]
    heads: tuple[int, int]
    checked_lengths: Sequence[int]
    repeats: int
    textbook_seconds: float


def full_sizes() -> GpuSizes:
    """What a GPU is measured with: the paper's two networks."""
    networks = [preset_network(name) for name in ("mnist-paper", "cifar10-paper")]
    return GpuSizes(
        networks,
        sampling_batches=(1, 16, 256, 1024, 4096),
        training_batches=(16, 64),
        many=10_000,
        lengths=(784, 3072, 16_384),
        heads=(16, 8),
        checked_lengths=(1, 70, 784),
        repeats=5,
        textbook_seconds=20,
    )


def tiny_sizes() -> GpuSizes:
    """What shows in seconds, on any device, that all of it works."""
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
        textbook_seconds=5,
    )


@dataclass
class GpuReport:
    """What was found. Lists hold plain records; `failed` says by part why it has none; `missing` what was not there."""

    device: str
    checks: list[dict[str, Any]] = field(default_factory=list)
    sampling: list[dict[str, Any]] = field(default_factory=list)
    many: list[dict[str, Any]] = field(default_factory=list)
    training: list[dict[str, Any]] = field(default_factory=list)
    attention: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    ceilings: dict[str, Any] | None = None
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.failed and all(check["passed"] for check in self.checks)


class GpuBench:
    """Runs all parts one after another; `save` is told the report after each, `check` called in between, to give up."""

    def __init__(
        self,
        device: str,
        sizes: GpuSizes,
        save: Callable[[GpuReport], None] = lambda report: None,
        talk: Callable[[str], None] = lambda line: None,
        check: Check = None,
    ) -> None:
        self._device, self._sizes = device, sizes
        self._save, self._talk, self._check = save, talk, check
        self._ceilings = Ceilings(device)
        self.result = GpuReport(device, environment=describe_environment())

    def run(self) -> GpuReport:
        """Raises `Interrupted` as `check` does, with what there is by then in `result`."""
        if (refusal := triton_refusal(torch.device(self._device))) is not None:
            self.result.missing.append(f"kernels in Triton: {refusal}")
        parts = {
            "attention checks": lambda: self._record(check_attention(self._device, self._sizes.checked_lengths)),
            "engine checks": lambda: self._record(check_engines(self._device, self._sizes.networks)),
            "mechanism checks": lambda: self._record(check_mechanisms(self._device)),
            "sampling": self._measure_sampling,
            "many": self._measure_many,
            "training": self._measure_training,
            "attention": self._measure_attention,
        }
        for name, part in parts.items():
            if self._check is not None:
                self._check()
            try:
                part()
            except Interrupted:
                raise
            except Exception as error:  # the other parts are worth having all the same
                self.result.failed[name] = f"{type(error).__name__}: {error}"
                self._talk(f"{name} failed: {self.result.failed[name].splitlines()[0]}")
            self.result.ceilings = self._ceilings.describe()
            self._save(self.result)
        return self.result

    def _record(self, found: Iterable[Found]) -> None:
        for name, error, tolerance in found:
            passed = error <= tolerance  # NaN is not
            known = error if math.isfinite(error) else None
            self.result.checks.append({"name": name, "error": known, "tolerance": tolerance, "passed": passed})
            self._talk(f"{'ok' if passed else 'WRONG'}: {name}: {error:.2g} of {tolerance:.0e} allowed")

    def _measure_sampling(self) -> None:
        sizes = self._sizes
        for precision in ("fp32", "bf16"):
            subjects = build_subjects(parse_variants(["linear"]), sizes.networks, self._device, precision)
            # Whole images, since recording the graph belongs to them; torch's own steps only as long as allowed.
            for engine, limit in ((name_engine(subjects[0].model), None), (TEXTBOOK, sizes.textbook_seconds)):
                plan = SamplingPlan(sizes.sampling_batches, sizes.repeats, False, limit, engines=(engine,))
                report = run_sampling_bench(
                    subjects, plan, precision, self._ceilings, self._say_speed, self._check, checked=True
                )
                self.result.sampling += report.rows

    def _measure_many(self) -> None:
        """Many images as one batch of the first network, in bfloat16; the first time is counted apart."""
        subject = build_subjects(parse_variants(["linear"]), self._sizes.networks[:1], self._device, "bf16")[0]
        count, engine = self._sizes.many, name_engine(subject.model)
        Sampler(subject.model, engine=engine).sample(range(2))  # compiles what there is to compile
        if self._device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(self._device)
        samples = []
        for _ in range(self._sizes.repeats):
            synchronize(self._device)
            began = time.perf_counter()
            batch = Sampler(subject.model, engine=engine).sample(range(count), before_step=self._check)
            samples.append(time.perf_counter() - began)
        timing = Timing(tuple(samples))
        row = {
            "preset": subject.preset,
            "images": count,
            "engine": choose_engine(engine, subject.model).value,
            "precision": "bf16",
            "samples_seconds": samples,
            "images_per_second": count / timing.median,
            "state_bytes": batch.state_bytes,
            "peak_memory_bytes": measure_peak_memory(self._device),
        }
        self.result.many.append(row)
        self._talk(f"{count:,} images at once: {row['images_per_second']:.5g} images/s")

    def _measure_training(self) -> None:
        subjects = build_subjects(parse_variants(["linear", "softmax"]), self._sizes.networks, self._device, "fp32")
        report = run_training_bench(
            subjects,
            self._sizes.training_batches,
            self._sizes.repeats,
            "bf16",
            self._sizes.textbook_seconds,
            (),
            self._ceilings,
            self._say_speed,
            self._check,
            checked=True,
        )
        self.result.training += report.rows

    def _measure_attention(self) -> None:
        """Attention alone in bfloat16, forward and backward, beside torch's own softmax and flash-linear-attention."""
        batch, heads = self._sizes.heads
        for length in self._sizes.lengths:
            inputs = draw_inputs(batch, heads, length, 32, self._device, torch.bfloat16)
            attention = build_linear("elu", 32, heads)
            works: dict[str, Callable[[], object]] = {
                "linear": functools.partial(differentiate, attention, inputs),
                "linear, plain torch": functools.partial(_differentiate_plainly, attention, inputs),
                "softmax of torch": functools.partial(_differentiate_softmax, inputs),
            }
            if (foreign := _find_flash_linear_attention()) is not None:
                works["flash-linear-attention"] = functools.partial(_differentiate_foreign, foreign, inputs)
            elif "flash-linear-attention" not in self.result.missing:
                self.result.missing.append("flash-linear-attention")
            timings = measure_interleaved(list(works.values()), list(works.values()), self._sizes.repeats, self._device)
            for name, timing in zip(works, timings, strict=True):
                row = {"name": name, "batch": batch, "heads": heads, "head_width": 32, "positions": length}
                row |= {"seconds": timing.median, "samples_seconds": list(timing.samples)}
                self.result.attention.append(row)
                self._talk(f"attention, {name}, T = {length:,}: {1e3 * timing.median:.4g} ms")

    def _say_speed(self, row: dict[str, Any]) -> None:
        self._talk(f"{row['precision']}, {describe_speed(row)}")


def _differentiate_plainly(attention: LinearAttention, inputs: Sequence[Tensor]) -> None:
    with textbook_only():
        differentiate(attention, inputs)


def _differentiate_softmax(inputs: Sequence[Tensor]) -> None:
    q, k, v = (part.detach().requires_grad_() for part in inputs)
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.autograd.grad(y, [q, k, v], v.detach())


def _find_flash_linear_attention() -> Callable[..., Any] | None:
    """Its chunked linear attention, which takes [B, T, H, K]; None where it is not installed."""
    try:
        found: Callable[..., Any] = importlib.import_module("fla.ops.linear_attn").chunk_linear_attn
    except (ImportError, AttributeError):
        return None
    return found


def _differentiate_foreign(attend: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
    """With the same map, in torch; and normalised by what the library has for it."""
    q, k, v = (part.detach().transpose(1, 2).contiguous().requires_grad_() for part in inputs)
    y, _ = attend(functional.elu(q) + 1, functional.elu(k) + 1, v, scale=1.0, normalize=True)
    torch.autograd.grad(y, [q, k, v], v.detach())
