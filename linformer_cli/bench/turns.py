"""Parts of a benchmark that take turns, round by round, within a budget of time."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping

from linformer_cli.errors import Interrupted
from linformer_cli.units import format_duration

# The numbers of the rounds that a part has done, from 1, each when it is done.
Rounds = Generator[int, None, None]
# A part that takes so many times what it was given is broken off.
_PATIENCE = 1.25


class PartIsOver(Interrupted):
    """A part has taken far more than it was given: it ends as at Ctrl-C, with what was measured."""

    def __init__(self) -> None:
        super().__init__("this part has had its time", 0)


class Turns:
    """Who is next, and how long.

    A part is given, when it begins, its share of the time that is left, in relation to the parts that begin after it
    (`shares`, in the order in which they begin), and what stands for it in `besides`, in seconds. It has at most
    `most_rounds`. `unfinished` are the parts that are not over; `reduced` says which had too little time.
    """

    def __init__(
        self, budget_seconds: float, shares: Mapping[str, float], besides: Mapping[str, float], most_rounds: int
    ) -> None:
        self.unfinished = list(shares)
        self.reduced: list[str] = []
        self._budget_seconds, self._shares, self._besides = budget_seconds, shares, besides
        self._most_rounds = most_rounds
        self._began = time.monotonic()
        self._given: dict[str, float] = {}
        self._used = dict.fromkeys(shares, 0.0)
        self._part_ends = float("inf")

    @property
    def elapsed_seconds(self) -> float:
        return time.monotonic() - self._began

    def take(self, parts: Mapping[str, Callable[[float], Rounds]], after_round: Callable[[], None]) -> None:
        """The first round of each part, and then always one of the part that is furthest behind what it was given.

        A part is called with the seconds it is given.
        """
        running: dict[str, Rounds] = {}
        for name, part in parts.items():
            self._given[name] = self._give(name)
            running[name] = part(self._given[name])
            self._take_one(name, running, after_round)
        while running:
            name = min(running, key=lambda part: self._used[part] / self._given[part])
            self._take_one(name, running, after_round)

    def count(self, part: str, first_costs: float = 1.0) -> Iterator[int]:
        """The numbers of a part's rounds, from 1, as long as one more would be done within what it was given.

        What a round takes is told by the one before. The first takes about `first_costs` times as long as the others.
        """
        for number in range(1, self._most_rounds + 1):
            before = self._used[part]
            yield number
            expected = (self._used[part] - before) / (first_costs if number == 1 else 1.0)
            if number < self._most_rounds and self._used[part] + expected > self._given[part]:
                self.reduced.append(f"{part}: {number} of {self._most_rounds} rounds, the time was up")
                return

    def check(self) -> None:
        """Raises `PartIsOver` where the part whose turn it is has had far too much."""
        if time.monotonic() > self._part_ends:
            raise PartIsOver

    def _give(self, name: str) -> float:
        promised = sum(
            max(0.0, self._given[part] - self._used[part]) for part in self._given if part in self.unfinished
        )
        free = self._budget_seconds - self.elapsed_seconds - promised
        besides = min(self._besides.get(name, 0.0), free)
        share = self._shares[name] / sum(self._shares[part] for part in self._shares if part not in self._given)
        return max(1.0, besides + share * (free - besides))

    def _take_one(self, name: str, running: dict[str, Rounds], after_round: Callable[[], None]) -> None:
        """The next round of a part, which is over and leaves `running` where it has none."""
        patience = _PATIENCE * self._given[name]
        began = time.monotonic()
        self._part_ends = began - self._used[name] + patience
        try:
            over = next(running[name], None) is None
        except PartIsOver:
            self.reduced.append(f"{name}: broken off after {format_duration(patience)}")
            over = True
        self._used[name] += time.monotonic() - began
        if over:
            del running[name]
            self.unfinished.remove(name)
        else:
            after_round()
