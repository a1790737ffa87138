"""Timing: turns, warm-ups and samples, with a made-up clock, so that no machine decides a test."""

import functools
import statistics
from types import SimpleNamespace

import pytest

from linformer_cli.bench.measure import timing as timing_module
from linformer_cli.bench.measure.timing import Timing, compare_turns, measure_interleaved
from linformer_cli.errors import Interrupted


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All events in order, with the readings of the clock and the synchronisations."""
    written: list[str] = []
    monkeypatch.setattr(timing_module, "synchronize", lambda device: written.append(f"synchronize {device}"))
    return written


def start_clock(monkeypatch: pytest.MonkeyPatch, journal: list[str]) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)

    def perf_counter() -> float:
        journal.append("clock")
        return clock.now

    monkeypatch.setattr(timing_module, "time", SimpleNamespace(perf_counter=perf_counter))
    return clock


def test_works_take_turns_after_warm_ups_that_are_not_counted(monkeypatch, journal) -> None:
    clock = start_clock(monkeypatch, journal)
    durations = {"a": iter([1.0, 2.0, 4.0]), "b": iter([8.0, 16.0, 32.0])}

    def work(name: str) -> None:
        journal.append(name)
        clock.now += next(durations[name])

    def warm_up(name: str) -> None:
        journal.append(name)
        clock.now += 1000

    works, warm_ups = ([functools.partial(call, name) for name in "ab"] for call in (work, warm_up))
    timings = measure_interleaved(works, warm_ups, 3, "cuda:1")
    assert [entry for entry in journal if entry in "ab"] == ["a", "b"] * 4
    assert [timing.samples for timing in timings] == [(1.0, 2.0, 4.0), (8.0, 16.0, 32.0)]


def test_the_device_has_done_all_work_whenever_the_clock_is_read(monkeypatch, journal) -> None:
    start_clock(monkeypatch, journal)
    works = [lambda: journal.append("work")] * 2
    measure_interleaved(works, works, 2, "cuda:1")
    counted = ["synchronize cuda:1", "clock", "work", "synchronize cuda:1", "clock"]
    assert journal[-20:] == counted * 4
    assert "clock" not in journal[:-20]


def test_an_error_of_a_work_is_not_hidden(journal) -> None:
    with pytest.raises(ZeroDivisionError):
        measure_interleaved([lambda: 1 / 0], [], 2, "cpu")


@pytest.mark.parametrize(("calls", "turns"), [(2, 1), (3, 1), (4, 2)])
def test_an_interruption_leaves_the_turns_that_all_have_had(monkeypatch, journal, calls, turns) -> None:
    start_clock(monkeypatch, journal)
    left = iter(range(calls))

    def work() -> None:
        if next(left, None) is None:
            raise Interrupted("enough", 2)

    timings = measure_interleaved([work, work], [], 9, "cpu")
    assert [len(timing.samples) for timing in timings] == [turns, turns]


def test_an_interruption_of_the_first_turn_leaves_nothing(monkeypatch, journal) -> None:
    def work() -> None:
        raise Interrupted("enough", 2)

    with pytest.raises(Interrupted):
        measure_interleaved([lambda: None, work], [], 9, "cpu")


@pytest.mark.parametrize(
    ("samples", "median", "quartiles"),
    [
        ((3.0,), 3.0, (3.0, 3.0)),
        ((1.0, 3.0), 2.0, (1.5, 2.5)),
        ((5.0, 1.0, 2.0, 4.0, 3.0), 3.0, (2.0, 4.0)),
        ((4.0, 1.0, 2.0, 3.0), 2.5, (1.75, 3.25)),
        ((1.0, 1.0, 1.0, 1.0, 100.0), 1.0, (1.0, 1.0)),
    ],
)
def test_median_and_quartiles(samples, median, quartiles) -> None:
    timing = Timing(samples)
    assert timing.median == median == statistics.median(samples)
    assert timing.quartiles == quartiles
    assert timing.samples == samples


def test_the_median_is_that_of_the_turns() -> None:
    # Six images against two in a piece of work, and in every turn half its time: the busy last one changes nothing.
    assert compare_turns(6 / 2, (2.0, 1.0, 8.0), 2 / 4, (4.0, 2.0, 16.0)) == 6
    # Half as fast in two of three turns, though the medians are equal.
    assert compare_turns(1 / 2, (1.0, 2.0, 4.0), 1 / 2, (4.0, 1.0, 2.0)) == 0.5
