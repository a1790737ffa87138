"""Growth with T: exponents, what is left out and why, and that nothing is timed whose executions disagree."""

import pytest

from linformer_cli.attention.linear import LinearAttention
from linformer_cli.bench import attention as scaling_module
from linformer_cli.bench.attention import choose_batch, run_scaling_bench
from linformer_cli.bench.measure.attention_pass import PassSetup
from linformer_cli.bench.measure.fresh_process import PassFailed
from linformer_cli.bench.measure.pass_memory import PassMemory
from linformer_cli.bench.measure.timing import Timing
from linformer_cli.bench.variants import parse_variants
from linformer_cli.errors import DisagreementError, Interrupted, UsageError

MIB = 2**20
VARIANTS = parse_variants(["linear", "softmax"])
# Seconds and bytes of one pass at T = 1000: linear grows linearly, softmax with the square.
EXPONENTS = {"linear": 1, "softmax": 2}


class Machine:
    """A machine whose speed and memory are made up."""

    def __init__(self) -> None:
        self.free: int | None = 100 * MIB
        self.seconds = 0.1
        self.failing: dict[tuple[str, int], Exception] = {}
        self.measured: list[tuple[str, int]] = []
        self.timed: list[tuple[str, ...]] = []
        self.passes: list[PassSetup] = []

    def growth(self, setup) -> float:
        return float(setup.batch * (setup.positions / 1000) ** EXPONENTS[setup.attention])

    def memory(self, setup, limit_seconds: float) -> PassMemory:
        self.measured.append((setup.attention, setup.positions))
        if (setup.attention, setup.positions) in self.failing:
            raise self.failing[setup.attention, setup.positions]
        return PassMemory(int(MIB * self.growth(setup)), self.seconds * self.growth(setup))

    def build(self, setup, drawn):
        def work() -> None:
            self.passes.append(setup)

        return work

    def time(self, works, warm_ups, repeats: int, device: str) -> list[Timing]:
        """The works are run once, to know which they are."""
        assert works == warm_ups and device == "cpu"
        before = len(self.passes)
        for work in works:
            work()
        setups = self.passes[before:]
        self.timed.append(tuple(setup.attention for setup in setups))
        return [
            Timing(tuple(self.seconds * self.growth(setup) * f for f in (0.9, 1, 1.2)[:repeats])) for setup in setups
        ]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(scaling_module, "measure_pass_memory", made.memory)
    monkeypatch.setattr(scaling_module, "measure_free_memory", lambda device: made.free)
    monkeypatch.setattr(scaling_module, "build_pass", made.build)
    monkeypatch.setattr(scaling_module, "measure_interleaved", made.time)
    return made


def left_out(report) -> dict[tuple[str, int], str | None]:
    return {(row["name"], row["positions"]): row["left_out"] for row in report.rows}


def test_exponents_are_those_of_the_growth(machine) -> None:
    report = run_scaling_bench(VARIANTS, [1000, 2000, 4000], 3, 100, batch=1)
    for row in report.exponents:
        expected = EXPONENTS[row["name"]]
        for key in ("time_exponent_last_two", "memory_exponent_last_two", "time_exponent_all", "memory_exponent_all"):
            assert row[key] == pytest.approx(expected, abs=1e-6), key


def test_a_row_has_every_sample(machine) -> None:
    told = []
    report = run_scaling_bench(VARIANTS, [2000, 1000], 3, 100, batch=1, heads=2, head_width=8, report=told.append)
    assert [(row["name"], row["positions"]) for row in report.rows] == [
        (name, length) for name in EXPONENTS for length in (1000, 2000)
    ]
    assert [(row["name"], row["positions"]) for row in told] == [
        (name, length) for length in (1000, 2000) for name in EXPONENTS
    ]
    row = report.rows[-1]
    assert row["samples_seconds"] == pytest.approx([0.36, 0.4, 0.48])
    assert row["seconds_per_sequence"] == pytest.approx(0.4)
    assert row["seconds_per_sequence_quartiles"] == pytest.approx([0.38, 0.44])
    assert (row["peak_memory_bytes"], row["repeats"], row["heads"], row["head_width"]) == (4 * MIB, 3, 2, 8)
    assert [row["times_softmax"] for row in report.rows] == pytest.approx([1, 2, 1, 1])
    # Those of a length are timed in turn.
    assert machine.timed == [("linear", "softmax")] * 2


