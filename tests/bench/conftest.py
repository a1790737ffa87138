"""A clock and ceilings that the tests make up, so that no machine decides a test."""

from collections.abc import Callable, Iterator

import pytest

from linformer_cli.bench import attention, sample, train
from linformer_cli.bench.measure import pass_memory, sampling_work
from linformer_cli.bench.measure.ceilings import Ceilings, CopyCeiling, ProductCeiling


class MadeUpClock:
    """Stands in for `time_work`: does the work, and takes the next of `seconds`, the last of them for ever."""

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
    """Every timed work takes two seconds, unless the test says otherwise."""
    made = MadeUpClock()
    for module in (attention, sample, train, pass_memory, sampling_work):
        monkeypatch.setattr(module, "time_work", made)
    return made


class FixedCeilings(Ceilings):
    """100 GFLOP/s in float32, 200 in bfloat16, 10 GB/s. `asked` has the rows and the precision of every product."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.asked: list[tuple[int, str]] = []

    def product(self, shapes, rows, precision):
        self.asked.append((rows, precision))
        return ProductCeiling(1, rows, precision, {"fp32": 100.0, "bf16": 200.0}[precision], (1.0, 1.0), 1, (1.0,))

    @property
    def copy(self) -> CopyCeiling:
        return CopyCeiling(10.0, 1, (1.0,))


@pytest.fixture
def ceilings() -> FixedCeilings:
    return FixedCeilings()
