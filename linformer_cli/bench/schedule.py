"""Parts of a benchmark that share a budget of time, round by round.

A shared machine has slow and fast stretches of minutes, which slow some rows down far more than others. The rounds of
all parts are therefore spread over the whole budget.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

# The first round prepares and probes, so it takes about this many times as long as the others.
_FIRST_ROUND_FACTOR = 2.5


# The functions that run one round of each measurement of a group, by the title of the group.
Groups = Mapping[str, Sequence[Callable[[], None]]]


@dataclass
class Part:
    """Groups of measurements by title, with a `share` of the budget, for at most `rounds` rounds.

    `prepare` makes the groups when the part begins. Its argument is the number of seconds for the part. A group is left
    out if the part's first round has no time for it.
    """

    name: str
    share: float
    rounds: int
    prepare: Callable[[float], Groups]
    groups: dict[str, Sequence[Callable[[], None]]] = field(default_factory=dict)
    rounds_done: int = 0
    seconds: float = 0.0
    next_round_seconds: float = 0.0


class Schedule:
    """Runs the part that is furthest behind its share, round by round, while another round fits the budget.

    `after_group` is called with the part and the title of a group that finished a round. `reduced` lists the groups
    left out for lack of time.
    """

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
        """Return the interrupted parts."""
        return [] if self.finished else [part.name for part in self.parts if part.rounds_done < part.rounds]

    def run(self, budget_seconds: float) -> None:
        """Run the first round of each part in order, and then all other rounds. Errors pass through."""
        self._budget_seconds, self._ends = budget_seconds, self._clock() + budget_seconds
        while waiting := [part for part in self.parts if self._has_time(part)]:
            self._run_round(min(waiting, key=lambda part: part.seconds / part.share))
        self.reduced += [
            f"{part.name}: {part.rounds_done} of {part.rounds} rounds, the time was up"
            for part in self.parts
            if part.rounds_done < part.rounds
        ]
        self.finished = True

    def _has_time(self, part: Part) -> bool:
        if part.rounds_done == 0:
            return True
        return part.rounds_done < part.rounds and self._clock() + part.next_round_seconds <= self._ends

    def _run_round(self, part: Part) -> None:
        began, limit, left_out = self._clock(), math.inf, list[str]()
        if part.rounds_done == 0:
            limit = self._allot(part)
            part.groups = dict(part.prepare(limit))
        for number, title in enumerate(list(part.groups)):
            if number and self._clock() - began > limit:
                left_out.append(title)
                del part.groups[title]
                continue
            for measure_round in part.groups[title]:
                measure_round()
            self._after_group(part, title)
        if left_out:
            self.reduced.append(f"{part.name}: left out, the time was up: {'; '.join(left_out)}")
        took = self._clock() - began
        part.next_round_seconds = took / (1.0 if part.rounds_done else _FIRST_ROUND_FACTOR)
        part.seconds += took
        part.rounds_done += 1

    def _allot(self, part: Part) -> float:
        """Return the seconds for a new part: its share of the time not reserved for parts that have begun."""
        promised = sum(
            max(0.0, other.share * self._budget_seconds - other.seconds)
            for other in self.parts
            if 0 < other.rounds_done < other.rounds
        )
        shares = sum(other.share for other in self.parts if other.rounds_done == 0)
        return max(1.0, part.share / shares * (self._ends - self._clock() - promised))
