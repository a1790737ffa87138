"""Timing that can be trusted: warm-up, synchronisation, interleaved repeats, median and quartiles."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from linformer_cli.errors import Interrupted
from linformer_cli.system.device import synchronize

# Called between steps; raises to stop the work.
Check = Callable[[], None] | None


@dataclass(frozen=True)
class Timing:
    """Seconds of one piece of work over several repeats; every raw sample is kept."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third; both the only sample where there is one."""
        if len(self.samples) < 2:
            return self.samples[0], self.samples[0]
        first, _, third = statistics.quantiles(self.samples, n=4, method="inclusive")
        return first, third

    def after(self, earlier: Sequence[float]) -> "Timing":
        """The same work's with the samples that were taken of it before."""
        return Timing((*earlier, *self.samples))


def measure_interleaved(
    works: Sequence[Callable[[], object]], warm_ups: Sequence[Callable[[], object]], repeats: int, device: str
) -> list[Timing]:
    """Time every work `repeats` times in turn (A B C A B C), so that a busy moment of the machine hits all alike.

    Every warm-up runs once before, uncounted. Where a work raises `Interrupted`, the turns that all of them have had
    count; it is raised on where there was none.
    """
    for warm_up in warm_ups:
        warm_up()
    turns: list[list[float]] = []
    for _ in range(repeats):
        try:
            turns.append([_time(work, device) for work in works])
        except Interrupted:
            if not turns:
                raise
            break
    return [Timing(samples) for samples in zip(*turns, strict=True)]


def compare_turns(speed: float, samples: Sequence[float], rival_speed: float, rival_samples: Sequence[float]) -> float:
    """How many times as fast as a rival that took turns with it: the median over the turns of the quotient in each.

    Speeds are those of the median samples, in one unit. What slows a turn down slows both, and cancels, where it would
    not in the quotient of two medians.
    """
    work, rival_work = speed * statistics.median(samples), rival_speed * statistics.median(rival_samples)
    turns = zip(samples, rival_samples, strict=True)
    return statistics.median((work / own) / (rival_work / other) for own, other in turns)


def _time(work: Callable[[], object], device: str) -> float:
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began
