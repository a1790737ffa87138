"""The tables and figures of Katharopoulos 2020 on this machine, within a budget of time.

The budget decides batch sizes, repeats, lengths and what is timed on whole images; what is less than the paper's own
is listed under `reduced`. Every repeat is a round over all rows of a part, and the parts take turns round by round, so
that the repeats of one row are spread over nearly all of the time: a shared machine has slow and fast stretches of
minutes, which slow some rows down far more than others. Whatever was measured before an interruption is kept.
"""

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from linformer_cli.config import ModelConfig
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.system.device import choose_precision
from linformer_cli.system.environment import describe_environment
from linformer_cli.system.signals import StopRequest

from .ceilings import Ceilings
from .copy import CopyReport, run_copy_task
from .copy_task import PAPER_UPDATES, CopySettings, choose_size
from .growth import describe_exponents
from .paper_sizes import PAPER_LENGTHS, PAPER_TRAINING_BATCH, choose_lengths, choose_sizes
from .published import HARDWARE, SOURCE
from .run import SamplingPlan, measure_row_memory, run_sampling_bench
from .scaling import PASS_POSITIONS, run_scaling_bench
from .subjects import Subject, build_subjects, load_subjects, preset_network
from .trained import TrainedRun, find_trained
from .training import Trainers, run_training_bench
from .turns import Rounds, Turns
from .variants import Variant, parse_variants

METHODS = ("linear", "softmax", "lsh-1=lsh:rounds=1", "lsh-4=lsh:rounds=4")
COPY_METHODS = ("linear", "softmax", "lsh-4=lsh:rounds=4")
NETWORKS = ("mnist-paper", "cifar10-paper")
# What each part is given of the time that is left when it begins, in relation to the parts that begin after it.
_SHARES = {"sampling": 0.32, "training": 0.22, "scaling": 0.27, "memory": 0.07, "copy": 0.12}
# Of what a row is given, the part for its repeats; the rest is for checks, probes and, in every round, warming up.
_TIMED_SHARE = 0.5
# A re-run may take so many times what another row may: it is four passes, of which none can be cut.
_RERUN_PATIENCE = 6
_FIRST_RESULTS_SECONDS = 30.0
# What sampling is given besides, for comparing the two executions of every mechanism before anything is timed.
_STARTING_SECONDS = 30.0
# How long what was measured may stay unsaved, but for a round that takes longer: drawing the figures takes seconds.
_SAVE_SECONDS = 120.0
# What a network that trains holds for every parameter while others are sampled, in float32: the parameter of the model
# and of its trainer, its gradient, the optimizer's two averages, and the average that is evaluated.
_TRAINING_BYTES_PER_PARAMETER = 24
# Of the time for all lengths and rounds, what one mechanism may take at one length in one round: softmax at the longest
# has to be left out, not all.
_LONGEST_POINT_SHARE = 0.05
# Passes of a row in one round of time against T: more rounds tell more than more passes, which a busy moment, longer
# than most of them, slows down alike.
_PASSES_OF_ROUND = 2


@dataclass
class PaperReport:
    """Everything measured so far. `copy` is the copy task's, where it was run; `reduced` says where less was done."""

    budget_seconds: float
    sampling: list[dict[str, Any]] = field(default_factory=list)
    training: list[dict[str, Any]] = field(default_factory=list)
    scaling: list[dict[str, Any]] = field(default_factory=list)
    exponents: list[dict[str, Any]] = field(default_factory=list)
    copy: CopyReport | None = None
    ceilings: dict[str, Any] | None = None
    reduced: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=lambda: list(_SHARES))
    elapsed_seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)


