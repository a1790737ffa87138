"""Tests of the schedule of `bench paper`, whose parts (such as sampling and training) share a time budget."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from linformer_cli.bench.budget import Part, Schedule


class Work:
    """A measurement whose rounds each take the next of `seconds`; the last one repeats."""

    def __init__(self, clock: SimpleNamespace, *seconds: float) -> None:
        self.rounds, self._clock, self._seconds = 0, clock, seconds

    def __call__(self) -> None:
        self._clock.now += self._seconds[min(self.rounds, len(self._seconds) - 1)]
        self.rounds += 1


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=1000.0)


def run(clock: SimpleNamespace, budget: float, parts: Sequence[Part]) -> tuple[Schedule, list[str]]:
    """Run the parts. Return the schedule and the titles of the groups in the order of their rounds."""
    turns: list[str] = []
    schedule = Schedule(parts, lambda part, title: turns.append(title), lambda: clock.now)
    schedule.run(budget)
    return schedule, turns


def test_every_part_begins_and_then_the_part_furthest_behind_its_share_continues(clock) -> None:
    work = {"a": Work(clock, 10.0), "b": Work(clock, 5.0), "c": Work(clock, 1.0)}
    shares = {"a": 0.5, "b": 0.25, "c": 0.25}
    parts = [Part(name, shares[name], 3, lambda seconds, name=name: {name: [work[name]]}) for name in work]
    schedule, turns = run(clock, 1000.0, parts)
    # c is furthest behind its share until it is done. Then a and b tie.
    assert turns == ["a", "b", "c", "c", "c", "a", "b", "a", "b"]
    assert schedule.finished and schedule.unfinished == [] and schedule.reduced == []


def test_rounds_end_with_the_budget(clock) -> None:
    work = {"slow": Work(clock, 25.0, 10.0), "fast": Work(clock, 5.0, 2.0)}
    parts = [Part(name, 0.5, 100, lambda seconds, name=name: {name: [work[name]]}) for name in work]
    schedule, _ = run(clock, 100.0, parts)
    assert [part.seconds for part in parts] == [25 + 3 * 10, 5 + 20 * 2]
    assert schedule.reduced == [
        "slow: 4 of 100 rounds because time ran out",
        "fast: 21 of 100 rounds because time ran out",
    ]


def test_a_late_round_is_cut_off_at_the_end_of_the_budget(clock) -> None:
    first, second = Work(clock, 1.0, 1.0, 200.0), Work(clock, 1.0)
    schedule, _ = run(clock, 100.0, [Part("a", 1.0, 3, lambda seconds: {"x": [first, second]})])
    assert (first.rounds, second.rounds) == (3, 2)
    assert schedule.reduced == ["a: 2 of 3 rounds because time ran out"]


def test_a_part_with_one_round_is_cut_off_at_the_end_of_its_share(clock) -> None:
    slow, late = Work(clock, 30.0), Work(clock, 1.0)
    parts = [Part("a", 0.4, 1, lambda seconds: {"x": [slow] * 4}), Part("b", 0.6, 1, lambda seconds: {"y": [late]})]
    schedule, turns = run(clock, 100.0, parts)
    assert slow.rounds == 2 and turns == ["y"]
    assert schedule.reduced == ["a: left out or cut short because time ran out: x"]


def test_a_part_is_released_after_its_last_round(clock) -> None:
    events: list[str] = []

    def build(name: str, rounds: int) -> Part:
        groups = {name: [Work(clock, 30.0), lambda: events.append(name)]}
        return Part(name, 0.5, rounds, lambda seconds: groups, lambda: events.append(f"release {name}"))

    run(clock, 100.0, [build("a", 9), build("b", 1)])
    assert events == ["a", "b", "release b", "a", "release a"]


def test_groups_without_time_in_the_first_round_are_left_out(clock) -> None:
    groups = {f"batch {size}": [Work(clock, 30.0)] for size in (1, 2, 3, 4)}
    late = Work(clock, 1.0)
    parts = [Part("a", 0.4, 1, lambda seconds: groups), Part("b", 0.6, 2, lambda seconds: {"late": [late]})]
    schedule, turns = run(clock, 100.0, parts)
    assert turns == ["batch 1", "batch 2", "late", "late"]
    assert schedule.reduced == ["a: left out or cut short because time ran out: batch 3; batch 4"]
    assert late.rounds == 2 and list(parts[0].groups) == ["batch 1", "batch 2"]


def test_later_parts_get_less_time_if_a_part_takes_too_long(clock) -> None:
    told: dict[str, float] = {}

    def prepare(name: str, seconds: float, took: float) -> dict[str, list[Work]]:
        told[name] = seconds
        return {name: [Work(clock, took)]}

    parts = [
        Part("a", 0.5, 1, lambda seconds: prepare("a", seconds, 80.0)),
        Part("b", 0.4, 2, lambda seconds: prepare("b", seconds, 6.0)),
        Part("c", 0.1, 1, lambda seconds: prepare("c", seconds, 1.0)),
    ]
    run(clock, 100.0, parts)
    # Part a leaves 20 s for b and c, and b gets 16 s of them. The full share of b, 40 s, is more than the time left, so
    # c gets the minimum of 1 s.
    assert told == pytest.approx({"a": 50.0, "b": 16.0, "c": 1.0})


def test_an_interrupted_part_is_listed_as_unfinished(clock) -> None:
    class Stopped(Exception): ...

    def stop() -> None:
        raise Stopped

    parts = [
        Part("done", 0.4, 1, lambda seconds: {"x": [Work(clock, 1.0)]}),
        Part("stopped", 0.4, 1, lambda seconds: {"x": [stop]}),
        Part("never", 0.2, 1, lambda seconds: {}),
    ]
    schedule = Schedule(parts, clock=lambda: clock.now)
    with pytest.raises(Stopped):
        schedule.run(100.0)
    assert schedule.unfinished == ["stopped", "never"]