def test_only_time_is_measured_again(machine) -> None:
    machine.failing = {("softmax", 2000): PassFailed("gave up")}
    first = run_scaling_bench(VARIANTS, [1000, 2000, 4000], 1, 100, batch=1).rows
    measured = len(machine.measured)
    machine.seconds = 0.3
    again = run_scaling_bench(VARIANTS, [1000, 2000, 4000], 1, 100, batch=1, earlier=first).rows
    assert len(machine.measured) == measured
    for row, before in zip(again, first, strict=True):
        assert (row["left_out"], row["peak_memory_bytes"]) == (before["left_out"], before["peak_memory_bytes"])
        assert row["samples_seconds"] == [*before["samples_seconds"], *(3 * s for s in before["samples_seconds"])]
        if before["left_out"] is None:
            assert row["seconds_per_sequence"] == pytest.approx(2 * before["seconds_per_sequence"])


def test_what_would_take_too_long_is_not_tried(machine) -> None:
    # 0.1 s at 1000, so 1.6 s at 4000 for softmax: 3 repeats and 2 more passes would take 8 s.
    report = run_scaling_bench(VARIANTS, [1000, 2000, 4000, 8000], 3, 7.9, batch=1)
    reasons = left_out(report)
    assert reasons["softmax", 2000] is None and reasons["linear", 8000] is None
    assert reasons["softmax", 4000] == "would take about 8 s, the limit is 7.9 s"
    assert reasons["softmax", 8000] == reasons["softmax", 4000]
    assert ("softmax", 4000) not in machine.measured
    row = report.rows[-1]
    assert row["seconds_per_sequence"] is row["memory_bytes_per_sequence"] is row["peak_memory_bytes"] is None
    assert (row["samples_seconds"], row["repeats"]) == ([], 0)
    exponents = {row["name"]: row for row in report.exponents}
    assert exponents["softmax"]["time_exponent_last_two"] is None
    assert exponents["softmax"]["time_exponent_all"] == pytest.approx(2)
    assert exponents["linear"]["time_exponent_last_two"] == pytest.approx(1)


def test_what_would_need_too_much_memory_is_not_tried(machine) -> None:
    machine.free = 15 * MIB
    reasons = left_out(run_scaling_bench(VARIANTS, [1000, 2000, 4000], 3, 100, batch=1))
    assert reasons["softmax", 4000] == "would need about 16 MiB, 15 MiB are free"
    assert ("softmax", 4000) not in machine.measured
    machine.free = None
    assert set(left_out(run_scaling_bench(VARIANTS, [1000, 4000], 3, 100, batch=1)).values()) == {None}


def test_an_attempt_that_fails_is_said_and_not_repeated(machine) -> None:
    machine.failing["linear", 2000] = PassFailed("needs more memory than there is")
    machine.failing["softmax", 1000] = UsageError("one head only")
    reasons = left_out(run_scaling_bench(VARIANTS, [1000, 2000, 4000], 3, 100, batch=1))
    assert reasons["linear", 1000] is None
    assert reasons["linear", 2000] == reasons["linear", 4000] == "needs more memory than there is"
    assert reasons["softmax", 1000] == reasons["softmax", 4000] == "one head only"
    assert machine.measured == [("linear", 1000), ("softmax", 1000), ("linear", 2000)]


def test_a_pass_that_is_too_slow_at_the_first_length_is_not_timed(machine) -> None:
    report = run_scaling_bench(VARIANTS[:1], [1000], 3, 0.45, batch=1)
    assert report.rows[0]["left_out"] == "one pass took 0.1 s, too long for 3 repeats within 0.5 s"
    assert machine.timed == [()]


def test_a_busy_moment_leaves_no_mechanism_out(machine, monkeypatch) -> None:
    slow = [("softmax", 2000)]

    def memory(setup, limit_seconds: float) -> PassMemory:
        found = machine.memory(setup, limit_seconds)
        if (setup.attention, setup.positions) in slow:
            slow.clear()
            return PassMemory(found.peak_bytes, 50.0)
        return found

    monkeypatch.setattr(scaling_module, "measure_pass_memory", memory)
    report = run_scaling_bench(VARIANTS, [1000, 2000, 4000], 3, 100, batch=1)
    assert set(left_out(report).values()) == {None} and not slow
    assert machine.measured.count(("softmax", 2000)) == 2 and len(machine.measured) == 7


