"""Images per second of whole training steps: forward, backward, clipping and the optimizer, as a run takes them."""

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from linformer_cli.config import ModelConfig, RunConfig, TrainConfig
from linformer_cli.data.images import ImageSet
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.native.compiler import textbook_only
from linformer_cli.presets import RECIPES
from linformer_cli.sampling.engines import AUTO, TEXTBOOK
from linformer_cli.system.device import synchronize, torch_dtype
from linformer_cli.system.environment import describe_environment
from linformer_cli.training.loop import Trainer
from linformer_cli.training.run_folder import RunFolder
from linformer_cli.units import format_duration

from .cases import Check
from .ceilings import Ceilings
from .fresh_process import PassFailed
from .groups import BenchReport, compare_with_softmax, measure_groups
from .memory import refuse_misfits
from .operations import TRAINING_FACTOR, WHAT_IS_COUNTED, count_product_flops, list_products
from .subjects import Subject
from .timing import Timing, measure_interleaved
from .trained import TrainedRun

_FEWEST_IMAGES = 16
# Plain torch in float32, whatever was asked for; and as a run computes.
ENGINES = (TEXTBOOK, AUTO)
# Of a row's preset, name, engine and batch.
Trainers = dict[tuple[str | None, str, str, int], Trainer]


def run_training_bench(
    subjects: Sequence[Subject],
    batches: Sequence[int],
    repeats: int,
    precision: str,
    limit_seconds: float | None = None,
    runs: Sequence[TrainedRun] = (),
    ceilings: Ceilings | None = None,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
    check: Check = None,
    checked: bool = False,
    engines: Sequence[str] = (AUTO,),
    earlier: Sequence[dict[str, Any]] = (),
    warmed_up: Trainers | None = None,
) -> BenchReport:
    """Time training steps of every subject at every batch size, on random images, by the recipe of its preset.

    Subjects of one preset and batch size are timed in turn. Where the repeats of one would take longer than
    `limit_seconds`, that group has fewer, and a row says so under `reduced`; what takes longer for a single step is
    left out. `precision` is that of the matrix products, as in training: weights are float32. `engines`: `auto` is what
    a run takes, `textbook` plain torch in float32; each in rows of its own, in turns too.

    `earlier` has the rows that the same call gave before: their samples count too, and what they left out stays left
    out. `warmed_up` keeps the trainers from the call that gave them, which spares a step of each. `check` is called
    before every step and may raise: `Interrupted` ends it with what was measured.

    Raises `DisagreementError` before any timing where the two executions of a mechanism disagree, which `checked`
    says has been seen to.
    """

    def measure(group: Sequence[Subject], batch: int) -> list[dict[str, Any]]:
        # The same call gives the same rows in the same order.
        before = [row for row in earlier if (row["preset"], row["batch"]) == (group[0].preset, batch)]
        # Otherwise those of a group go with it: their gradients and averages take memory.
        kept = {} if warmed_up is None else warmed_up
        found = _measure_group(group, batch, repeats, engines, precision, limit_seconds, ceilings, check, before, kept)
        for row in found:
            row |= _find(group, row["name"]).find_run(runs)
        return found

    rows, ended = measure_groups(subjects, batches, measure, report, check, checked)
    settings = {
        "repeats": repeats,
        "warm_up_steps": 1,
        "interleaved": True,
        "limit_seconds": limit_seconds,
        "step": "random images to values, forward, backward, clipping, optimizer, by the recipe of the preset",
        "product_share": f"{TRAINING_FACTOR} times {WHAT_IS_COUNTED}",
    }
    described = None if ceilings is None else ceilings.describe()
    return BenchReport(rows, ended, settings, describe_environment(), described)


def build_trainer(model: ModelConfig, preset: str | None, batch: int, device: str, precision: str) -> Trainer:
    """A run that never begins: its trainer, with random images and the recipe of `preset`. Writes nothing."""
    train = TrainConfig.model_validate({**RECIPES.get(preset or "", {}), "batch": batch, "steps": 1})
    image = model.image
    shape = (max(batch, _FEWEST_IMAGES), image.height, image.width, image.channels)
    pixels = np.random.default_rng(0).integers(0, image.levels, shape).astype(np.uint8)
    labels = np.arange(len(pixels)) % model.classes if model.classes else None
    images = ImageSet("random", "train", pixels, labels)
    config = RunConfig(preset=preset, model=model, train=train)
    return Trainer(config, RunFolder(Path("unused")), (images, images), device, precision)


def _find(group: Sequence[Subject], name: str) -> Subject:
    return next(subject for subject in group if subject.name == name)


