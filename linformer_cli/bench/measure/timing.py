"""Timing: synchronisation, interleaved repeats, median and quartiles."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from linformer_cli.errors import Interrupted
from linformer_cli.system.device import synchronize

# Called between steps; raises to stop the work.
Check = Callable[[], None]


def never_stop() -> None:
    """The `Check` of work that nothing stops."""


@dataclass(frozen=True)
class Timing:
    """Seconds of the same work, one sample per repeat."""

    samples: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third quartile; a single sample is both."""
        if len(self.samples) < 2:
            return self.samples[0], self.samples[0]
        first, _, third = statistics.quantiles(self.samples, n=4, method="inclusive")
        return first, third

    def rate(self, count: float) -> float:
        """How many a second, if the work makes `count`: the median."""
        return count / self.median

    def rate_quartiles(self, count: float) -> tuple[float, float]:
        """The quartiles of the same rate."""
        first, third = self.quartiles
        return count / third, count / first


def time_work(work: Callable[[], object], device: str) -> float:
    """Seconds of `work()` on `device`, all its kernels included."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def measure_interleaved(
    works: Sequence[Callable[[], object]], warm_ups: Sequence[Callable[[], object]], repeats: int, device: str
) -> list[Timing]:
    """Time every work `repeats` times in turn (A B C A B C), so that a busy moment of the machine hits all alike.

    Every warm-up runs once before, untimed. After an `Interrupted` in a work, only complete turns count; it is raised
    again if there is none.
    """
    for warm_up in warm_ups:
        warm_up()
    turns: list[list[float]] = []
    for _ in range(repeats):
        try:
            turns.append([time_work(work, device) for work in works])
        except Interrupted:
            if not turns:
                raise
            break
    return [Timing(samples) for samples in zip(*turns, strict=True)]


def compare_turns(speed: float, samples: Sequence[float], other_speed: float, other_samples: Sequence[float]) -> float:
    """How many times as fast as another work that took turns with it: the median over turns of the quotient in each.

    The speeds are those of the median samples, in one unit. A slow moment of the machine slows both works of a turn and
    cancels, unlike in a quotient of two medians. A turn that only one of them had does not count.
    """
    work, other_work = speed * statistics.median(samples), other_speed * statistics.median(other_samples)
    turns = zip(samples, other_samples, strict=False)
    return statistics.median((work / own) / (other_work / other) for own, other in turns)
