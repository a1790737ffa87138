"""Benchmarks of several parts that share a time budget. Their rounds are spread over all of it."""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from linformer_cli.errors import Interrupted
from linformer_cli.files import write_file
from linformer_cli.report.plots import PLOT_FORMATS
from linformer_cli.report.tables import Report, render_records, to_json
from linformer_cli.system.environment import describe_machine
from linformer_cli.system.signals import StopRequest
from linformer_cli.units import format_duration

_FIRST_ROUND_FACTOR = 2.5  # the first round takes about this many times as long, because it also prepares the work

# The shortest time between two writes. Drawing the figures takes seconds, so files are not written after every group.
_SAVE_SECONDS = 120.0

# The functions that run one round of a group, by the title of the group.
Groups = Mapping[str, Sequence[Callable[[], None]]]


@dataclass
class Part:
    """Groups of measurements by title, with a `share` of the budget and at most `rounds` rounds.

    `prepare` gets the seconds for the part and builds the groups. `release` frees memory after the last round.
    """

    name: str
    share: float
    rounds: int
    prepare: Callable[[float], Groups]
    release: Callable[[], None] = lambda: None
    groups: dict[str, Sequence[Callable[[], None]]] = field(default_factory=dict)
    rounds_done: int = 0
    seconds: float = 0.0
    next_round_seconds: float = 0.0


class Schedule:
    """Runs rounds that fit the budget, next of the part furthest behind its share. `reduced` lists what was cut."""

    def __init__(
        self,
        parts: Sequence[Part],
        after_group: Callable[[Part, str], None] = lambda part, title: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.parts = parts
        self.reduced: list[str] = []
        self.finished = False
        self._after_group, self._clock = after_group, clock
        self._budget_seconds = self._ends = 0.0

    @property
    def unfinished(self) -> list[str]:
        return [] if self.finished else [part.name for part in self.parts if part.rounds_done < part.rounds]

    def run(self, budget_seconds: float) -> None:
        """Run the first round of each part in order, and then all other rounds. Errors of a round are passed on."""
        self._budget_seconds, self._ends = budget_seconds, self._clock() + budget_seconds
        waiting = list(self.parts)
        while waiting:
            self._run_round(min(waiting, key=lambda part: part.seconds / part.share))
            for part in [part for part in waiting if not self._has_time(part)]:
                waiting.remove(part)
                part.release()
        self.reduced += [
            f"{part.name}: {part.rounds_done} of {part.rounds} rounds because time ran out"
            for part in self.parts
            if part.rounds_done < part.rounds
        ]
        self.finished = True

    def _has_time(self, part: Part) -> bool:
        if part.rounds_done == 0:
            return True
        return part.rounds_done < part.rounds and self._clock() + part.next_round_seconds <= self._ends

    def _run_round(self, part: Part) -> None:
        first, began, last_start, ends = part.rounds_done == 0, self._clock(), self._ends, self._ends
        if first:
            limit = self._allot(part)
            part.groups = dict(part.prepare(limit))
            last_start = self._clock() + limit
            ends = last_start if part.rounds == 1 else max(ends, last_start)
        cut = [title for title in part.groups if not self._run_group(part, title, last_start, ends)]
        if first and cut:
            self.reduced.append(f"{part.name}: left out or cut short because time ran out: {'; '.join(cut)}")
            part.groups = {title: turns for title, turns in part.groups.items() if title not in cut}
        took = self._clock() - began
        part.next_round_seconds = took / (_FIRST_ROUND_FACTOR if first else 1.0)
        part.seconds += took
        part.rounds_done += first or not cut

    def _run_group(self, part: Part, title: str, last_start: float, ends: float) -> bool:
        """Run one round of a group. False if it did not begin by `last_start` or was cut off at `ends`."""
        if self._clock() > last_start:
            return False
        for turn in part.groups[title]:
            if self._clock() > ends:
                return False
            turn()
        self._after_group(part, title)
        return True

    def _allot(self, part: Part) -> float:
        """Return the seconds for a new part: its share of the time not reserved for parts that have begun."""
        promised = sum(
            max(0.0, other.share * self._budget_seconds - other.seconds)
            for other in self.parts
            if 0 < other.rounds_done < other.rounds
        )
        shares = sum(other.share for other in self.parts if other.rounds_done == 0)
        return max(1.0, part.share / shares * (self._ends - self._clock() - promised))


@dataclass(frozen=True, kw_only=True)
class BudgetReport(Report):
    """Everything measured. `reduced` lists what is smaller than in the paper or was left out for lack of time."""

    budget_seconds: float
    elapsed_seconds: float
    reduced: Sequence[str]

    @property
    def has_figures(self) -> bool:
        """Whether anything was measured. An empty report is not saved, so that it does not replace an earlier one."""
        return bool(self.show("md").tables)

    def render_page(self) -> str:
        shown, took = self.show("md"), format_duration(self.elapsed_seconds)
        budget = f"measured in {took} of a budget of {format_duration(self.budget_seconds)}"
        lines = [f"# {shown.title}", "", f"{describe_machine(self.environment)}; {budget}."]
        for finding in shown.findings:
            lines += ["", f"{finding[0].upper()}{finding[1:]}."]
        for records, columns, title in shown.tables:
            lines += ["", f"## {title[0].upper()}{title[1:]}"] if title else []
            lines += ["", render_records(records, columns, "md").rstrip("\n")]
        remarks = ["", "## Remarks", "", *(f"- {line}" for line in shown.remarks)] if shown.remarks else []
        return "\n".join([*lines, *remarks, ""])

    def write(self, out: Path, name: str) -> None:
        """Write NAME.json, NAME.md and all plots. After an interruption, each file is complete or unchanged."""
        write_file(out / f"{name}.json", f"{to_json(self)}\n".encode())
        write_file(out / f"{name}.md", self.render_page().encode())
        for key, draw in self.show("md").plots.items():
            for kind in PLOT_FORMATS:
                write_file(out / f"{key}.{kind}", draw(kind))


AnyReport = TypeVar("AnyReport", bound=BudgetReport)


class BudgetBench(ABC, Generic[AnyReport]):
    """A benchmark whose report is passed to `save` about every two minutes and at the end. `stop` ends it early."""

    def __init__(self, save: Callable[[AnyReport], None], stop: StopRequest | None) -> None:
        self._save, self._stop = save, stop or StopRequest()
        self._began = self._saved = time.monotonic()

    def run(self) -> AnyReport:
        """Measure until the budget is spent or the user interrupts. Returns the report saved last."""
        try:
            with contextlib.suppress(Interrupted):
                self.measure()
        finally:  # what was measured is saved even after an error
            report = self.describe()
            if report.has_figures:
                self._save(report)
        return report

    @abstractmethod
    def measure(self) -> None:
        """Measure everything. `Interrupted` may end it early."""

    @abstractmethod
    def describe(self) -> AnyReport:
        """Return the report of all so far."""

    def save_now_and_then(self) -> None:
        if time.monotonic() > self._saved + _SAVE_SECONDS:
            self._save(self.describe())
            self._saved = time.monotonic()

    def elapsed_seconds(self) -> float:
        return time.monotonic() - self._began