def _measure_group(
    group: Sequence[Subject],
    batch: int,
    repeats: int,
    engines: Sequence[str],
    precision: str,
    limit_seconds: float | None,
    ceilings: Ceilings | None,
    check: Check,
    earlier: Sequence[dict[str, Any]],
    warmed_up: Trainers,
) -> list[dict[str, Any]]:
    device = str(group[0].model.device)

    def step(trainer: Trainer, engine: str) -> None:
        if check is not None:
            check()
        with textbook_only() if engine == TEXTBOOK else contextlib.nullcontext():
            trainer.take_step()

    planned = [(subject, engine) for subject in group for engine in engines]
    works: dict[int, Callable[[], None]] = {}
    left_out: dict[int, str] = {index: row["left_out"] for index, row in enumerate(earlier) if row["left_out"]}
    slowest = 0.0
    for index, (subject, engine) in enumerate(planned):
        if index in left_out:
            continue
        identity = (subject.preset, subject.name, engine, batch)
        trainer = warmed_up.get(identity)
        if trainer is not None:
            seconds = max(earlier[index]["samples_seconds"])
        else:
            try:
                with refuse_misfits():
                    kind = _precision_of(engine, precision)
                    trainer = build_trainer(subject.model.config, subject.preset, batch, device, kind)
                    began = time.perf_counter()
                    step(trainer, engine)
                    synchronize(device)
            except PassFailed as reason:
                left_out[index] = str(reason)
                continue
            seconds = time.perf_counter() - began
            if limit_seconds is not None and seconds > limit_seconds and not earlier:
                left_out[index] = f"one step took {format_duration(seconds)}"
                continue
            warmed_up[identity] = trainer
        works[index] = functools.partial(step, trainer, engine)
        slowest = max(slowest, seconds)
    counted = repeats if limit_seconds is None else max(1, min(repeats, int(limit_seconds / max(slowest, 1e-9))))
    # Warmed up above.
    timings = dict(zip(works, measure_interleaved(list(works.values()), [], counted, device), strict=True))
    if earlier:
        timings = {index: timing.after(earlier[index]["samples_seconds"]) for index, timing in timings.items()}
    rows = []
    for index, (subject, engine) in enumerate(planned):
        row = _describe(subject, engine, batch, timings.get(index), _precision_of(engine, precision), ceilings)
        fewer = index in timings and row["repeats"] < repeats
        row["left_out"] = left_out.get(index)
        row["reduced"] = f"{row['repeats']} of {repeats} repeats" if fewer else None
        rows.append(row)
    models = [subject.model.config for subject, _ in planned]
    compare_with_softmax(rows, lambda row: row["images_per_second"], models)
    return rows


def _precision_of(engine: str, precision: str) -> str:
    return "fp32" if engine == TEXTBOOK else precision


def _name_engine(model: PixelModel, engine: str, precision: str) -> str:
    """What a row is called: of `auto`, `native` where the attention has compiled kernels, else `parallel`."""
    if engine == TEXTBOOK:
        return TEXTBOOK
    return "native" if model.is_compiled(torch_dtype(precision)) else "parallel"


def _describe(
    subject: Subject, engine: str, batch: int, timing: Timing | None, precision: str, ceilings: Ceilings | None
) -> dict[str, Any]:
    model = subject.model
    positions = model.config.image.positions
    record: dict[str, Any] = {
        "name": subject.name,
        "preset": subject.preset,
        "attention": model.config.attention,
        "attention_options": model.config.attention_options,
        "engine": _name_engine(model, engine, precision),
        "precision": precision,
        "device": str(model.device),
        "batch": batch,
        "positions": positions,
        "images_per_second": None,
        "images_per_second_quartiles": None,
        "seconds_per_step": None,
        "repeats": 0,
        "samples_seconds": [],
        "product_gigaflops": None,
        "product_share": None,
    }
    if timing is None:
        return record
    first, third = (batch / seconds for seconds in reversed(timing.quartiles))
    record |= {
        "images_per_second": batch / timing.median,
        "images_per_second_quartiles": [first, third],
        "seconds_per_step": timing.median,
        "repeats": len(timing.samples),
        "samples_seconds": list(timing.samples),
    }
    if ceilings is not None:
        rate = batch / timing.median * positions * TRAINING_FACTOR * count_product_flops(model) / 1e9
        found = {kind: ceilings.product(list_products(model), batch * positions, kind) for kind in ("fp32", "bf16")}
        record |= {"product_gigaflops": rate, "product_share": rate / found[precision].gigaflops}
    return record
