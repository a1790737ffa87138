"""How the time and the memory of one mechanism's forward and backward pass grow with the number of positions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from linformer_cli.errors import UsageError
from linformer_cli.report.terminal import format_bytes, format_duration
from linformer_cli.runtime import describe_environment

from .cases import Check
from .memory import WARM_UP_POSITIONS, PassFailed, PassMemory, measure_free_memory, measure_pass_memory
from .passes import PassSetup, build_checked_model, build_pass
from .run import require_agreement
from .timing import Timing, measure_interleaved
from .variants import Variant

# What is assumed of growth where only one length was measured: the worst that a mechanism here has.
_ASSUMED_EXPONENT = 2.0
# What every mechanism is meant to be faster than.
_RIVAL = "softmax"
# Passes of a point besides the repeats: the one whose memory is measured, and a warm-up.
_EXTRA_PASSES = 2

Point = tuple[int, float]


@dataclass(frozen=True)
class ScalingReport:
    """`rows`, one for each mechanism and length, `exponents`, one for each mechanism, and what they depend on."""

    rows: list[dict[str, Any]]
    exponents: list[dict[str, Any]]
    settings: dict[str, Any]
    environment: dict[str, Any]


@dataclass
class _History:
    """What was measured of one mechanism at shorter lengths, and why it was left out, if it was."""

    variant: Variant
    seconds: list[Point] = field(default_factory=list)
    memory: list[Point] = field(default_factory=list)
    left_out: str | None = None


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
) -> ScalingReport:
    """Measure every variant at every length; `report` is told each row as it is made.

    `check` is called before each measurement, and may raise to give up.

    At each length the memory of every variant is measured by itself, and then the time of all of them in turn. A
    variant is left out at a length, and says so, where it cannot be built with these sizes, or where its memory or the
    time of all its passes does not fit, by what it took at shorter ones or by the attempt.

    Raises `DisagreementError` before any timing where the two executions of a mechanism disagree.
    """
    lengths = sorted(set(positions))

    def setup(variant: Variant, length: int) -> PassSetup:
        return PassSetup(variant.attention, variant.options, heads, head_width, length, device)

    histories = [_History(variant) for variant in variants]
    for history in histories:
        try:
            require_agreement(build_checked_model(setup(history.variant, lengths[0])))
        except UsageError as error:
            history.left_out = str(error)
    rows = []
    for length in lengths:
        memories: dict[str, PassMemory] = {}
        for history in histories:
            history.left_out = history.left_out or _predict_misfit(history, length, repeats, limit_seconds, device)
            if check is not None:
                check()
            if history.left_out is None:
                try:
                    memories[history.variant.label] = _try(setup(history.variant, length), repeats, limit_seconds)
                except (PassFailed, UsageError) as reason:
                    history.left_out = str(reason)
        if check is not None:
            check()  # what a Ctrl-C did to a process is no measurement
        timed = [history for history in histories if history.left_out is None]
        works = [build_pass(setup(history.variant, length)) for history in timed]
        timings = dict(
            zip([h.variant.label for h in timed], measure_interleaved(works, works, repeats, device), strict=True)
        )
        for history in histories:
            label = history.variant.label
            row = _describe(setup(history.variant, length), history, memories.get(label), timings.get(label))
            if history.left_out is None:
                history.seconds.append((length, timings[label].median))
                if (peak := memories[label].peak_bytes) is not None:
                    history.memory.append((length, peak))
            rows.append(row)
            report(row)
    settings = {
        "repeats": repeats,
        "warm_up_passes": 1,
        "interleaved": True,
        "limit_seconds": limit_seconds,
        "heads": heads,
        "head_width": head_width,
        "batch": 1,
        "memory": _describe_method(device),
    }
    labels = [history.variant.label for history in histories]
    rows.sort(key=lambda row: labels.index(row["name"]))  # stable: each by its length
    return ScalingReport(rows, describe_exponents(rows), settings, describe_environment())


def fit_exponent(points: Sequence[Point]) -> float | None:
    """p of the least-squares line through log y = p log x + c; None where there are not two points above 0."""
    logs = [(math.log(x), math.log(y)) for x, y in points if y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in logs)
    slope: float = sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread
    return slope


@dataclass(frozen=True)
class Overtaking:
    """Where one mechanism becomes faster than another, between the `shortest` and the `longest` T measured of both.

    `at` is None where that is not between them: it is faster at all of them, or slower at the last.
    """

    at: float | None
    faster_at_last: bool
    shortest: int
    longest: int

    def describe(self) -> str:
        if self.at is not None:
            return f"{self.at:,.0f}"
        return f"below {self.shortest:,}" if self.faster_at_last else f"not up to {self.longest:,}"


def find_overtaking(seconds: Sequence[Point], rival: Sequence[Point]) -> Overtaking | None:
    """From where on the times `seconds` stay below those of `rival`, over the lengths that both have.

    Between two lengths both times are straight lines in log T and log seconds. None where no length is in both.
    """
    mine, other = dict(seconds), dict(rival)
    lengths = sorted(mine.keys() & other.keys())
    if not lengths:
        return None
    leads = [math.log(other[length] / mine[length]) for length in lengths]  # above 0 where mine is faster
    at = None
    last_slow = max((index for index, lead in enumerate(leads) if lead <= 0), default=None)
    if last_slow is not None and last_slow + 1 < len(leads):
        before, after = leads[last_slow : last_slow + 2]
        near, far = (math.log(length) for length in lengths[last_slow : last_slow + 2])
        at = math.exp(near + (far - near) * before / (before - after))
    return Overtaking(at, leads[-1] > 0, lengths[0], lengths[-1])


def extrapolate(points: Sequence[Point], length: int) -> float | None:
    """y at `length`, growing on as between the last two points (at least linearly); None where there is no point."""
    if not points:
        return None
    exponent = fit_exponent(points[-2:])
    exponent = _ASSUMED_EXPONENT if exponent is None else max(1.0, exponent)
    last, y = points[-1]
    return float(y * (length / last) ** exponent)


def _predict_misfit(history: _History, length: int, repeats: int, limit_seconds: float, device: str) -> str | None:
    """Why the next length is not tried, if it is not."""
    seconds, memory = extrapolate(history.seconds, length), extrapolate(history.memory, length)
    if seconds is not None and (total := seconds * (repeats + _EXTRA_PASSES)) > limit_seconds:
        return f"would take about {format_duration(total)}, the limit is {format_duration(limit_seconds)}"
    free = measure_free_memory(device)
    if memory is not None and free is not None and memory > free:
        return f"would need about {format_bytes(memory)}, {format_bytes(free)} are free"
    return None


def _try(setup: PassSetup, repeats: int, limit_seconds: float) -> PassMemory:
    """The memory of one pass; a pass so slow that the repeats would not keep the limit is the last."""
    memory = measure_pass_memory(setup, limit_seconds)
    if memory.seconds * (repeats + _EXTRA_PASSES) > limit_seconds:
        raise PassFailed(
            f"one pass took {format_duration(memory.seconds)}, too long for {repeats} repeats within "
            f"{format_duration(limit_seconds)}"
        )
    return memory


def _describe(setup: PassSetup, history: _History, memory: PassMemory | None, timing: Timing | None) -> dict[str, Any]:
    return {
        "name": history.variant.label,
        "attention": setup.attention,
        "attention_options": setup.options,
        "engine": "parallel",
        "precision": "fp32",
        "device": setup.device,
        "batch": 1,
        "heads": setup.heads,
        "head_width": setup.head_width,
        "positions": setup.positions,
        "seconds": None if timing is None else timing.median,
        "seconds_quartiles": None if timing is None else list(timing.quartiles),
        "samples_seconds": [] if timing is None else list(timing.samples),
        "repeats": 0 if timing is None else len(timing.samples),
        "peak_memory_bytes": None if memory is None else memory.peak_bytes,
        "left_out": history.left_out,
    }


def describe_exponents(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A record for each mechanism in `rows`: between the last two lengths, where both were measured, and over all.

    And where softmax is overtaken: `overtakes_softmax` is None for softmax itself, and where there is none to compare
    with.
    """
    last = sorted({row["positions"] for row in rows})[-2:]
    seconds, memory = (
        {
            name: [(row["positions"], row[key]) for row in rows if row["name"] == name and row[key] is not None]
            for name in dict.fromkeys(row["name"] for row in rows)
        }
        for key in ("seconds", "peak_memory_bytes")
    )
    rival = next((row["name"] for row in rows if row["attention"] == _RIVAL), None)
    records = []
    for name in seconds:
        record: dict[str, Any] = {"name": name}
        for kind, points in (("time", seconds[name]), ("memory", memory[name])):
            record[f"{kind}_exponent_last_two"] = fit_exponent([point for point in points if point[0] in last])
            record[f"{kind}_exponent_all"] = fit_exponent(points)
        record["longest_positions"] = max((length for length, _ in seconds[name]), default=None)
        attention = next(row["attention"] for row in rows if row["name"] == name)
        compared = rival is not None and attention != _RIVAL
        overtaking = find_overtaking(seconds[name], seconds[rival or ""]) if compared else None
        record["overtakes_softmax"] = None if overtaking is None else overtaking.describe()
        record["overtakes_softmax_at"] = None if overtaking is None else overtaking.at
        records.append(record)
    return records


def _describe_method(device: str) -> str:
    if device == "cpu":
        return (
            "growth of the peak resident memory of a fresh process over one pass, inputs included, after a warm-up at "
            f"up to {WARM_UP_POSITIONS} positions"
        )
    return "torch's peak of allocated bytes over one pass, inputs included" if device != "mps" else "not measured"