def test_the_batch_is_scaled_inversely_and_figures_are_of_one_sequence(machine) -> None:
    machine.free = None
    report = run_scaling_bench(VARIANTS, [512, 4096, 131_072], 3, 1e9)
    assert [(setup.positions, setup.batch) for setup in machine.passes[::2]] == [(512, 128), (4096, 16), (131_072, 1)]
    row = report.rows[1]
    assert (row["name"], row["positions"], row["batch"]) == ("linear", 4096, 16)
    assert row["samples_seconds"] == pytest.approx([0.09 * 4.096 * 16, 0.1 * 4.096 * 16, 0.12 * 4.096 * 16])
    assert row["seconds_per_sequence"] == pytest.approx(0.4096)
    assert row["peak_memory_bytes"] == pytest.approx(4.096 * 16 * MIB, abs=1)
    assert row["memory_bytes_per_sequence"] == pytest.approx(4.096 * MIB, abs=1)
    for record in report.exponents:
        assert record["time_exponent_all"] == pytest.approx(EXPONENTS[record["name"]], abs=1e-6)
    assert report.settings["batch"] == "scaled: 65,536 / T, at least 1"
    assert [choose_batch(length) for length in (1, 1000, 65_536, 70_000)] == [65_536, 65, 1, 1]
    assert choose_batch(512, 3) == 3
    report = run_scaling_bench(VARIANTS, [512, 4096], 3, 1e9, pass_positions=2048)
    assert [row["batch"] for row in report.rows] == [4, 1, 4, 1]
    assert report.settings["batch"] == "scaled: 2,048 / T, at least 1"


def test_limits_are_those_of_whole_passes(machine) -> None:
    """A sequence of softmax takes 0.1 s at 1000 and 0.4 s at 2000; of 4 at once, five passes take 8 s."""
    reasons = left_out(run_scaling_bench(VARIANTS, [1000, 2000], 3, 7.9, batch=4))
    assert reasons["softmax", 1000] is None
    assert reasons["softmax", 2000] == "would take about 8 s, the limit is 7.9 s"
    machine.free = 15 * MIB
    reasons = left_out(run_scaling_bench(VARIANTS, [1000, 2000], 3, 100, batch=4))
    assert reasons["softmax", 2000] == "would need about 16 MiB, 15 MiB are free"


def test_a_row_says_how_near_it_is_to_copying_its_inputs(machine) -> None:
    class Fixed:
        copy = type("Copy", (), {"gigabytes_per_second": 0.5})()

        def describe(self):
            return {"copy": {}, "products": []}

    (row,) = run_scaling_bench(VARIANTS[:1], [1000], 3, 100, heads=2, head_width=8, batch=4, ceilings=Fixed()).rows
    # q, k, v read twice, their gradients written; the output written, its gradient read: 4 sequences, 2 heads of 8.
    moved = (3 * 3 + 2) * 8 * 4 * 2 * 1000 * 4
    assert row["copy_share"] == pytest.approx(moved / (4 * 0.1) / 0.5e9)


@pytest.mark.parametrize(("calls", "rows"), [(3, 0), (7, 2), (1000, 4)])
def test_an_interruption_keeps_the_lengths_that_were_measured(machine, calls, rows) -> None:
    """Two calls before the executions are compared; three before memory and one before each pass at a length."""
    left = iter(range(calls))

    def give_up() -> None:
        if next(left, None) is None:
            raise Interrupted("enough", 2)

    told: list[dict] = []
    report = run_scaling_bench(VARIANTS, [1000, 2000], 3, 100, batch=1, report=told.append, check=give_up)
    assert report.ended == ("finished" if calls == 1000 else "interrupted")
    assert len(report.rows) == len(told) == rows
    assert len(report.exponents) == min(rows, 2)


def test_nothing_is_timed_whose_executions_disagree(machine, monkeypatch, raises_one_line) -> None:
    right = LinearAttention.step

    def wrong(self, q_t, k_t, v_t, *rest):
        return right(self, q_t, k_t, v_t * 1.01, *rest)

    monkeypatch.setattr(LinearAttention, "step", wrong)
    with raises_one_line(DisagreementError, "'linear' is not timed"):
        run_scaling_bench(VARIANTS, [1000], 3, 100, batch=1)
    assert machine.measured == []


def test_a_report_says_who_overtakes_softmax_and_what_fits(machine) -> None:
    machine.failing["softmax", 4000] = PassFailed("needs more memory than there is")
    machine.failing["linear", 1000] = UsageError("one head only")
    rows = {row["name"]: row for row in run_scaling_bench(VARIANTS, [1000, 2000, 4000], 3, 100, batch=1).exponents}
    assert (rows["softmax"]["longest_positions"], rows["softmax"]["overtakes_softmax"]) == (2000, None)
    assert (rows["linear"]["longest_positions"], rows["linear"]["overtakes_softmax"]) == (None, None)
    del machine.failing["linear", 1000]
    rows = {row["name"]: row for row in run_scaling_bench(VARIANTS, [500, 2000, 4000], 3, 100, batch=1).exponents}
    assert (rows["linear"]["longest_positions"], rows["linear"]["overtakes_softmax"]) == (4000, "1,000")
    assert rows["linear"]["overtakes_softmax_at"] == pytest.approx(1000)
    (alone,) = run_scaling_bench(VARIANTS[:1], [1000], 3, 100, batch=1).exponents
    assert (alone["longest_positions"], alone["overtakes_softmax"]) == (1000, None)
