"""The base of every benchmark with rows. Measurements are interleaved in rounds and may end early."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from linformer_cli.errors import Interrupted
from linformer_cli.report.tables import Ending, Report
from linformer_cli.system.signals import Check, never_stop
from .measure.ceilings import Ceilings, CeilingsReport
from .measure.peak_memory import PassFailed, refuse_misfits
from .rows import AnyRow, compare_with_softmax

Work = TypeVar("Work")  # what a measurement times
Found = TypeVar("Found")


@dataclass(frozen=True)
class Bench:
    """What measurements share: `report` gets each row of a finished group; `check`, called between steps, may raise."""

    ceilings: Ceilings
    report: Callable[[Any], None] = lambda row: None
    check: Check = never_stop


@dataclass(eq=False)
class Measurement(ABC, Generic[AnyRow, Work]):
    """One row of a benchmark. Building it is cheap, `make_ready` prepares the work, and each round times it once."""

    repeats: int
    bench: Bench
    work: Work | None = field(default=None, init=False)
    samples: list[float] = field(default_factory=list, init=False)
    left_out: str | None = field(default=None, init=False)
    _over: bool = field(default=False, init=False)

    @property
    def network(self) -> object:
        """Rows with equal networks are compared with each other."""
        return None

    @property
    def begun(self) -> bool:
        return bool(self.samples) or self.left_out is not None

    @property
    def reduced(self) -> str | None:
        done = len(self.samples)
        return f"{done} of {self.repeats} repeats" if 0 < done < self.repeats else None

    def make_ready(self) -> None:
        """Prepare the work unless it is ready. If it needs too much memory or time, the measurement is left out."""
        if not self._over and self.work is None:
            with self._end_if_it_fails():
                self.work = self.prepare()

    def measure_round(self) -> None:
        """Take the next sample. A measurement ends if memory or time runs out; without samples, it is left out."""
        if not self._over:
            assert self.work is not None, "make_ready comes first"
            with self._end_if_it_fails():
                self.samples.append(self.time_sample(self.work))

    def measure_apart(self, measure: Callable[[], Found]) -> Found:
        """Return what `measure` finds in a fresh process, which Ctrl-C ends, too; the check then raises."""
        try:
            return measure()
        finally:
            self.bench.check()

    def end(self, reason: str) -> None:
        """Take no more samples. If there are none, the measurement is left out for `reason`."""
        self._over = True
        self.release()
        if not self.samples:
            self.left_out = reason

    @property
    def outcome(self) -> dict[str, Any]:
        return {"repeats": len(self.samples), "samples_seconds": list(self.samples), "left_out": self.left_out}

    @contextlib.contextmanager
    def _end_if_it_fails(self) -> Iterator[None]:
        try:
            with refuse_misfits():
                yield
        except PassFailed as reason:
            self.end(str(reason))

    @abstractmethod
    def prepare(self) -> Work:
        """Build the work and warm it up. Raises `PassFailed` if it needs too much memory or time."""

    @abstractmethod
    def time_sample(self, work: Work) -> float:
        """Return the seconds of one sample. Raises `PassFailed` if memory or time runs out."""

    def finish(self) -> None:  # most measurements only take samples
        """Take measurements that are made only once, after the last round."""

    def release(self) -> None:
        """Free the memory kept between rounds. `make_ready` prepares the work again."""
        self.work = None

    @abstractmethod
    def row(self) -> AnyRow:
        """Return the row measured so far."""


@dataclass(frozen=True, kw_only=True)
class BenchReport(Report, Generic[AnyRow]):
    """The rows and their conditions. After an interruption, rows without a result are missing."""

    rows: list[AnyRow]
    ended: Ending
    settings: Mapping[str, object]
    ceilings: CeilingsReport


def measure_groups(
    groups: Iterable[Sequence[Measurement[AnyRow, Any]]], bench: Bench, comparisons: Iterable[Callable[[], None]] = ()
) -> tuple[list[AnyRow], Ending]:
    """Make `comparisons`, then measure one group after another. `Interrupted` ends this and keeps the rows so far."""
    rows: list[AnyRow] = []
    try:
        for compare in comparisons:
            bench.check()
            compare()
        for group in groups:
            try:
                for turn in turns_of(group):
                    turn()
            finally:
                release(group)
                for row in rows_of(group):
                    rows.append(row)
                    bench.report(row)
            bench.check()
    except Interrupted:
        return rows, "interrupted"
    return rows, "finished"


def turns_of(group: Sequence[Measurement[Any, Any]]) -> Iterator[Callable[[], None]]:
    """Yield the calls that measure a group, with interleaved samples (A B C A B C), so that busy moments affect all."""
    yield from (measurement.make_ready for measurement in group)
    for _ in range(max(measurement.repeats for measurement in group)):
        yield from (measurement.measure_round for measurement in group)
    yield from (measurement.finish for measurement in group)


def release(group: Iterable[Measurement[Any, Any]]) -> None:
    for measurement in group:
        measurement.release()


def rows_of(group: Sequence[Measurement[AnyRow, Any]]) -> list[AnyRow]:
    """Return the rows of the measurements that have begun, compared with softmax."""
    begun = [measurement for measurement in group if measurement.begun]
    rows = [measurement.row() for measurement in begun]
    return compare_with_softmax(rows, [measurement.network for measurement in begun])
