"""Timing: synchronisation, median and quartiles."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from linformer_cli.system.device import synchronize


@dataclass(frozen=True)
class Timing:
    """The seconds of repeated work, with one sample per repeat."""

    samples: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        first, third = np.quantile(self.samples, (0.25, 0.75)).tolist()
        return first, third

    def rate(self, count: float) -> float:
        """Return the median rate per second of work that handles `count` items."""
        return count / self.median

    def rate_quartiles(self, count: float) -> tuple[float, float]:
        first, third = self.quartiles
        return count / third, count / first


def time_work(work: Callable[[], object], device: str) -> float:
    """Return the seconds of `work()` on `device`, including all its kernels."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def compare_turns(speed: float, samples: Sequence[float], other_speed: float, other_samples: Sequence[float]) -> float:
    """Return the speed of one measurement relative to another: the median ratio over rounds with one sample of each.

    `speed` and `other_speed` belong to the median samples and have the same unit. A slow moment of the machine affects
    both samples of a round and cancels out, as it would not in a ratio of two medians.
    """
    work, other_work = speed * statistics.median(samples), other_speed * statistics.median(other_samples)
    turns = zip(samples, other_samples, strict=False)
    return statistics.median((work / own) / (other_work / other) for own, other in turns)
