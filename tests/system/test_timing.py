"""Tests of timing: synchronisation, median and quartiles."""

from types import SimpleNamespace

from linformer_cli.system import timing as timing_module
from linformer_cli.system.timing import Timing, compare_turns, time_work


def test_the_device_has_finished_all_work_when_the_clock_is_read(monkeypatch) -> None:
    journal: list[str] = []
    readings = iter([100.0, 102.5])

    def perf_counter() -> float:
        journal.append("clock")
        return next(readings)

    monkeypatch.setattr(timing_module, "time", SimpleNamespace(perf_counter=perf_counter))
    monkeypatch.setattr(timing_module, "synchronize", lambda device: journal.append(f"synchronize {device}"))
    assert time_work(lambda: journal.append("work"), "cuda:1") == 2.5
    assert journal == ["synchronize cuda:1", "clock", "work", "synchronize cuda:1", "clock"]


def test_the_comparison_is_the_median_over_the_rounds() -> None:
    # In every round, the first method draws three times the images in half the time. The slow last round changes
    # nothing.
    assert compare_turns(6 / 2, (2.0, 1.0, 8.0), 2 / 4, (4.0, 2.0, 16.0)) == 6
    # The first method is half as fast in two of three rounds, although the medians are equal.
    assert compare_turns(1 / 2, (1.0, 2.0, 4.0), 1 / 2, (4.0, 1.0, 2.0)) == 0.5


def test_a_timing_has_the_median_and_the_quartiles() -> None:
    timing = Timing((4.0, 1.0, 2.0, 3.0))
    assert (timing.median, timing.quartiles) == (2.5, (1.75, 3.25))
