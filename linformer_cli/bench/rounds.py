"""The base of every benchmark with rows: interleaved measurements in rounds, and an early end."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal

from linformer_cli.errors import Interrupted

from .measure.ceilings import Ceilings, CeilingsReport
from .measure.fresh_process import PassFailed
from .measure.pass_memory import refuse_misfits
from .measure.timing import Check, never_stop
from .rows import AnyRow, compare_with_softmax

Ending = Literal["finished", "interrupted"]


class Measurement(ABC, Generic[AnyRow]):
    """One row of a benchmark, measured round by round. Building it costs nothing; its first round prepares the work.

    Rows of equal `network` are compared with each other. `check` is called between steps and may raise to stop.
    """

    def __init__(self, ceilings: Ceilings, check: Check, network: object = None) -> None:
        self.ceilings, self.check, self.network = ceilings, check, network
        self.samples: list[float] = []
        self.left_out: str | None = None
        self._over = False

    @property
    def begun(self) -> bool:
        """Whether `row` has a result."""
        return bool(self.samples) or self.left_out is not None

    def measure_round(self) -> None:
        """Take the next sample. The measurement ends if memory or time runs out. Without a sample it is left out."""
        if self._over or self.left_out is not None:
            return
        try:
            with refuse_misfits():
                self.take_sample()
        except PassFailed as reason:
            self._over = True
            if not self.samples:
                self.left_out = str(reason)

    @abstractmethod
    def take_sample(self) -> None:
        """Append to `samples`. Raises `PassFailed` if the work does not fit into memory or time."""

    def release(self) -> None:  # most measurements keep nothing
        """Free the memory kept between rounds. The next round prepares the work again."""

    @abstractmethod
    def row(self) -> AnyRow:
        """Return the row measured so far."""


@dataclass(frozen=True)
class BenchReport(Generic[AnyRow]):
    """All rows and their conditions. After an interruption, `rows` holds the rows with at least one sample."""

    rows: list[AnyRow]
    ended: Ending
    settings: object
    environment: Mapping[str, Any]
    ceilings: CeilingsReport


def measure_groups(
    groups: Iterable[Sequence[Measurement[AnyRow]]],
    repeats: int,
    report: Callable[[AnyRow], None] = lambda row: None,
    check: Check = never_stop,
    comparisons: Iterable[Callable[[], None]] = (),
) -> tuple[list[AnyRow], Ending]:
    """Measure all groups and return their rows. Measurements of a group are interleaved (A B C A B C).

    A busy moment of the machine therefore affects all rows of a group. The memory of a group is freed before the next
    group starts. `comparisons` run first. Each compares the two executions of a mechanism and raises if they disagree.
    `report` is called with each row of a finished group. An `Interrupted` from `check`, here or inside a measurement,
    ends the benchmark and keeps the rows measured so far.
    """
    rows: list[AnyRow] = []
    try:
        for compare in comparisons:
            check()
            compare()
        for group in groups:
            try:
                for _ in range(repeats):
                    for measurement in group:
                        measurement.measure_round()
            finally:
                for measurement in group:
                    measurement.release()
                for row in rows_of(group):
                    rows.append(row)
                    report(row)
            check()
    except Interrupted:
        return rows, "interrupted"
    return rows, "finished"


def rows_of(group: Sequence[Measurement[AnyRow]]) -> list[AnyRow]:
    """Return the rows of the measurements that have begun, compared with softmax."""
    begun = [measurement for measurement in group if measurement.begun]
    rows = [measurement.row() for measurement in begun]
    return compare_with_softmax(rows, [measurement.network for measurement in begun])
