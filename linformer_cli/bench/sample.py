"""`lintx bench sample`: images per second of sampling, by model, engine and batch size; softmax also as a re-run."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from linformer_cli.config import ModelConfig
from linformer_cli.evaluation.agreement import CHECKED_POSITIONS
from linformer_cli.model.mixers import SOFTMAX
from linformer_cli.report.tables import Output, TableStyle
from linformer_cli.sampling.decode import WARM_UP_STEPS, WholeImages
from linformer_cli.sampling.engines import AUTO, ENGINES, REFERENCE, choose_engine
from linformer_cli.system.memory import measure_free_memory, measure_peak_memory
from linformer_cli.system.timing import Timing, time_work
from linformer_cli.units import format_bytes, format_duration
from .columns import SAMPLING, list_position_times, list_speed_tables, render_quality, render_speed, trained_rows
from .measure import ceilings, sampling_work
from .measure.peak_memory import PassFailed, measure_peak
from .measure.sampling_work import RERUN, MiddleSteps, RerunPrefixes, SamplingSetup, SamplingWork
from .models import CHECKED_LAYERS, BenchModel, TrainedRun, group_models
from .published import find_published
from .rounds import Bench, BenchReport, Measurement, measure_groups
from .rows import Extrapolated, SamplingRow

_PROBED_STEPS = 2  # the number of steps timed to estimate the time of a whole image
# A step needs some memory besides the state.
_STATE_MARGIN = 1.2
_MEMORY_LIMIT_SECONDS = 60.0


@dataclass(frozen=True)
class SamplingSettings:
    """The settings of the benchmark.

    `limit_seconds` is for all repeats of a row: if whole images would take longer, only steps around their middle are
    timed, and a re-run is left out if it takes `rerun_patience` times the limit. Untrained models are sampled without
    `look_ahead`, whose speed depends on the weights. `formats` gives the type of the matrix products for each engine.
    With `rerun`, softmax is also timed as a re-run, unless they have the engine `reference`.
    """

    batches: Sequence[int]
    repeats: int = 3
    engines: Sequence[str] = (AUTO,)
    look_ahead: bool = True
    rerun: bool = True
    rerun_patience: float = 2.0
    limit_seconds: float | None = None
    memory: bool = False
    runs: Sequence[TrainedRun] = ()
    formats: Mapping[str, torch.dtype] = field(default_factory=dict)


class SamplingReport(BenchReport[SamplingRow]):
    def show(self, style: TableStyle) -> Output:
        tables = list_speed_tables(self.rows, SAMPLING, style)
        if style == "table" and any("," in (row.preset or "") for row in self.rows):  # several sizes of a network
            tables.append(list_position_times(self.rows))
        plots = {"plot": partial(render_speed, self.rows)}
        if trained_rows(self.rows):
            plots["bits_plot"] = partial(render_quality, self.rows)
        return Output(tables, plots, remarks=[str(self.ceilings)])


def run_sampling_bench(models: Sequence[BenchModel], settings: SamplingSettings, bench: Bench) -> SamplingReport:
    """Check every model, then time all rows of `prepare`, as `measure_groups` does."""
    comparisons = [timed.require_agreement for timed in models]
    rows, ended = measure_groups(prepare(models, settings, bench), bench, comparisons)
    conditions = {
        "repeats": settings.repeats,
        "limit_seconds": settings.limit_seconds,
        "peak_memory": sampling_work.MEMORY_METHOD if settings.memory else None,
        "networks": [_describe_network(timed) for timed in models],
        "peak_memory_bytes": measure_peak_memory(str(models[0].model.device)) if models else 0,
        "warm_up_steps": WARM_UP_STEPS,
        "interleaved": True,
        "checked": f"the first {CHECKED_POSITIONS} positions; {CHECKED_LAYERS} layers of untrained models",
        "product_share": ceilings.WHAT_IS_COUNTED,
        "copy_share": "the rate of reading and writing the state in a step, as a share of the rate of memory copies; "
        "see docs/guide/benchmark.md",
    }
    return SamplingReport(rows=rows, ended=ended, settings=conditions, ceilings=bench.ceilings.describe())


def _describe_network(timed: BenchModel) -> dict[str, object]:
    model, sizes = timed.model, ("image", "layers", "heads", "width")
    return {
        "name": timed.name,
        "preset": timed.preset,
        **{size: getattr(model.config, size) for size in sizes},
        "parameters": model.parameter_count(),
        "product_flops_per_position": ceilings.count_product_flops(model),
    }


def prepare(models: Sequence[BenchModel], asked: SamplingSettings, bench: Bench) -> list[list["SamplingMeasurement"]]:
    """Return groups of measurements by preset and batch size, whose rounds are interleaved."""
    return [
        [
            SamplingMeasurement(asked.repeats, bench, asked, timed, batch, engine)
            for timed in group
            for engine in _list_engines(timed, asked)
        ]
        for group, batch in group_models(models, asked.batches)
    ]


def _list_engines(timed: BenchModel, settings: SamplingSettings) -> list[str]:
    """Return the requested engines, each once, and the re-run of softmax."""
    plain = settings.formats.get(REFERENCE)
    engines = [choose_engine(AUTO, timed.model, plain).value if name == AUTO else name for name in settings.engines]
    if settings.rerun and plain is None and timed.model.config.attention == SOFTMAX:
        engines.append(RERUN)
    return list(dict.fromkeys(engines))


@dataclass(eq=False)
class SamplingMeasurement(Measurement[SamplingRow, SamplingWork]):
    settings: SamplingSettings
    timed: BenchModel
    batch: int
    engine: str

    def __post_init__(self) -> None:
        self._model, self._products = self.timed.model, self.settings.formats.get(self.engine)
        self._precision = self.timed.precision if self._products is None else "int8"
        self._look_ahead = self.settings.look_ahead and self.timed.trained
        rerun = self.engine == RERUN
        self._state_bytes = 0 if rerun else ceilings.count_state_bytes(self._model, self.batch, self._products)
        self._peak_memory_bytes: int | None = None

    @property
    def network(self) -> ModelConfig:
        return self.timed.network

    def prepare(self) -> SamplingWork:
        return self._plan_rerun() if self.engine == RERUN else self._plan_steps()

    def time_sample(self, work: SamplingWork) -> float:
        needed, free = self._state_bytes, measure_free_memory(str(self._model.device))
        if free is not None and _STATE_MARGIN * needed > free:
            raise PassFailed(f"the state would need {format_bytes(needed)}; {format_bytes(free)} are free")
        return work.time_sample()

    def release(self) -> None:
        """Keep the work: it takes no memory between rounds, and `row` still reads it."""

    def finish(self) -> None:
        if self.settings.memory:
            self.measure_memory(self.settings.limit_seconds or _MEMORY_LIMIT_SECONDS)

    def measure_memory(self, limit_seconds: float) -> None:
        """Measure the peak memory of a row with samples. If this fails or nothing counts it, it stays None."""
        config, device = self._model.config, str(self._model.device)
        if not self.samples or device == "mps":
            return
        setup = SamplingSetup(config, self.batch, self.engine, self._precision, device, self._look_ahead)
        with contextlib.suppress(PassFailed):
            peak = self.measure_apart(lambda: measure_peak(sampling_work.build_last_steps, setup, limit_seconds))
            self._peak_memory_bytes = None if peak.bytes is None else max(peak.bytes, self._state_bytes)

    def row(self) -> SamplingRow:
        config = self._model.config
        row = SamplingRow(
            engine=self.engine,
            look_ahead=isinstance(self.work, WholeImages) and self.work.looked_ahead,
            precision=self._precision,
            batch=self.batch,
            state_bytes=self._state_bytes,
            state_bytes_per_image=self._state_bytes // self.batch,
            peak_memory_bytes=self._peak_memory_bytes,
            reduced=self.reduced,
            published=find_published(self.timed.preset, config.attention, config.attention_options, self.engine),
            **self.timed.describe(self.settings.runs),
            **self.outcome,
        )
        return self._with_shares(self._with_speed(row))

    def _plan_steps(self) -> SamplingWork:
        """Plan whole images, or as many steps around the middle as the limit allows."""
        model, batch, check, limit = self._model, self.batch, self.bench.check, self.settings.limit_seconds
        if (refusal := ENGINES[self.engine].refusal(model, self._products)) is not None:
            raise PassFailed(f"{self.engine}: {refusal}")
        positions, warm_up = model.config.image.positions, sampling_work.MIDDLE_WARM_UP_STEPS
        if limit is not None and positions > warm_up + _PROBED_STEPS:
            probe = MiddleSteps(model, batch, self.engine, _PROBED_STEPS, check, self._products)
            steps = int(limit / self.settings.repeats / (self.time_sample(probe) / _PROBED_STEPS))
            # If blocks step over pixels, the steps of a pixel cost different amounts, so whole pixels are timed.
            steps = max(steps // model.embedding.stride, 1) * model.embedding.stride
            # The steps of the warm-up come before the timed ones, after at least one token.
            if steps < positions - warm_up:
                return MiddleSteps(model, batch, self.engine, steps, check, self._products)
        return WholeImages(model, batch, self.engine, self._look_ahead, check, self._products)

    def _plan_rerun(self) -> SamplingWork:
        work, limit = RerunPrefixes(self._model, self.batch, self.bench.check), self.settings.limit_seconds
        if limit is not None:
            # The time of the shortest prefix is scaled in proportion to length. Longer prefixes may take even longer.
            first = time_work(lambda: work.read(1), str(self._model.device))
            seconds = first * sum(sampling_work.SHARES) / sampling_work.SHARES[0] * self.settings.repeats
            if seconds > self.settings.rerun_patience * limit:
                raise PassFailed(f"would take about {format_duration(seconds)}; the limit is {format_duration(limit)}")
        return work

    def _with_speed(self, row: SamplingRow) -> SamplingRow:
        work, positions = self.work, row.positions
        if work is None or not self.samples:
            return row
        timing, images = Timing(self.samples), self.batch * work.steps / positions
        rate, quartiles, seconds = timing.rate(images), timing.rate_quartiles(images), timing.median / images
        if work.steps < positions:
            return replace(row, extrapolated=Extrapolated(rate, quartiles, seconds, work.steps, positions))
        return replace(row, images_per_second=rate, images_per_second_quartiles=quartiles, seconds_per_image=seconds)

    def _with_shares(self, row: SamplingRow) -> SamplingRow:
        """Add the rates as shares of the machine's highest rates of matrix products and memory copies."""
        speed, model = row.speed, self._model
        if speed is None:
            return row
        batch, positions, rerun = self.batch, row.positions, self.engine == RERUN
        rows = batch * max(1, positions // 2) if rerun else batch
        products = self.bench.ceilings.both_products(ceilings.list_products(model), rows)
        if row.look_ahead:  # with look-ahead, it is unknown how often weights and state were read
            return row
        read = ceilings.count_rerun_positions(positions) if rerun else positions
        rate = speed * read * ceilings.count_product_flops(model) / 1e9
        row = replace(row, product_gigaflops=rate)
        if row.precision in products:  # the highest rates are measured with torch, which has no int8
            row = replace(row, product_share=rate / products[row.precision].gigaflops)
        traffic = None if rerun else ceilings.state_traffic_bytes(model, batch, self._products)
        if traffic is None:
            return row
        moved = speed / batch * positions * traffic / 1e9
        return replace(row, state_gigabytes=moved, copy_share=moved / self.bench.ceilings.copy.gigabytes_per_second)
