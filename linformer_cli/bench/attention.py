"""`lintx bench attention`: how time and memory of a forward and backward pass grow with T."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from linformer_cli.errors import UsageError
from linformer_cli.evaluation.agreement import require_agreement
from linformer_cli.model.mixers import Variant
from linformer_cli.report.tables import Output, TableStyle
from linformer_cli.system.memory import measure_free_memory
from linformer_cli.system.timing import Timing, time_work
from linformer_cli.units import format_bytes, format_duration
from .columns import list_growth_tables, render_growth
from .growth import Exponents, Point, describe_exponents, extrapolate
from .measure import attention_pass
from .measure.attention_pass import Inputs, PassSetup, build_checked_model, build_pass
from .measure.peak_memory import PassFailed, PeakMemory, measure_peak
from .rounds import Bench, BenchReport, Measurement, measure_groups
from .rows import AttentionRow

# As in Katharopoulos 2020, a pass has about as many positions at every T, in fewer or more sequences.
PASS_POSITIONS = 65_536
_EXTRA_PASSES = 2  # each row needs two passes besides the repeats: one to measure memory and one to warm up
_ATTEMPTS = 2  # a pass that is too slow is tried again, because the machine may have been busy


@dataclass(frozen=True)
class AttentionSettings:
    """A pass has `batch` sequences, or about `pass_positions` positions. A limit is for all passes of a row."""

    repeats: int = 5
    limit_seconds: float = 60.0
    heads: int = 1
    head_width: int = 32
    device: str = "cpu"
    batch: int | None = None
    pass_positions: int = PASS_POSITIONS

    def choose_batch(self, positions: int) -> int:
        return self.batch or max(1, self.pass_positions // positions)

    def setup(self, variant: Variant, length: int) -> PassSetup:
        return PassSetup(variant, self.heads, self.head_width, length, self.choose_batch(length), self.device)


@dataclass(frozen=True, kw_only=True)
class AttentionReport(BenchReport[AttentionRow]):
    exponents: Sequence[Exponents]

    def show(self, style: TableStyle) -> Output:
        plots = {"plot": partial(render_growth, self.rows, self.exponents)}
        return Output(list_growth_tables(self.rows, self.exponents, style), plots, remarks=[str(self.ceilings)])


def run_attention_bench(
    variants: Sequence[Variant], positions: Sequence[int], settings: AttentionSettings, bench: Bench
) -> AttentionReport:
    """Compare the forms of every variant, then measure it at every length, as `measure_groups` does."""
    groups = prepare(variants, positions, settings, bench)
    rows, ended = measure_groups(groups, bench, [measurement.require_agreement for measurement in groups[0]])
    labels = [variant.label for variant in variants]
    rows.sort(key=lambda row: labels.index(row.name))  # stable: the lengths of a mechanism stay in order
    conditions = {
        "repeats": settings.repeats,
        "limit_seconds": settings.limit_seconds,
        "heads": settings.heads,
        "head_width": settings.head_width,
        "batch": settings.batch or f"scaled: {settings.pass_positions:,} / T, at least 1",
        "memory": _describe_memory(settings.device),
        "warm_up_passes": 1,
        "interleaved": True,
        "copy_share": attention_pass.LEAST_TRAFFIC,
    }
    return AttentionReport(
        rows=rows,
        ended=ended,
        settings=conditions,
        ceilings=bench.ceilings.describe(),
        exponents=describe_exponents(rows),
    )


def prepare(
    variants: Sequence[Variant], positions: Sequence[int], settings: AttentionSettings, bench: Bench
) -> list[list["AttentionMeasurement"]]:
    """Return groups of measurements by length, shortest first, whose rounds are interleaved."""
    groups: list[list[AttentionMeasurement]] = []
    for length in sorted(set(positions)):
        inputs, shared = Inputs(), (settings.repeats, bench, settings.limit_seconds)
        shorter = groups[-1] if groups else [None] * len(variants)
        groups.append(
            [
                AttentionMeasurement(*shared, settings.setup(variant, length), inputs, before)
                for variant, before in zip(variants, shorter, strict=True)
            ]
        )
    return groups


@dataclass(eq=False)
class AttentionMeasurement(Measurement[AttentionRow, Callable[[], None]]):
    """A mechanism at one length, left out if the `shorter` one was or if growth predicts too much time or memory."""

    limit_seconds: float
    setup: PassSetup
    inputs: Inputs
    shorter: "AttentionMeasurement | None"
    memory: PeakMemory | None = field(default=None, init=False)

    def require_agreement(self) -> None:
        """Raise `DisagreementError` if the mechanism's forms disagree. If it refuses these sizes, it is left out."""
        try:
            require_agreement(build_checked_model(self.setup))
        except UsageError as error:
            self.end(str(error))

    def prepare(self) -> Callable[[], None]:
        if self.memory is None:
            self._require_fit()
            self.bench.check()
            self.memory = self.measure_apart(self._measure_memory)
        work = build_pass(self.setup, self.inputs)
        work()
        return work

    def time_sample(self, work: Callable[[], None]) -> float:
        self.bench.check()
        return time_work(work, self.setup.device)

    @cached_property
    def _least_bytes(self) -> int:
        return attention_pass.count_least_bytes(self.setup)

    def row(self) -> AttentionRow:
        setup, batch = self.setup, self.setup.batch
        peak = None if self.memory is None else self.memory.bytes
        row = AttentionRow(
            **setup.variant.described,
            device=setup.device,
            batch=batch,
            heads=setup.heads,
            head_width=setup.head_width,
            positions=setup.positions,
            peak_memory_bytes=peak,
            memory_bytes_per_sequence=None if peak is None else peak / batch,
            **self.outcome,
        )
        if not self.samples:
            return row
        timing = Timing(self.samples)
        first, third = timing.quartiles
        return replace(
            row,
            seconds_per_sequence=timing.median / batch,
            seconds_per_sequence_quartiles=(first / batch, third / batch),
            copy_share=timing.rate(self._least_bytes / 1e9) / self.bench.ceilings.copy.gigabytes_per_second,
        )

    def _require_fit(self) -> None:
        if self.shorter is None:
            return
        if self.shorter.left_out is not None:
            raise PassFailed(self.shorter.left_out)
        setup, limit = self.setup, self.limit_seconds
        times, sizes = self.shorter.list_points()
        seconds, memory = extrapolate(times, setup.positions), extrapolate(sizes, setup.positions)
        if seconds is not None and (total := seconds * setup.batch * self._count_passes()) > limit:
            raise PassFailed(f"would take about {format_duration(total)}; the limit is {format_duration(limit)}")
        free = measure_free_memory(setup.device)
        if memory is not None and free is not None and memory * setup.batch > free:
            raise PassFailed(f"would need about {format_bytes(memory * setup.batch)}; {format_bytes(free)} are free")

    def list_points(self) -> tuple[list[Point], list[Point]]:
        """Return seconds per sequence and bytes per sequence, at all shorter lengths and at this one."""
        times, sizes = self.shorter.list_points() if self.shorter else ([], [])
        length, batch = self.setup.positions, self.setup.batch
        if self.samples:
            times.append((length, Timing(self.samples).median / batch))
        if self.memory is not None and self.memory.bytes is not None:
            sizes.append((length, self.memory.bytes / batch))
        return times, sizes

    def _measure_memory(self) -> PeakMemory:
        """Measure the memory of one pass. Raises `PassFailed` if the repeats would exceed the limit."""
        limit = self.limit_seconds
        for _ in range(_ATTEMPTS):
            try:
                memory = measure_peak(attention_pass.build_warm_pass, self.setup, limit)
            except UsageError as error:
                raise PassFailed(str(error)) from None
            if memory.seconds * self._count_passes() <= limit:
                return memory
        most = f"{self._count_passes()} passes within {format_duration(limit)}"
        raise PassFailed(f"one pass took {format_duration(memory.seconds)}, too long for {most}")

    def _count_passes(self) -> int:
        return self.repeats + _EXTRA_PASSES


def _describe_memory(device: str) -> str:
    if device == "cpu":
        return (
            "growth of the peak resident memory of a fresh process over one pass, inputs included, after a warm-up at "
            f"up to {attention_pass.WARM_UP_POSITIONS} positions"
        )
    return "torch's peak of allocated bytes over one pass, inputs included" if device != "mps" else "not measured"
