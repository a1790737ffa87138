"""Tests of what all benchmarks with rows share: interleaved rounds, measurements that fail, and interruptions."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from fixed_ceilings import FixedCeilings
from interruptions import stop_after

from linformer_cli.bench.measure.peak_memory import PassFailed
from linformer_cli.bench.rounds import Bench, Measurement, measure_groups
from linformer_cli.bench.rows import AttentionRow
from linformer_cli.errors import DisagreementError, Interrupted


@dataclass(eq=False)
class Pass(Measurement[AttentionRow, str]):
    """Measures nothing: notes in `log` what is done, and fails as `failing` says."""

    name: str
    log: list[str]
    failing: Callable[[str], None] = lambda event: None

    def note(self, event: str) -> None:
        self.bench.check()
        self.log.append(event)
        self.failing(event)

    def prepare(self) -> str:
        self.note(f"prepare {self.name}")
        return self.name

    def time_sample(self, work: str) -> float:
        self.note(work)
        return 1.0

    def finish(self) -> None:
        self.note(f"finish {self.name}")

    def release(self) -> None:
        super().release()
        self.log.append(f"free {self.name}")

    def row(self) -> AttentionRow:
        sizes = {"device": "cpu", "batch": 1, "positions": 1, "heads": 1, "head_width": 1}
        return AttentionRow(name=self.name, attention=self.name, attention_options={}, **sizes, **self.outcome)  # type: ignore[arg-type]


def measure(
    *groups: str, failing=lambda event: None, check=lambda: None, comparisons=()
) -> tuple[list[AttentionRow], str, list[str], list[AttentionRow]]:
    """Measure groups of passes with one-letter names in two rounds. Return the rows, how it ended, the log, reports."""
    log: list[str] = []
    told: list[AttentionRow] = []
    bench = Bench(FixedCeilings(), told.append, check)
    made = ([Pass(2, bench, name, log, failing) for name in group] for group in groups)
    return *measure_groups(made, bench, comparisons), log, told


def test_the_rounds_of_a_group_are_interleaved_and_its_memory_is_freed_before_the_next() -> None:
    rows, ended, log, told = measure("ab", "c")
    first = ["prepare a", "prepare b", "a", "b", "a", "b", "finish a", "finish b", "free a", "free b"]
    assert log == [*first, "prepare c", "c", "c", "finish c", "free c"]
    assert ended == "finished" and [row.name for row in rows] == ["a", "b", "c"] and told == rows
    assert all((row.repeats, row.samples_seconds, row.left_out) == (2, [1.0, 1.0], None) for row in rows)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PassFailed("too slow"), "too slow"),
        (MemoryError(), "needs more memory than there is"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"), "needs more memory"),
    ],
)
@pytest.mark.parametrize("event", ["prepare a", "a"])
def test_a_row_without_memory_or_time_is_left_out_and_affects_no_other(error, reason, event) -> None:
    def fail(found: str) -> None:
        if found == event:
            raise error

    rows, ended, log, _ = measure("ab", failing=fail)
    assert rows[0].left_out.startswith(reason) and rows[0].samples_seconds == []
    assert rows[1].left_out is None and rows[1].repeats == 2 and ended == "finished"
    assert log.count("a") <= 1  # it is not tried again


def test_a_row_that_ends_early_keeps_its_samples() -> None:
    calls = iter([None, PassFailed("the limit is reached")])

    def fail(found: str) -> None:
        if found == "a" and (error := next(calls)):
            raise error

    assert [(row.repeats, row.left_out) for row in measure("ab", failing=fail)[0]] == [(1, None), (2, None)]


@pytest.mark.parametrize(
    ("calls", "repeats"),
    [(0, []), (2, []), (3, [1]), (5, [2, 1]), (7, [2, 2]), (9, [2, 2]), (10, [2, 2]), (99, [2, 2, 2])],
)
def test_an_interruption_keeps_what_was_measured(calls, repeats) -> None:
    """`check` is called before every preparation, sample and finish, and after a group."""
    rows, ended, log, told = measure("ab", "c", check=stop_after(calls))
    assert [row.repeats for row in rows] == repeats and told == rows
    assert ended == ("finished" if calls == 99 else "interrupted")
    assert log.count("free a") == 1


def test_nothing_is_measured_if_a_comparison_fails_or_is_interrupted() -> None:
    def disagree() -> None:
        raise DisagreementError("not timed")

    with pytest.raises(DisagreementError):
        measure("a", comparisons=[disagree])
    assert measure("a", comparisons=[disagree], check=stop_after(0))[:3] == ([], "interrupted", [])


def test_no_row_reports_a_process_that_ctrl_c_ended() -> None:
    """Ctrl-C makes a process that measures memory fail. The check then raises, so no row reports this failure."""

    def fail() -> None:
        raise PassFailed("failed: KeyboardInterrupt")

    with pytest.raises(Interrupted):
        Pass(1, Bench(FixedCeilings(), check=stop_after(0)), "a", []).measure_apart(fail)
