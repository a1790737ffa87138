"""A made-up clock and fixed ceilings. With them, no test depends on the speed of the machine."""

from collections.abc import Callable, Iterator

import pytest
from fixed_ceilings import FixedCeilings

from linformer_cli.bench import attention, sample, train
from linformer_cli.bench.measure import peak_memory, sampling_work
from linformer_cli.sampling import decode


class MadeUpClock:
    """Replaces `time_work`. It does the work and returns the next of `seconds`; the last one repeats."""

    def __init__(self) -> None:
        self.seconds: Iterator[float] = iter(())
        self.last = 2.0
        self.timed = 0

    def take(self, *seconds: float) -> None:
        self.seconds, self.last = iter(seconds), seconds[-1]

    def __call__(self, work: Callable[[], object], device: str) -> float:
        assert device == "cpu"
        work()
        self.timed += 1
        self.last = next(self.seconds, self.last)
        return self.last


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MadeUpClock:
    """Every timed piece of work takes two seconds, unless the test sets other times."""
    made = MadeUpClock()
    for module in (attention, sample, train, peak_memory, sampling_work, decode):
        monkeypatch.setattr(module, "time_work", made)
    return made


@pytest.fixture
def ceilings() -> FixedCeilings:
    return FixedCeilings()
