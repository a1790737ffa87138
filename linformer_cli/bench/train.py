"""`lintx bench train`: images per second of whole training steps. The steps are the same as in a training run."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from linformer_cli.config import ModelConfig, RunConfig, TrainConfig
from linformer_cli.data.images import ImageSet
from linformer_cli.native.library import reference_only
from linformer_cli.presets import RECIPES, complete_recipe
from linformer_cli.report.tables import Output, TableStyle
from linformer_cli.sampling.engines import AUTO, NATIVE, REFERENCE
from linformer_cli.system.device import torch_dtype
from linformer_cli.system.timing import Timing, time_work
from linformer_cli.training.loop import Trainer
from linformer_cli.training.pixel_task import PixelTask
from linformer_cli.units import format_duration
from .columns import TRAINING, list_speed_tables, render_speed
from .measure.ceilings import TRAINING_FACTOR, WHAT_IS_COUNTED, count_product_flops, list_products
from .measure.peak_memory import PassFailed
from .models import BenchModel, TrainedRun, group_models
from .rounds import Bench, BenchReport, Measurement, measure_groups
from .rows import TrainingRow

# `reference` is plain torch. `auto` computes as a training run does, and `graph` as one with --graph.
GRAPH = "graph"
ENGINES = (REFERENCE, AUTO, GRAPH)
_FEWEST_IMAGES = 16


@dataclass(frozen=True)
class TrainingSettings:
    """`engines` are pairs of an engine and `fp32` or `bf16`. `limit_seconds` is for all repeats of a row."""

    batches: Sequence[int]
    engines: Sequence[tuple[str, str]]
    repeats: int = 3
    limit_seconds: float | None = None
    runs: Sequence[TrainedRun] = ()


class TrainingReport(BenchReport[TrainingRow]):
    def show(self, style: TableStyle) -> Output:
        plots = {"plot": partial(render_speed, self.rows)}
        return Output(list_speed_tables(self.rows, TRAINING, style), plots, remarks=[str(self.ceilings)])


def run_training_bench(models: Sequence[BenchModel], settings: TrainingSettings, bench: Bench) -> TrainingReport:
    """Check every model, then time all rows of `prepare`, as `measure_groups` does."""
    comparisons = [timed.require_agreement for timed in models]
    rows, ended = measure_groups(prepare(models, settings, bench), bench, comparisons)
    conditions = {
        "repeats": settings.repeats,
        "limit_seconds": settings.limit_seconds,
        "warm_up_steps": 1,
        "interleaved": True,
        "step": "conversion of random images to values, forward pass, backward pass, clipping and optimizer, with the "
        "training settings of the preset",
        "product_share": f"{TRAINING_FACTOR} times {WHAT_IS_COUNTED}",
    }
    return TrainingReport(rows=rows, ended=ended, settings=conditions, ceilings=bench.ceilings.describe())


def prepare(models: Sequence[BenchModel], asked: TrainingSettings, bench: Bench) -> list[list["TrainingMeasurement"]]:
    """Return groups of measurements by preset and batch size, whose rounds are interleaved."""
    return [
        [
            TrainingMeasurement(asked.repeats, bench, asked, timed, batch, engine)
            for timed in group
            for engine in asked.engines
        ]
        for group, batch in group_models(models, asked.batches)
    ]


@dataclass(eq=False)
class TrainingMeasurement(Measurement[TrainingRow, Trainer[PixelTask]]):
    """Training steps on random images, with the preset's settings. The warm trainer is kept between rounds."""

    settings: TrainingSettings
    timed: BenchModel
    batch: int
    engine: tuple[str, str]

    @property
    def network(self) -> ModelConfig:
        return self.timed.network

    def prepare(self) -> Trainer[PixelTask]:
        model = self.timed.model
        sizes = model.config, self.timed.preset, self.batch, str(model.device)
        engine, precision = self.engine
        trainer = build_trainer(*sizes, precision, engine == GRAPH)
        if engine == GRAPH:  # the second step records
            self._time_step(trainer)
        seconds, limit = self._time_step(trainer), self.settings.limit_seconds
        if limit is not None and seconds > limit:
            raise PassFailed(f"one step took {format_duration(seconds)}")
        return trainer

    def time_sample(self, work: Trainer[PixelTask]) -> float:
        # The limit applies only to the repeats. `bench paper` takes more rounds than repeats, within its own budget.
        limit = self.settings.limit_seconds
        if limit is not None and self.reduced and sum(self.samples) + self.samples[-1] > limit:
            raise PassFailed("the limit is reached")
        return self._time_step(work)

    def row(self) -> TrainingRow:
        model, batch, (engine, precision) = self.timed.model, self.batch, self.engine
        if engine == AUTO:
            engine = NATIVE if model.is_compiled(torch_dtype(precision)) else "parallel"
        row = TrainingRow(
            engine=engine,
            precision=precision,
            batch=batch,
            reduced=self.reduced,
            **self.timed.describe(self.settings.runs),
            **self.outcome,
        )
        if not self.samples:
            return row
        timing, values = Timing(self.samples), batch * row.positions
        rate = timing.rate(values) * TRAINING_FACTOR * count_product_flops(model) / 1e9
        ceiling = self.bench.ceilings.both_products(list_products(model), values)[precision]
        return replace(
            row,
            images_per_second=timing.rate(batch),
            images_per_second_quartiles=timing.rate_quartiles(batch),
            seconds_per_step=timing.median,
            product_gigaflops=rate,
            product_share=rate / ceiling.gigaflops,
        )

    def _time_step(self, trainer: Trainer[PixelTask]) -> float:
        self.bench.check()
        with reference_only() if self.engine[0] == REFERENCE else contextlib.nullcontext():
            return time_work(trainer.train_step, trainer.task.device)


def build_trainer(
    model: ModelConfig, preset: str | None, batch: int, device: str, precision: str, graph: bool = False
) -> Trainer[PixelTask]:
    """Build a trainer with random images and the training settings of `preset`. It writes no files."""
    recipe = complete_recipe(RECIPES.get(preset or "", {}))
    train = TrainConfig.model_validate({**recipe, "batch": batch, "steps": 1, "graph": graph})
    image = model.image
    shape = (max(batch, _FEWEST_IMAGES), image.height, image.width, image.channels)
    pixels = np.random.default_rng(0).integers(0, image.levels, shape).astype(np.uint8)
    images = ImageSet("random", "train", pixels, np.arange(len(pixels)) % model.classes if model.classes else None)
    return Trainer(PixelTask(RunConfig(preset=preset, model=model, train=train), (images, images), device, precision))
