"""Tests of `bench attention`: growth with T, rows that are left out, and mechanisms that are not timed."""

from typing import Any

import pytest
from fixed_ceilings import FixedCeilings

from linformer_cli.attention.linear import LinearAttention
from linformer_cli.bench import attention
from linformer_cli.bench.attention import AttentionReport, AttentionSettings, prepare, run_attention_bench
from linformer_cli.bench.measure.attention_pass import PassSetup
from linformer_cli.bench.measure.peak_memory import PassFailed, PeakMemory
from linformer_cli.bench.rounds import Bench, turns_of
from linformer_cli.bench.rows import AttentionRow
from linformer_cli.errors import DisagreementError, UsageError
from linformer_cli.evaluation.agreement import require_agreement
from linformer_cli.model.mixers import parse_variants
from linformer_cli.model.pixel_model import PixelModel

MIB = 2**20
VARIANTS = parse_variants(["linear", "softmax"])
# Time and memory of the made-up machine grow with these powers of T. A pass of 1000 positions takes 0.1 s and 1 MiB.
EXPONENTS = {"linear": 1, "softmax": 2}


class Machine:
    """A machine with made-up speed and memory."""

    def __init__(self) -> None:
        self.free: int | None = 100 * MIB
        self.failing: dict[tuple[str, int], Exception] = {}
        self.measured: list[tuple[str, int]] = []
        self.passes: list[PassSetup] = []
        self.built = 0

    def growth(self, setup: PassSetup) -> float:
        return float(setup.batch * (setup.positions / 1000) ** EXPONENTS[setup.variant.attention])

    def memory(self, build: object, setup: PassSetup, limit_seconds: float) -> PeakMemory:
        self.measured.append((setup.variant.attention, setup.positions))
        if (setup.variant.attention, setup.positions) in self.failing:
            raise self.failing[setup.variant.attention, setup.positions]
        return PeakMemory(int(MIB * self.growth(setup)), 0.1 * self.growth(setup))

    def build(self, setup: PassSetup, inputs: dict) -> Any:
        self.built += 1
        return lambda: self.passes.append(setup)

    def time(self, work: Any, device: str) -> float:
        """The passes of a row take 0.9, 1 and 1.2 times the usual time."""
        work()
        setup = self.passes[-1]
        number = self.passes.count(setup) - 2  # the first pass was the warm-up
        return 0.1 * self.growth(setup) * (0.9, 1, 1.2)[number % 3]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The forms of a mechanism are not compared, which would take longer than a test."""
    made = Machine()
    monkeypatch.setattr(attention, "require_agreement", lambda model: None)
    monkeypatch.setattr(attention, "measure_peak", made.memory)
    monkeypatch.setattr(attention, "measure_free_memory", lambda device: made.free)
    monkeypatch.setattr(attention, "build_pass", made.build)
    monkeypatch.setattr(attention, "time_work", made.time)
    return made


def bench(lengths: list[int], limit: float = 100.0, variants=VARIANTS, **changes: Any) -> AttentionReport:
    ceilings = changes.pop("ceilings", FixedCeilings())
    calls = {name: changes.pop(name) for name in ("report", "check") if name in changes}
    settings = AttentionSettings(**{"repeats": 3, "limit_seconds": limit, "batch": 1, **changes})
    return run_attention_bench(variants, lengths, settings, Bench(ceilings, **calls))


def left_out(report: AttentionReport) -> dict[tuple[str, int], str | None]:
    return {(row.name, row.positions): row.left_out for row in report.rows}


def test_exponents_match_the_growth(machine) -> None:
    for row in bench([1000, 2000, 4000]).exponents:
        found = (
            row.time_exponent_last_two,
            row.memory_exponent_last_two,
            row.time_exponent_all,
            row.memory_exponent_all,
        )
        assert found == pytest.approx([EXPONENTS[row.name]] * 4, abs=1e-6)


def test_a_row_keeps_every_sample(machine) -> None:
    told: list[AttentionRow] = []
    report = bench([2000, 1000], heads=2, head_width=8, report=told.append)
    assert [(row.name, row.positions) for row in report.rows] == [
        (name, length) for name in EXPONENTS for length in (1000, 2000)
    ]
    assert [(row.name, row.positions) for row in told] == [
        (name, length) for length in (1000, 2000) for name in EXPONENTS
    ]
    row = report.rows[-1]
    assert row.samples_seconds == pytest.approx([0.36, 0.4, 0.48])
    assert row.seconds_per_sequence == pytest.approx(0.4)
    assert row.seconds_per_sequence_quartiles == pytest.approx((0.38, 0.44))
    assert (row.peak_memory_bytes, row.repeats, row.heads, row.head_width) == (4 * MIB, 3, 2, 8)
    assert [row.times_softmax for row in report.rows] == pytest.approx([1, 2, 1, 1])
    # The mechanisms take turns at each length, after one warm-up each.
    assert [setup.variant.attention for setup in machine.passes] == ["linear", "softmax"] * 4 * 2


def test_passes_that_would_take_too_long_are_not_tried(machine) -> None:
    # Softmax takes 0.1 s at T = 1000, so 1.6 s at T = 4000. Three repeats and two other passes would take 8 s.
    report = bench([1000, 2000, 4000, 8000], 7.9)
    reasons = left_out(report)
    assert reasons["softmax", 2000] is None and reasons["linear", 8000] is None
    assert reasons["softmax", 4000] == "would take about 8 s; the limit is 7.9 s"
    assert reasons["softmax", 8000] == reasons["softmax", 4000]
    assert ("softmax", 4000) not in machine.measured
    row = report.rows[-1]
    assert row.seconds_per_sequence is row.memory_bytes_per_sequence is row.peak_memory_bytes is None
    assert (row.samples_seconds, row.repeats) == ([], 0)
    exponents = {row.name: row for row in report.exponents}
    assert exponents["softmax"].time_exponent_last_two is None
    assert exponents["softmax"].time_exponent_all == pytest.approx(2)
    assert exponents["linear"].time_exponent_last_two == pytest.approx(1)


def test_passes_that_would_need_too_much_memory_are_not_tried(machine) -> None:
    machine.free = 15 * MIB
    assert left_out(bench([1000, 2000, 4000]))["softmax", 4000] == "would need about 16 MiB; 15 MiB are free"
    assert ("softmax", 4000) not in machine.measured
    machine.free = None
    assert set(left_out(bench([1000, 4000])).values()) == {None}


def test_an_attempt_that_fails_is_not_repeated(machine) -> None:
    machine.failing["linear", 2000] = PassFailed("needs more memory than there is")
    machine.failing["softmax", 1000] = UsageError("one head only")
    reasons = left_out(bench([1000, 2000, 4000]))
    assert reasons["linear", 1000] is None
    assert reasons["linear", 2000] == reasons["linear", 4000] == "needs more memory than there is"
    assert reasons["softmax", 1000] == reasons["softmax", 4000] == "one head only"
    assert machine.measured == [("linear", 1000), ("softmax", 1000), ("linear", 2000)]


def test_a_mechanism_that_refuses_the_sizes_is_left_out(machine, monkeypatch) -> None:
    right = attention.build_checked_model

    def build(setup: PassSetup) -> PixelModel:
        if setup.variant.attention == "linear":
            raise UsageError("one head only")
        return right(setup)

    monkeypatch.setattr(attention, "build_checked_model", build)
    machine.failing["softmax", 2000] = PassFailed("needs more memory than there is")
    report = bench([1000, 2000])
    reasons = left_out(report)
    assert reasons["linear", 1000] == reasons["linear", 2000] == "one head only"
    assert reasons["softmax", 1000] is None and {name for name, _ in machine.measured} == {"softmax"}
    assert [(row.longest_positions, row.overtakes_softmax) for row in report.exponents] == [(None, None), (1000, None)]


def test_a_report_says_where_softmax_is_overtaken(machine) -> None:
    linear, softmax = bench([500, 2000, 4000]).exponents
    assert (linear.longest_positions, linear.overtakes_softmax, softmax.overtakes_softmax) == (4000, "1,000", None)
    assert linear.overtakes_softmax_at == pytest.approx(1000)
    assert bench([1000], variants=VARIANTS[:1]).exponents[0].overtakes_softmax is None


def test_a_pass_that_is_too_slow_at_the_first_length_is_not_timed(machine) -> None:
    report = bench([1000], 0.45, VARIANTS[:1])
    assert report.rows[0].left_out == "one pass took 0.1 s, too long for 5 passes within 0.5 s"
    assert machine.passes == []


def test_a_mechanism_is_not_left_out_because_of_one_slow_measurement(machine, monkeypatch) -> None:
    slow = [("softmax", 2000)]

    def memory(build: object, setup: PassSetup, limit_seconds: float) -> PeakMemory:
        found = machine.memory(build, setup, limit_seconds)
        if (setup.variant.attention, setup.positions) in slow:
            slow.clear()
            return PeakMemory(found.bytes, 50.0)
        return found

    monkeypatch.setattr(attention, "measure_peak", memory)
    assert set(left_out(bench([1000, 2000, 4000])).values()) == {None} and not slow
    assert machine.measured.count(("softmax", 2000)) == 2 and len(machine.measured) == 7


def test_batches_shrink_with_the_length_and_results_are_per_sequence(machine) -> None:
    machine.free = None
    report = bench([512, 4096, 131_072], 1e9, batch=None)
    sizes = dict.fromkeys((setup.positions, setup.batch) for setup in machine.passes)
    assert list(sizes) == [(512, 128), (4096, 16), (131_072, 1)]
    row = report.rows[1]
    assert (row.name, row.positions, row.batch) == ("linear", 4096, 16)
    assert row.samples_seconds == pytest.approx([0.09 * 4.096 * 16, 0.1 * 4.096 * 16, 0.12 * 4.096 * 16])
    assert row.seconds_per_sequence == pytest.approx(0.4096)
    assert row.peak_memory_bytes == pytest.approx(4.096 * 16 * MIB, abs=1)
    assert row.memory_bytes_per_sequence == pytest.approx(4.096 * MIB, abs=1)
    assert report.settings["batch"] == "scaled: 65,536 / T, at least 1"
    assert [AttentionSettings().choose_batch(length) for length in (1, 1000, 65_536, 70_000)] == [65_536, 65, 1, 1]
    assert AttentionSettings(batch=3).choose_batch(512) == 3
    assert AttentionSettings(pass_positions=2048).choose_batch(512) == 4


def test_the_copy_share_counts_the_traffic_of_inputs_and_outputs(machine, ceilings) -> None:
    (row,) = bench([1000], variants=VARIANTS[:1], heads=2, head_width=8, batch=4, ceilings=ceilings).rows
    # q, k and v are read twice, and their gradients are written once. The output is written, and its gradient is read.
    # The pass has 4 sequences and 2 heads of width 8.
    moved = (3 * 3 + 2) * 8 * 4 * 2 * 1000 * 4
    assert row.copy_share == pytest.approx(moved / (4 * 0.1) / 10e9)


def test_a_measurement_continues_after_its_memory_was_freed(machine) -> None:
    """`bench paper` frees the inputs after each of its rounds."""
    (group,) = prepare(VARIANTS, [1000], AttentionSettings(repeats=2, batch=1), Bench(FixedCeilings()))
    for rounds in (1, 2):
        for turn in turns_of(group):
            turn()
        for measurement in group:
            measurement.release()
            assert len(measurement.samples) == 2 * rounds
        assert machine.built == 2 * rounds
    assert [setup.variant.attention for setup in machine.passes] == ["linear", "softmax"] * 3 * 2
    assert machine.measured == [("linear", 1000), ("softmax", 1000)]


def test_a_mechanism_whose_attend_and_step_disagree_is_not_timed(
    machine, monkeypatch, damage_step, raises_one_line
) -> None:
    damage_step(LinearAttention)
    monkeypatch.setattr(attention, "require_agreement", require_agreement)
    with raises_one_line(DisagreementError, "'linear' is not timed"):
        bench([1000])
    assert machine.measured == []
