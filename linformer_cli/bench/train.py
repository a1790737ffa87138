"""`lintx bench train`: images per second of whole training steps. The steps are the same as in a training run."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from linformer_cli.config import ModelConfig, RunConfig, TrainConfig
from linformer_cli.data.images import ImageSet
from linformer_cli.native.library import reference_only
from linformer_cli.presets import RECIPES, complete_recipe
from linformer_cli.sampling.engines import AUTO, NATIVE, REFERENCE
from linformer_cli.system.device import torch_dtype
from linformer_cli.system.signals import Check, never_stop
from linformer_cli.system.timing import Timing, time_work
from linformer_cli.training.loop import Trainer
from linformer_cli.training.pixel_task import PixelTask
from linformer_cli.units import format_duration

from .measure.ceilings import Ceilings
from .measure.costs import TRAINING_FACTOR, WHAT_IS_COUNTED, count_product_flops, list_products
from .measure.peak_memory import PassFailed
from .models import BenchModel, TrainedRun, group_by_preset
from .rounds import BenchReport, Measurement, measure_groups
from .rows import TrainingRow

# `reference` is plain torch. `auto` computes as a training run does.
ENGINES = (REFERENCE, AUTO)
_FEWEST_IMAGES = 16


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of the benchmark.

    `engines` are pairs of an engine and the precision of its matrix products, `fp32` or `bf16`. Weights are always
    float32. `limit_seconds` is the time limit for all repeats of a row. A row that would take longer gets fewer
    repeats. If a single step takes longer, the row is left out.
    """

    batches: Sequence[int]
    engines: Sequence[tuple[str, str]]
    repeats: int = 3
    limit_seconds: float | None = None
    runs: Sequence[TrainedRun] = ()


@dataclass(frozen=True)
class TrainingConditions:
    """The settings that the rows depend on."""

    repeats: int
    limit_seconds: float | None
    warm_up_steps: int = 1
    interleaved: bool = True
    step: str = (
        "conversion of random images to values, forward pass, backward pass, clipping and optimizer, with the "
        "training settings of the preset"
    )
    product_share: str = f"{TRAINING_FACTOR} times {WHAT_IS_COUNTED}"


def run_training_bench(
    models: Sequence[BenchModel],
    settings: TrainingSettings,
    ceilings: Ceilings,
    report: Callable[[TrainingRow], None] = lambda row: None,
    check: Check = never_stop,
) -> BenchReport[TrainingRow]:
    """Check every model, then time all rows of `prepare`, as `measure_groups` does."""
    comparisons = [timed.require_agreement for timed in models]
    rows, ended = measure_groups(prepare(models, settings, ceilings, check), report, check, comparisons)
    return BenchReport(rows, ended, TrainingConditions(settings.repeats, settings.limit_seconds), ceilings.describe())


def prepare(
    models: Sequence[BenchModel], settings: TrainingSettings, ceilings: Ceilings, check: Check = never_stop
) -> list[list["TrainingMeasurement"]]:
    """Return groups of measurements by preset and batch size. Measurements of a group are interleaved."""
    return [
        [
            TrainingMeasurement(timed, engine, batch, settings, ceilings, check)
            for timed in group
            for engine in settings.engines
        ]
        for group in group_by_preset(models)
        for batch in settings.batches
    ]


class TrainingMeasurement(Measurement[TrainingRow, Trainer[PixelTask]]):
    """Training steps of a model with one of `settings.engines`, on random images, with the settings of its preset.

    The trainer is kept between rounds, because a new trainer would have to warm up again. Its gradients and averages
    therefore occupy memory between rounds.
    """

    def __init__(
        self,
        timed: BenchModel,
        engine: tuple[str, str],
        batch: int,
        settings: TrainingSettings,
        ceilings: Ceilings,
        check: Check = never_stop,
    ) -> None:
        super().__init__(settings.repeats, ceilings, check, timed.network)
        self._timed, self._batch, self._settings = timed, batch, settings
        self._plain, self._precision = engine[0] == REFERENCE, engine[1]
        self._device = str(timed.model.device)

    def prepare(self) -> Trainer[PixelTask]:
        config, preset = self._timed.model.config, self._timed.preset
        trainer = build_trainer(config, preset, self._batch, self._device, self._precision)
        seconds, limit = self._time_step(trainer), self._settings.limit_seconds
        if limit is not None and seconds > limit:
            raise PassFailed(f"one step took {format_duration(seconds)}")
        return trainer

    def time_sample(self, work: Trainer[PixelTask]) -> float:
        # The limit applies only to the repeats. `bench paper` takes more rounds than repeats, within its own budget.
        limit = self._settings.limit_seconds
        if limit is not None and self.reduced and sum(self.samples) + self.samples[-1] > limit:
            raise PassFailed("the limit is reached")
        return self._time_step(work)

    def row(self) -> TrainingRow:
        model, batch = self._timed.model, self._batch
        row = TrainingRow(
            engine=self._name_engine(),
            precision=self._precision,
            batch=batch,
            reduced=self.reduced,
            **self._timed.describe(self._settings.runs),
            **self.outcome,
        )
        if not self.samples:
            return row
        timing, values = Timing(self.samples), batch * row.positions
        rate = timing.rate(values) * TRAINING_FACTOR * count_product_flops(model) / 1e9
        ceiling = self.ceilings.both_products(list_products(model), values)[self._precision]
        return replace(
            row,
            images_per_second=timing.rate(batch),
            images_per_second_quartiles=timing.rate_quartiles(batch),
            seconds_per_step=timing.median,
            product_gigaflops=rate,
            product_share=rate / ceiling.gigaflops,
        )

    def _time_step(self, trainer: Trainer[PixelTask]) -> float:
        self.check()
        with reference_only() if self._plain else contextlib.nullcontext():
            return time_work(trainer.train_step, self._device)

    def _name_engine(self) -> str:
        """Return `reference`, or what `auto` uses: `native` with compiled kernels, `parallel` without."""
        if self._plain:
            return REFERENCE
        return NATIVE if self._timed.model.is_compiled(torch_dtype(self._precision)) else "parallel"


def build_trainer(
    model: ModelConfig, preset: str | None, batch: int, device: str, precision: str
) -> Trainer[PixelTask]:
    """Build a trainer with random images and the training settings of `preset`. The trainer writes no files."""
    train = TrainConfig.model_validate({**complete_recipe(RECIPES.get(preset or "", {})), "batch": batch, "steps": 1})
    image = model.image
    shape = (max(batch, _FEWEST_IMAGES), image.height, image.width, image.channels)
    pixels = np.random.default_rng(0).integers(0, image.levels, shape).astype(np.uint8)
    labels = np.arange(len(pixels)) % model.classes if model.classes else None
    images = ImageSet("random", "train", pixels, labels)
    config = RunConfig(preset=preset, model=model, train=train)
    return Trainer(PixelTask(config, (images, images), device, precision))
