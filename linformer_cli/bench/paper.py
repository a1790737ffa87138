"""`lintx bench paper`: the tables and figures of Katharopoulos 2020, within a time budget, by the other benchmarks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from linformer_cli.config import ModelConfig
from linformer_cli.model.mixers import parse_variants
from linformer_cli.probe import choose_precision
from linformer_cli.sampling.engines import AUTO
from linformer_cli.sampling.precision import choose_formats
from linformer_cli.system.signals import StopRequest
from . import attention, sample, train
from .attention import PASS_POSITIONS, AttentionSettings
from .budget import BudgetBench, Groups, Part, Schedule
from .copy import CopyReport, run_copy_task
from .growth import describe_exponents
from .measure.ceilings import Ceilings, count_product_flops, sum_flops
from .measure.peak_memory import FORKS
from .models import BenchModel, TrainedRun, build_models, find_trained, load_models, preset_network
from .paper_report import PaperReport, describe_gaps
from .published import Source
from .rounds import Bench, Measurement, release, rows_of, turns_of
from .rows import AttentionRow, ModelRow
from .sample import SamplingMeasurement, SamplingSettings
from .sequence_tasks import PAPER_UPDATES, CopySettings, choose_size
from .train import TrainingSettings

METHODS = ("linear", "softmax", "lsh-1=lsh:rounds=1", "lsh-4=lsh:rounds=4")
COPY_METHODS = ("linear", "softmax", "lsh-4=lsh:rounds=4")
NETWORKS = ("mnist-paper", "cifar10-paper")
_RUNS = "runs"  # the key of the models of --runs whose networks are not the paper's
# The share of a row's time that is spent on timed work. The rest is for probes, states and warm-ups.
_TIMED_SHARE = 0.5
# A re-run of softmax may take this many times as long as other rows, because its four passes cannot be shortened.
_RERUN_PATIENCE = 12.0
_FIRST_RESULTS_SECONDS = 30.0
# In one round, one mechanism at one length may take this share of the time; a slower one is left out.
_LONGEST_POINT_SHARE = 0.05
# The passes in a round: a busy moment can affect all of them, so more rounds say more than more passes.
_PASSES_OF_ROUND = 2
# The lengths in the paper. If fewer lengths are measured, the report says so.
PAPER_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
PAPER_TRAINING_BATCH = {"mnist-paper": 10, "cifar10-paper": 4}
# Average seconds for one length of one mechanism: a process that measures memory, and a few passes in every round.
_SECONDS_PER_LENGTH = 3.0 if FORKS else 7.0
_FEWEST_LENGTHS = 3


@dataclass(frozen=True)
class Sizes:
    """The sizes for a budget. `largest_batches` limits `batches` for some networks. The time limits `lengths`."""

    batches: Sequence[int]
    rounds: int
    training_batches: Mapping[str, int]
    pass_positions: int = PASS_POSITIONS
    largest_batches: Mapping[str, int] = field(default_factory=dict)
    lengths: Sequence[int] | None = None


def choose_sizes(budget_seconds: float) -> Sizes:
    minutes = budget_seconds / 60
    if minutes >= 30:
        return Sizes((1, 16, 64, 256), 16, PAPER_TRAINING_BATCH)
    if minutes >= 5:
        # Many rounds of small batches are more informative than a few rounds of large ones. Softmax's keys and values
        # for 64 CIFAR-10 images take 6 GB, and allocating this memory takes longer than the timed steps.
        training, largest = {"mnist-paper": 4, "cifar10-paper": 1}, {"cifar10-paper": 16}
        return Sizes((1, 16, 64), 12, training, PASS_POSITIONS // 4, largest)
    return Sizes((1, 16), 4, {"mnist-paper": 2, "cifar10-paper": 1}, PASS_POSITIONS // 8)


def choose_lengths(seconds: float, methods: int) -> list[int]:
    """Return as many of `PAPER_LENGTHS` as `seconds` allow, spread over their range."""
    count = max(_FEWEST_LENGTHS, min(len(PAPER_LENGTHS), int(seconds / (_SECONDS_PER_LENGTH * methods))))
    if count == len(PAPER_LENGTHS):
        return list(PAPER_LENGTHS)
    # Exponents need lengths that are far apart, but only large budgets reach the longest lengths.
    longest = min(len(PAPER_LENGTHS) - 1, count + 1)
    return [PAPER_LENGTHS[round(index * longest / (count - 1))] for index in range(count)]


def describe_scaling(lengths: Sequence[int], pass_positions: int) -> list[str]:
    """Return lines about lengths and positions of a pass, if they are fewer than in the paper."""
    lines = []
    if len(lengths) < len(PAPER_LENGTHS):
        listed = ", ".join(f"{length:,}" for length in lengths)
        lines.append(f"time and memory against T: at {listed}; the paper's lengths are 512 to 65,536")
    if pass_positions < PASS_POSITIONS:
        each = f"{pass_positions:,} positions per pass (one sequence where T is longer)"
        lines.append(f"time and memory against T: {each}, instead of {PASS_POSITIONS:,} as in lintx bench attention")
    return lines


@dataclass(frozen=True)
class PaperSettings:
    """The bits/dim of `runs` are shown in rows of the same models. Their other models are sampled, too."""

    budget_seconds: float
    device: str = "cpu"
    runs: Sequence[TrainedRun] = ()
    networks: Sequence[tuple[str, ModelConfig]] = field(default_factory=lambda: [*map(preset_network, NETWORKS)])
    sizes: Sizes | None = None


class PaperBench(BudgetBench[PaperReport]):
    """Measures as much as the budget allows. `report` gets the part's name, each row and its round, from 1."""

    def __init__(
        self,
        settings: PaperSettings,
        report: Callable[[str, AttentionRow | ModelRow, int], None] = lambda part, row, number: None,
        save: Callable[[PaperReport], None] = lambda report: None,
        stop: StopRequest | None = None,
    ) -> None:
        super().__init__(save, stop)
        self._settings, self._report = settings, report
        self._sizes = settings.sizes or choose_sizes(settings.budget_seconds)
        first = settings.networks[0][1]
        self._training_precision = choose_precision("auto", settings.device, first.width, first.feed_forward).value
        self._sampling_precision = "fp32"
        self._formats: Mapping[str, torch.dtype] = {}
        self._bench = Bench(Ceilings(settings.device), check=self._stop.raise_if_set)
        self._variants = parse_variants(METHODS)
        self._models: dict[str, list[BenchModel]] = {}
        # The measurements of each part by the title of their group.
        groups: dict[str, dict[str, Sequence[Measurement[Any, Any]]]] = {"sampling": {}, "training": {}, "scaling": {}}
        self._groups = groups
        self._copy: CopyReport | None = None
        self._reduced: list[str] = []
        rounds = self._sizes.rounds
        parts = [
            Part("sampling", 0.32, rounds, self._prepare_sampling),
            Part("training", 0.22, rounds, self._prepare_training, self._release_training),
            Part("scaling", 0.27, rounds, self._prepare_scaling),
            Part("memory", 0.07, 1, self._prepare_memory),
            Part("copy", 0.12, 1, self._prepare_copy),
        ]
        self._schedule = Schedule(parts, self._finish_group)

    def measure(self) -> None:
        """Run all parts. Raises `DisagreementError` if the parallel and the step form of a mechanism disagree."""
        budget = self._settings.budget_seconds
        self._build_models()
        # Comparing the forms takes equally long for all budgets. At least half of the budget is for measuring.
        self._schedule.run(max(budget / 2, budget - self.elapsed_seconds()))

    def describe(self) -> PaperReport:
        parts = self._groups.values()
        sampling, training, scaling = ([row for group in part.values() for row in rows_of(group)] for part in parts)
        ceilings, networks = self._bench.ceilings.describe(), dict(self._settings.networks)
        names = {sum_flops(timed.model): name for name, models in self._models.items() for timed in models}
        conditions = {
            "methods": METHODS,
            "networks": networks,
            "product_flops_per_position": {
                name: {timed.name: count_product_flops(timed.model) for timed in models}
                for name, models in self._models.items()
            },
            "batches": self._sizes.batches,
            "rounds": self._sizes.rounds,
            "sampling_precision": self._sampling_precision,
            "training_precision": self._training_precision,
            "checked": f"the parallel and step forms of every mechanism, in {next(iter(networks))}",
            "runs": [run.path for run in self._settings.runs],
            "published": Source(),
        }
        return PaperReport(
            budget_seconds=self._settings.budget_seconds,
            elapsed_seconds=self.elapsed_seconds(),
            reduced=self._reduced + self._schedule.reduced + describe_gaps(sampling),
            sampling=sampling,
            training=training,
            scaling=scaling,
            exponents=describe_exponents(scaling),
            copy=self._copy,
            ceilings=ceilings,
            ceiling_networks=[names[one.flops // one.rows] for one in ceilings.products],
            unfinished=self._schedule.unfinished,
            settings=conditions,
        )

    def _build_models(self) -> None:
        device = self._settings.device
        for name, config in self._settings.networks:
            self._models[name] = build_models(self._variants, [(name, config)], device, "fp32")
        known = [timed.model.config for models in self._models.values() for timed in models]
        foreign = [run for run in self._settings.runs if not any(find_trained([run], config) for config in known)]
        compared = self._models[self._settings.networks[0][0]]
        kind, self._formats = choose_formats("auto", compared[0].model)
        self._sampling_precision = kind.value
        if foreign:
            self._models[_RUNS] = load_models(foreign, device, "fp32")
        for timed in (*compared, *self._models.get(_RUNS, ())):
            self._stop.raise_if_set()
            timed.require_agreement()

    def _finish_group(self, part: Part, title: str) -> None:
        number, group = part.rounds_done + 1, self._groups.get(part.name, {}).get(title, ())
        for row in rows_of(group):
            if number == 1 or not row.left_out:
                self._report(part.name, row, number)
        if part.name == "scaling":
            release(group)
        self.save_now_and_then()

    def _begin(self, part: str, groups: Mapping[str, Sequence[Measurement[Any, Any]]]) -> Groups:
        self._groups[part] |= groups
        return {title: list(turns_of(group)) for title, group in groups.items()}

    def _prepare_sampling(self, seconds: float) -> Groups:
        """Prepare the sampling rows, smallest batches first. Results for one image therefore come first."""
        sizes, largest = self._sizes, self._sizes.largest_batches
        limited = [name for name in self._models if name in largest]
        self._reduced += [f"sampling {name}: batches of at most {largest[name]}" for name in limited]
        wanted = [(name, size) for size in sizes.batches for name in self._models if size <= largest.get(name, size)]
        groups: dict[str, list[SamplingMeasurement]] = {}
        for name, batch in wanted:
            rows = len(self._models[name]) + 1  # softmax has two rows
            limit = _TIMED_SHARE * seconds / len(wanted) / sizes.rounds / rows
            if not groups:
                limit = min(limit, _FIRST_RESULTS_SECONDS / rows)
            settings = SamplingSettings(
                [batch],
                repeats=1,  # in each round
                rerun_patience=_RERUN_PATIENCE,
                limit_seconds=limit,
                runs=self._settings.runs,
                formats=self._formats,
            )
            (group,) = sample.prepare(self._models[name], settings, self._bench)
            groups[f"{name} batch {batch}"] = group
        return self._begin("sampling", groups)

    def _prepare_training(self, seconds: float) -> Groups:
        rows = len(self._settings.networks) * len(self._variants)
        groups = {}
        for name, _ in self._settings.networks:
            batch = self._sizes.training_batches.get(name, 1)
            if batch != (paper := PAPER_TRAINING_BATCH.get(name, batch)):
                self._reduced.append(f"training {name}: batch {batch}; the paper's is {paper}")
            # There is one repeat in each round.
            engines = [(AUTO, self._training_precision)]
            settings = TrainingSettings([batch], engines, 1, seconds / rows, self._settings.runs)
            (groups[name],) = train.prepare(self._models[name], settings, self._bench)
        return self._begin("training", groups)

    def _release_training(self) -> None:
        for group in self._groups["training"].values():
            release(group)

    def _prepare_scaling(self, seconds: float) -> Groups:
        lengths = self._sizes.lengths or choose_lengths(seconds, len(self._variants))
        self._reduced += describe_scaling(lengths, self._sizes.pass_positions)
        settings = AttentionSettings(
            repeats=_PASSES_OF_ROUND,
            limit_seconds=_LONGEST_POINT_SHARE * seconds,
            device=self._settings.device,
            pass_positions=self._sizes.pass_positions,
        )
        groups = attention.prepare(self._variants, lengths, settings, self._bench)
        for measurement in groups[0]:
            self._stop.raise_if_set()
            measurement.require_agreement()
        return self._begin("scaling", {f"T = {length:,}": one for length, one in zip(lengths, groups, strict=True)})

    def _prepare_memory(self, seconds: float) -> Groups:
        """Prepare to measure the peak memory of the sampling rows, largest batches first."""
        return {
            title: [partial(one.measure_memory, seconds) for one in group if isinstance(one, SamplingMeasurement)]
            for title, group in reversed(self._groups["sampling"].items())
        }

    def _prepare_copy(self, seconds: float) -> Groups:
        settings = CopySettings(*choose_size(self._settings.budget_seconds, None, None), device=self._settings.device)
        if settings.reduced:
            self._reduced.append(settings.title)

        def learn() -> None:
            self._copy = run_copy_task(parse_variants(COPY_METHODS), settings, seconds, self._stop)
            if (done := self._copy.settings["updates"]) < PAPER_UPDATES:
                self._reduced.append(f"copy task: {done:,} of {PAPER_UPDATES:,} updates")
            self._stop.raise_if_set()

        return {settings.title: [learn]}
