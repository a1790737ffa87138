"""How the time and the memory of one mechanism's forward and backward pass grow with the number of positions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from linformer_cli.errors import Interrupted, UsageError
from linformer_cli.system.environment import describe_environment
from linformer_cli.system.memory import measure_free_memory
from linformer_cli.units import format_bytes, format_duration

from .agreement import require_agreement
from .growth import Point, describe_exponents, extrapolate
from .measure.attention_pass import LEAST_TRAFFIC, Drawn, PassSetup, build_checked_model, build_pass, count_least_bytes
from .measure.ceilings import Ceilings
from .measure.fresh_process import PassFailed
from .measure.pass_memory import WARM_UP_POSITIONS, PassMemory, measure_pass_memory
from .measure.timing import Check, Timing, measure_interleaved
from .rounds import Ending, compare_with_softmax
from .variants import Variant

# Of all sequences of a pass together, unless a batch is given: as in Katharopoulos 2020 the batch is scaled inversely
# with T, so that short sequences fill the machine as well as long ones.
PASS_POSITIONS = 65_536
# Passes of a point besides the repeats: the one whose memory is measured, and a warm-up.
_EXTRA_PASSES = 2
_CHANCES = 2


@dataclass(frozen=True)
class ScalingReport:
    """`rows`, one for each mechanism and length, `exponents`, one for each mechanism, and what they depend on.

    Where it was interrupted, the rows are those measured by then.
    """

    rows: list[dict[str, Any]]
    exponents: list[dict[str, Any]]
    ended: Ending
    settings: dict[str, Any]
    environment: dict[str, Any]
    ceilings: dict[str, Any] | None = None


@dataclass
class _History:
    """What a sequence took of one mechanism at shorter lengths, and why it was left out, if it was."""

    variant: Variant
    seconds: list[Point] = field(default_factory=list)
    memory: list[Point] = field(default_factory=list)
    left_out: str | None = None


def choose_batch(positions: int, batch: int | None = None, pass_positions: int = PASS_POSITIONS) -> int:
    """How many sequences a pass has: `batch`, or as many as make `pass_positions`, and one at the least."""
    return batch or max(1, pass_positions // positions)


def run_scaling_bench(
    variants: Sequence[Variant],
    positions: Sequence[int],
    repeats: int,
    limit_seconds: float,
    heads: int = 1,
    head_width: int = 32,
    device: str = "cpu",
    report: Callable[[dict[str, Any]], None] = lambda row: None,
    check: Check = None,
    batch: int | None = None,
    ceilings: Ceilings | None = None,
    pass_positions: int = PASS_POSITIONS,
    earlier: Sequence[dict[str, Any]] = (),
) -> ScalingReport:
    """Measure every variant at every length; `report` is told each row as it is made.

    A pass has `batch` sequences, or as many as `choose_batch` says; time and memory are those of one of them. With
    `ceilings`, rows say what share of the memory that can be copied they move at the least. `check` is called before
    each pass and may raise: `Interrupted` ends it with what was measured. `earlier` has the rows that the same call
    gave before: only time is measured then, and their samples count too.

    At each length the memory of every variant is measured by itself, and then the time of all of them in turn. A
    variant is left out at a length, and says so, where it cannot be built with these sizes, or where its memory or the
    time of all its passes does not fit, by what it took at shorter ones or by the attempt.

    Raises `DisagreementError` before any timing where the two executions of a mechanism disagree.
    """
    lengths = sorted(set(positions))
    plan = _Plan(
        repeats,
        limit_seconds,
        heads,
        head_width,
        device,
        batch,
        pass_positions,
        ceilings,
        check or (lambda: None),
        {(row["name"], row["positions"]): row for row in earlier},
    )
    histories = [_History(variant) for variant in variants]
    rows: list[dict[str, Any]] = []
    ended: Ending = "finished"
    try:
        for history in () if earlier else histories:
            plan.check()
            try:
                require_agreement(build_checked_model(plan.setup(history.variant, lengths[0])))
            except UsageError as error:
                history.left_out = str(error)
        for length in lengths:
            for row in _measure_length(histories, length, plan):
                rows.append(row)
                report(row)
            plan.check()  # a length that was interrupted has given the rows that it had
    except Interrupted:
        ended = "interrupted"
    settings = {
        "repeats": repeats,
        "warm_up_passes": 1,
        "interleaved": True,
        "limit_seconds": limit_seconds,
        "heads": heads,
        "head_width": head_width,
        "batch": batch if batch is not None else f"scaled: {pass_positions:,} / T, at least 1",
        "memory": _describe_method(device),
        "copy_share": LEAST_TRAFFIC,
    }
    labels = [history.variant.label for history in histories]
    rows.sort(key=lambda row: labels.index(row["name"]))  # stable: each by its length
    described = None if ceilings is None else ceilings.describe()
    return ScalingReport(rows, describe_exponents(rows), ended, settings, describe_environment(), described)


@dataclass(frozen=True)
class _Plan:
    """What is the same for all passes."""

    repeats: int
    limit_seconds: float
    heads: int
    head_width: int
    device: str
    batch: int | None
    pass_positions: int
    ceilings: Ceilings | None
    check: Callable[[], None]
    earlier: dict[tuple[str, int], dict[str, Any]]

    def setup(self, variant: Variant, length: int) -> PassSetup:
        batch = choose_batch(length, self.batch, self.pass_positions)
        return PassSetup(variant.attention, variant.options, self.heads, self.head_width, length, batch, self.device)

    def build_work(self, variant: Variant, length: int, drawn: Drawn) -> Callable[[], None]:
        work = build_pass(self.setup(variant, length), drawn=drawn)

        def checked() -> None:
            self.check()
            work()

        return checked


def _measure_length(histories: Sequence[_History], length: int, plan: _Plan) -> list[dict[str, Any]]:
    """A row for every mechanism; each learns what it took, or why it is left out from here on."""
    peaks: dict[str, int | None] = {}
    samples: dict[str, Sequence[float]] = {}
    for history in histories:
        label = history.variant.label
        if (earlier := plan.earlier.get((label, length))) is not None:
            history.left_out = earlier["left_out"]
            peaks[label], samples[label] = earlier["peak_memory_bytes"], earlier["samples_seconds"]
            continue
        setup = plan.setup(history.variant, length)
        history.left_out = history.left_out or _predict_misfit(history, setup, plan)
        plan.check()
        if history.left_out is None:
            try:
                peaks[label] = _try(setup, plan.repeats, plan.limit_seconds).peak_bytes
            except (PassFailed, UsageError) as reason:
                history.left_out = str(reason)
    plan.check()  # what a Ctrl-C did to a process is no measurement
    timed = [history for history in histories if history.left_out is None]
    drawn: Drawn = {}
    works = [plan.build_work(history.variant, length, drawn) for history in timed]
    found = measure_interleaved(works, works, plan.repeats, plan.device)
    timings = {
        label: timing.after(samples.get(label, ()))
        for label, timing in zip([history.variant.label for history in timed], found, strict=True)
    }
    rows = []
    for history in histories:
        label = history.variant.label
        setup = plan.setup(history.variant, length)
        row = _describe(setup, history, peaks.get(label), timings.get(label), plan.ceilings)
        if row["seconds_per_sequence"] is not None:
            history.seconds.append((length, row["seconds_per_sequence"]))
        if row["memory_bytes_per_sequence"] is not None:
            history.memory.append((length, row["memory_bytes_per_sequence"]))
        rows.append(row)
    compare_with_softmax(rows, lambda row: row["seconds_per_sequence"] and 1 / row["seconds_per_sequence"])
    return rows


def _predict_misfit(history: _History, setup: PassSetup, plan: _Plan) -> str | None:
    """Why the next length is not tried, if it is not."""
    seconds, memory = (extrapolate(points, setup.positions) for points in (history.seconds, history.memory))
    if seconds is not None and (total := seconds * setup.batch * (plan.repeats + _EXTRA_PASSES)) > plan.limit_seconds:
        return f"would take about {format_duration(total)}, the limit is {format_duration(plan.limit_seconds)}"
    free = measure_free_memory(plan.device)
    if memory is not None and free is not None and memory * setup.batch > free:
        return f"would need about {format_bytes(memory * setup.batch)}, {format_bytes(free)} are free"
    return None


def _try(setup: PassSetup, repeats: int, limit_seconds: float) -> PassMemory:
    """The memory of one pass; a pass so slow that the repeats would not keep the limit is the last.

    It is given a second chance first: a busy moment of the machine is no reason to leave a mechanism out.
    """
    for _ in range(_CHANCES):
        memory = measure_pass_memory(setup, limit_seconds)
        if memory.seconds * (repeats + _EXTRA_PASSES) <= limit_seconds:
            return memory
    raise PassFailed(
        f"one pass took {format_duration(memory.seconds)}, too long for {repeats} repeats within "
        f"{format_duration(limit_seconds)}"
    )


def _describe(
    setup: PassSetup,
    history: _History,
    peak_bytes: int | None,
    timing: Timing | None,
    ceilings: Ceilings | None,
) -> dict[str, Any]:
    """One record. Samples and `peak_memory_bytes` are those of whole passes, all else is that of one sequence."""
    record: dict[str, Any] = {
        "name": history.variant.label,
        "attention": setup.attention,
        "attention_options": setup.options,
        "engine": "parallel",
        "precision": "fp32",
        "device": setup.device,
        "batch": setup.batch,
        "heads": setup.heads,
        "head_width": setup.head_width,
        "positions": setup.positions,
        "seconds_per_sequence": None,
        "seconds_per_sequence_quartiles": None,
        "samples_seconds": [],
        "repeats": 0,
        "peak_memory_bytes": peak_bytes,
        "memory_bytes_per_sequence": None,
        "copy_share": None,
        "left_out": history.left_out,
    }
    if peak_bytes is not None:
        record["memory_bytes_per_sequence"] = peak_bytes / setup.batch
    if timing is not None:
        record |= {
            "seconds_per_sequence": timing.median / setup.batch,
            "seconds_per_sequence_quartiles": [seconds / setup.batch for seconds in timing.quartiles],
            "samples_seconds": list(timing.samples),
            "repeats": len(timing.samples),
        }
        if ceilings is not None:
            moved = count_least_bytes(setup) / timing.median / 1e9
            record["copy_share"] = moved / ceilings.copy.gigabytes_per_second
    return record


def _describe_method(device: str) -> str:
    if device == "cpu":
        return (
            "growth of the peak resident memory of a fresh process over one pass, inputs included, after a warm-up at "
            f"up to {WARM_UP_POSITIONS} positions"
        )
    return "torch's peak of allocated bytes over one pass, inputs included" if device != "mps" else "not measured"