def _describe_extrapolated(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each network whose images were not all drawn whole."""
    lines = []
    for preset in dict.fromkeys(row["preset"] for row in rows):
        timed = [row for row in rows if row["preset"] == preset and row["samples_seconds"]]
        partly = [row for row in timed if "extrapolated" in row]
        if partly:
            lines.append(
                f"sampling {preset or 'runs'}: {len(partly)} of {len(timed)} rows are extrapolated from some positions"
            )
    return lines


def _identify(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a row of a part from the others."""
    return tuple(row.get(key) for key in ("preset", "name", "engine", "batch", "positions"))


class PaperBench:
    """The parts, round by round. `save` is called with the report every two minutes or so and at the end, `report`
    with every row of a part.

    What `report` is told is the part, the row as it is by then, and which round that was, from 1; rows that are left
    out only in the first.
    """

    def __init__(
        self,
        budget_seconds: float,
        device: str,
        runs: Sequence[TrainedRun] = (),
        networks: Sequence[tuple[str, ModelConfig]] | None = None,
        report: Callable[[str, dict[str, Any], int], None] = lambda part, row, number: None,
        save: Callable[[PaperReport], None] = lambda report: None,
        stop: StopRequest | None = None,
    ) -> None:
        self.result = PaperReport(budget_seconds, environment=describe_environment())
        self._device, self._runs, self._stop = device, runs, stop or StopRequest()
        self._networks = list(networks or map(preset_network, NETWORKS))
        self._report, self._save = report, save
        self._variants: list[Variant] = parse_variants(METHODS)
        self._sizes = choose_sizes(budget_seconds)
        self._precision = choose_precision("auto", device, "sampling").value
        self._training_precision = choose_precision("auto", device, "training").value
        self._ceilings = Ceilings(device)
        self._turns = Turns(budget_seconds, _SHARES, {"sampling": _STARTING_SECONDS}, self._sizes.rounds)
        self._next_save = time.monotonic()

    def run(self) -> PaperReport:
        """Measure everything. What a raised `Interrupted` or Ctrl-C leaves is in `result`."""
        self.result.settings = {
            "methods": list(METHODS),
            "networks": {name: config.model_dump() for name, config in self._networks},
            "batches": list(self._sizes.batches),
            "rounds": self._sizes.rounds,
            "sampling_precision": self._precision,
            "training_precision": self._training_precision,
            "checked": f"the two executions of every mechanism, in {self._networks[0][0]}",
            "runs": [run.path for run in self._runs],
            "published": {"source": SOURCE, "hardware": HARDWARE},
        }
        try:
            self.result.ceilings = self._ceilings.describe()
            timed = {"sampling": self._sample, "training": self._train, "scaling": self._scale}
            # Memory is that of the rows of sampling.
            for parts in (timed, {"memory": self._measure_memory}, {"copy": self._copy}):
                self._turns.take(parts, self._keep_now_and_then)
        finally:  # at Ctrl-C as well
            self._keep()
        return self.result

    def _keep_now_and_then(self) -> None:
        if time.monotonic() > self._next_save:
            self._keep()

    def _keep(self) -> None:
        self.result.elapsed_seconds = self._turns.elapsed_seconds
        self.result.unfinished = list(self._turns.unfinished)
        self.result.ceilings = self._ceilings.describe()
        self.result.exponents = describe_exponents(self.result.scaling)
        self.result.reduced = self._turns.reduced + _describe_extrapolated(self.result.sampling)
        self._save(self.result)
        self._next_save = time.monotonic() + _SAVE_SECONDS

    def _go_on(self) -> None:
        """Called between steps: raises where the user has had enough, or the part its time."""
        self._stop.raise_if_set("Stopped; what was measured is kept")
        self._turns.check()

    def _keep_row(self, part: str, number: int, row: dict[str, Any]) -> None:
        """A row of round `number`, in place of what the rounds before had of it."""
        rows: list[dict[str, Any]] = getattr(self.result, part)
        same = [place for place, other in enumerate(rows) if _identify(other) == _identify(row)]
        if same:
            rows[same[0]] = row
        else:
            rows.append(row)
        if number == 1 or not row["left_out"]:
            self._report(part, row, number)

    def _subjects(self, network: tuple[str, ModelConfig], precision: str) -> list[Subject]:
        return build_subjects(self._variants, [network], self._device, precision)

    def _sample(self, seconds: float) -> Rounds:
        """Every network in turn, and the runs of others; small batches first: the first results are one image's."""
        groups = {network[0]: self._subjects(network, self._precision) for network in self._networks}
        if foreign := self._foreign_runs():
            groups["runs"] = load_subjects(foreign, self._device, self._precision)
        largest = self._sizes.largest_batches
        wanted = [
            (batch, name)
            for batch, name in itertools.product(self._sizes.batches, groups)
            if batch <= largest.get(name, batch)
        ]
        self._turns.reduced += [
            f"sampling {name}: batches of at most {largest[name]}" for name in groups if name in largest
        ]
        each = max(0.0, seconds - _STARTING_SECONDS) / len(wanted) / self._sizes.rounds
        spare = _TRAINING_BYTES_PER_PARAMETER * sum(
            parameter.numel()
            for name, _ in self._networks
            for subject in groups[name]
            for parameter in subject.model.parameters()
        )
        first_ends = time.monotonic() + seconds
        took = dict.fromkeys(groups, 0.0)
        # Memory that was touched before is quick to come by, and nothing is probed again.
        for number in self._turns.count("sampling", first_costs=3.0):
            for batch, name in wanted.copy():
                began = time.monotonic()
                if number == 1 and began + took[name] > first_ends:  # a larger batch takes no less
                    self._turns.reduced.append(f"sampling {name}: batch {batch} left out, the time was up")
                    wanted.remove((batch, name))
                    continue
                rows = len(groups[name]) + 1  # softmax is there twice
                limit = _TIMED_SHARE * each / rows
                if not self.result.sampling:
                    limit = min(limit, _FIRST_RESULTS_SECONDS / rows)
                # The methods are compared once, in the first network, and so are the runs.
                first = number == 1 and batch == self._sizes.batches[0]
                plan = SamplingPlan(
                    [batch],
                    repeats=1,
                    limit_seconds=limit,
                    runs=self._runs,
                    earlier=list(self.result.sampling),
                    rerun_limit_seconds=_RERUN_PATIENCE * limit,
                    spare_bytes=spare,
                )
                run_sampling_bench(
                    groups[name],
                    plan,
                    self._precision,
                    self._ceilings,
                    functools.partial(self._keep_row, "sampling", number),
                    self._go_on,
                    checked=not (first and name in (self._networks[0][0], "runs")),
                )
                self._go_on()
                took[name] = time.monotonic() - began
            yield number

    def _foreign_runs(self) -> list[TrainedRun]:
        """Those that are of none of the networks: they are timed themselves."""
        ours = [
            network.model_copy(update={"attention": variant.attention, "attention_options": variant.options})
            for _, network in self._networks
            for variant in self._variants
        ]
        return [run for run in self._runs if all(find_trained([run], model) is None for model in ours)]

    def _train(self, seconds: float) -> Rounds:
        limit = seconds / len(self._networks) / len(self._variants)
        batches = {name: self._sizes.training_batches.get(name, 1) for name, _ in self._networks}
        for name, batch in batches.items():
            if batch != (paper := PAPER_TRAINING_BATCH.get(name, batch)):
                self._turns.reduced.append(f"training {name}: batch {batch}, the paper's is {paper}")
        subjects = {name: self._subjects((name, config), "fp32") for name, config in self._networks}
        warmed_up: Trainers = {}
        for number in self._turns.count("training", first_costs=2.0):  # it also warms up
            for name in subjects:
                run_training_bench(
                    subjects[name],
                    [batches[name]],
                    1,
                    self._training_precision,
                    limit,
                    self._runs,
                    self._ceilings,
                    functools.partial(self._keep_row, "training", number),
                    self._go_on,
                    checked=True,  # for sampling
                    earlier=list(self.result.training),
                    warmed_up=warmed_up,
                )
                self._go_on()
            yield number

    def _scale(self, seconds: float) -> Rounds:
        lengths = choose_lengths(seconds, len(self._variants))
        if len(lengths) < len(PAPER_LENGTHS):
            listed = ", ".join(f"{length:,}" for length in lengths)
            self._turns.reduced.append(f"time and memory against T: at {listed}; the paper's are 512 to 65,536")
        if self._sizes.pass_positions < PASS_POSITIONS:
            self._turns.reduced.append(
                f"time and memory against T: {self._sizes.pass_positions:,} positions a pass (one sequence where T is "
                f"longer), lintx bench attention takes {PASS_POSITIONS:,}"
            )

        # The first also measures memory, in processes that take longer to begin than the passes of a round.
        for number in self._turns.count("scaling", first_costs=3.0):
            run_scaling_bench(
                self._variants,
                lengths,
                _PASSES_OF_ROUND,
                _LONGEST_POINT_SHARE * seconds,
                device=self._device,
                report=functools.partial(self._keep_row, "scaling", number),
                check=self._go_on,
                ceilings=self._ceilings,
                pass_positions=self._sizes.pass_positions,
                earlier=list(self.result.scaling),
            )
            self._go_on()
            yield number

    def _measure_memory(self, seconds: float) -> Rounds:
        """Of the rows of sampling, the largest batches first, as far as the time goes."""
        ends = time.monotonic() + seconds
        left = 0
        models: dict[tuple[str | None, str], PixelModel] = {
            (name, subject.name): subject.model
            for name, config in self._networks
            for subject in self._subjects((name, config), self._precision)
        }
        foreign = load_subjects(self._foreign_runs(), self._device, self._precision)
        models |= {(None, subject.name): subject.model for subject in foreign}
        for row in sorted(self.result.sampling, key=lambda row: -int(row["batch"])):
            if not row["samples_seconds"]:
                continue
            if time.monotonic() > ends:
                left += 1
                continue
            self._go_on()
            row["peak_memory_bytes"] = measure_row_memory(models[row["preset"], row["name"]], row, seconds)
            self._go_on()
        if left:
            self._turns.reduced.append(f"peak memory of sampling: not measured for {left} rows")
        yield 1

    def _copy(self, seconds: float) -> Rounds:
        """The copy task, as far as the time goes; what a Ctrl-C leaves of it is kept."""
        settings = CopySettings(*choose_size(self.result.budget_seconds, None, None), device=self._device)
        found = run_copy_task(parse_variants(COPY_METHODS), settings, seconds, self._stop, ceilings=self._ceilings)
        self.result.copy = found
        if settings.reduced:
            self._turns.reduced.append(settings.title)
        if (done := found.settings.updates) < PAPER_UPDATES:
            self._turns.reduced.append(f"copy task: {done:,} of {PAPER_UPDATES:,} updates")
        self._go_on()
        yield 1
