"""One run for every mechanism, on the same images at the same size, and one row of figures for each.

Above training and bench, since it needs both. Everything is kept in files: whatever was finished is not done again.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from linformer_cli.bench.cases import Check, build_step_case
from linformer_cli.bench.groups import require_agreement
from linformer_cli.bench.timing import Timing, measure_interleaved
from linformer_cli.bench.variants import Variant
from linformer_cli.data.images import ImageSet
from linformer_cli.native.compiler import has_library
from linformer_cli.report.grids import encode_png, read_png_metadata, render_grid
from linformer_cli.report.tables import to_json
from linformer_cli.sampling.decode import Sampler
from linformer_cli.sampling.engines.native_layout import SOURCE
from linformer_cli.system.environment import processor_name
from linformer_cli.system.signals import StopRequest
from linformer_cli.training.loop import Trainer
from linformer_cli.training.progress import Reporter
from linformer_cli.training.run_folder import RunFolder
from linformer_cli.training.settings import Given, Settings, merge_settings, read_tables

from .checkpoint import Checkpoint, holds_checkpoint, load_weights, read_checkpoint
from .config import LENGTHS, RunConfig, TrainConfig, parse_config
from .errors import DataError, LintxError, UsageError
from .files import write_file

# The network that comparisons are made with, unless another is asked for.
DEFAULT_PRESET = "mnist-small"
GRID_IMAGES = 25
# Of validation, unless a file or a flag says otherwise.
_EVALUATED_IMAGES = 2_000
# What a comparison decides itself: as long as --images, validated at its end, with one grid of samples.
_DECIDED = (*LENGTHS, "evaluate_every", "sample_every")
# Training steps of one sample of its speed.
TIMED_STEPS = 3
# What may differ between a run and the plan it belongs to: where it is computed and where its data lies.
_FREE = {("train", "device"), ("data", "data_dir")}


@dataclass(frozen=True)
class Entry:
    """One mechanism of a comparison: its run, and the files beside it."""

    variant: Variant
    config: RunConfig
    folder: RunFolder

    @property
    def training_file(self) -> Path:
        """The seconds of training steps that were timed, and of what."""
        return self.folder.path / "training.json"

    @property
    def sampling_file(self) -> Path:
        """The seconds of batches that were drawn, and of what."""
        return self.folder.path / "sampling.json"

    @property
    def step_images(self) -> int:
        """Images of one training step."""
        return self.config.train.batch * self.config.train.accumulation

    @property
    def grid_file(self) -> Path:
        """A grid of samples, beside the runs."""
        return self.folder.path.with_name(f"{self.variant.label}.png")

    @property
    def saved(self) -> Checkpoint | None:
        """What the run saved last; None before that."""
        return read_checkpoint(self.folder.last) if holds_checkpoint(self.folder.last) else None

    @property
    def finished(self) -> Checkpoint | None:
        """The checkpoint at the end of the run, validated; None while there is none."""
        saved = self.saved
        if saved is None or saved.info.training.validation_bits_per_dim is None:
            return None
        return saved if saved.info.training.step == self.config.train.steps else None


def choose_training(file: Path | None, given: Mapping[str, Any], say: Callable[[str], None]) -> TrainConfig:
    """The training settings of all: `given` on the command line over `file` over defaults.

    What a comparison decides itself is not among them; `say` is told where the file has it all the same, as that of a
    run has.
    """
    table = {} if file is None else read_tables(file).get("train", {})
    if ignored := [key for key in _DECIDED if table.pop(key, None) is not None]:
        say(f"'{file}': {', '.join(ignored)} of [train] do not count: comparisons go by --images, validated at the end")
    return parse_config(TrainConfig, {"evaluate_images": _EVALUATED_IMAGES, **table, **given, "steps": 1}, "train")


def plan_entries(
    variants: Sequence[Variant],
    runs: Path,
    images: int,
    file: Path | None,
    preset: str | None,
    data: dict[str, Any],
    train: dict[str, Any],
    load: Callable[[Settings], tuple[ImageSet, ImageSet]],
) -> tuple[list[Entry], ImageSet, ImageSet]:
    """The entries in `runs`, and the training and validation images, loaded once by `load`.

    All have the network and the training settings of `preset` (or what `file` names, or the default of comparisons),
    `file` and `train`, and the steps that `images` take.
    Validation is at the end. Raises `UsageError` where a run is there already that was told something else.
    """
    entries: list[Entry] = []
    loaded: tuple[ImageSet, ImageSet] | None = None
    for variant in variants:
        model = {"attention": variant.attention, "attention_options": variant.options}
        given = Given(preset, model, data, {**train, "steps": 1})
        settings = merge_settings(given, file, default_preset=DEFAULT_PRESET)
        loaded = loaded or load(settings)
        config = settings.build(loaded[0].shape, loaded[0].classes)
        steps = math.ceil(images / (config.train.batch * config.train.accumulation))
        lengths = {"steps": steps, "evaluate_every": steps, "sample_every": 0}
        config = config.model_copy(update={"train": config.train.model_copy(update=lengths)})
        entry = Entry(variant, config, RunFolder(runs / variant.label))
        _require_same(entry)
        entries.append(entry)
    if loaded is None:
        raise UsageError("there is nothing to compare; name mechanisms with --attention")
    return entries, *loaded


def _require_same(entry: Entry) -> None:
    if not entry.folder.config_file.exists():
        return
    found, planned = (config.model_dump() for config in (entry.folder.read_config(), entry.config))
    for table in ("model", "data", "train"):
        for key, value in planned[table].items():
            if (table, key) not in _FREE and found[table][key] != value:
                raise UsageError(
                    f"'{entry.folder.path}' was begun with {table}.{key} = {found[table][key]}, now it would be "
                    f"{value}; give the same options, or another folder with --runs"
                )


def train_entry(
    entry: Entry,
    train: ImageSet,
    validation: ImageSet,
    device: str,
    precision: str,
    reporter: Reporter,
    stop: StopRequest,
) -> None:
    """Begin or go on with the run of `entry`, to its end. Raises `Interrupted` after saving, when `stop` is set."""
    trainer = Trainer(entry.config, entry.folder, (train, validation), device, precision)
    begun = entry.folder.config_file.exists()
    if not begun:
        entry.folder.create(entry.config)
    with entry.folder.lock():
        if begun:
            trainer.resume()
        trainer.run(reporter, stop)


def draw_grid(entry: Entry, device: str, check: Check = None) -> bool:
    """Write the grid of samples of a finished run, where there is none of these weights yet; whether it was written.

    `check` is called before every step, and may raise to give up.
    """
    checkpoint = _finished(entry)
    try:
        if read_png_metadata(entry.grid_file)["checkpoint_sha256"] == checkpoint.digest:
            return False
    except (DataError, KeyError):
        pass  # none yet, or another picture of that name
    images = Sampler(load_weights(checkpoint, device)).sample_images(GRID_IMAGES, before_step=check)
    about = {"attention": entry.variant.label, "checkpoint_sha256": checkpoint.digest, "seed": 0}
    write_file(entry.grid_file, encode_png(render_grid(images), about))
    return True


@dataclass(frozen=True)
class Speed:
    """What a kept time is of: another batch, precision, engine or machine is another measurement.

    `weights_sha256` is of those drawn with; None in training, whose time does not depend on them. `kernels`
    says whether compiled ones were to be had.
    """

    batch: int
    device: str
    precision: str
    processor: str
    threads: int
    torch: str
    kernels: bool
    steps: int | None = None
    weights_sha256: str | None = None


def training_speed(entry: Entry, device: str, precision: str) -> Speed:
    """What `time_training_once` measures."""
    return Speed(entry.step_images, device, precision, *_describe_machine(), steps=TIMED_STEPS)


def sampling_speed(checkpoint: Checkpoint, batch: int, device: str) -> Speed:
    """What `time_sampling_once` measures."""
    return Speed(batch, device, "fp32", *_describe_machine(), weights_sha256=checkpoint.digest)


def _describe_machine() -> tuple[str, int, str, bool]:
    return processor_name(), torch.get_num_threads(), str(torch.__version__), has_library(SOURCE)


def time_training_once(
    entry: Entry, train: ImageSet, validation: ImageSet, repeats: int, device: str, precision: str
) -> bool:
    """Take a few whole training steps and keep the seconds, unless `repeats` were kept before; whether there was need.

    They are the steps that the run took, after one to warm up, with weights that are thrown away. One call for each
    entry in turn, again and again, interleaves the repeats. Raises `DisagreementError` before the first where the two
    executions disagree.
    """
    checkpoint, speed = _finished(entry), training_speed(entry, device, precision)
    samples = read_samples(entry.training_file, speed)
    if len(samples) >= repeats:
        return False
    if not samples:
        require_agreement(load_weights(checkpoint, device))
    trainer = Trainer(entry.config, entry.folder, (train, validation), device, precision)

    def work() -> None:
        for _ in range(TIMED_STEPS):
            trainer.take_step()

    (timing,) = measure_interleaved([work], [trainer.take_step], 1, device)
    _keep_samples(entry.training_file, speed, [*samples, *timing.samples])
    return True


def time_sampling_once(entry: Entry, batch: int, repeats: int, device: str, check: Check = None) -> bool:
    """As `time_training_once`, of drawing a batch of images; `check` as in `draw_grid`."""
    checkpoint = _finished(entry)
    speed = sampling_speed(checkpoint, batch, device)
    samples = read_samples(entry.sampling_file, speed)
    if len(samples) >= repeats:
        return False
    model = load_weights(checkpoint, device)
    if not samples:
        require_agreement(model)
    case = build_step_case(model, batch, check)
    (timing,) = measure_interleaved([functools.partial(case.work, case.steps)], [case.warm_up], 1, device)
    _keep_samples(entry.sampling_file, speed, [*samples, *timing.samples])
    return True


def read_samples(file: Path, speed: Speed) -> list[float]:
    """The seconds kept in `file`; none where they are of something else."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        same = Speed(**{key: record.get(key) for key in vars(speed)}) == speed
        return [float(seconds) for seconds in record["samples_seconds"]] if same else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _keep_samples(file: Path, speed: Speed, samples: Sequence[float]) -> None:
    write_file(file, (to_json({**vars(speed), "samples_seconds": samples}) + "\n").encode())


def forget_speeds(entry: Entry) -> None:
    """Throw the kept times away, so that they are taken anew."""
    for file in (entry.training_file, entry.sampling_file):
        file.unlink(missing_ok=True)


def describe_entry(entry: Entry, batch: int, device: str, precision: str, failure: str | None = None) -> dict[str, Any]:
    """One row: what is known of the entry, None for what is not, and under `missing` what that is."""
    saved, finished = entry.saved, entry.finished
    row: dict[str, Any] = {
        "name": entry.variant.label,
        "attention": entry.variant.attention,
        "attention_options": entry.config.model.attention_options,
        "run": entry.folder.path,
        "steps": 0 if saved is None else saved.info.training.step,
        "images": 0 if saved is None else saved.info.training.images_seen,
        "bits_per_dim": None,
        "standard_error": None,
        "validation_images": None,
        "parameters": None,
        "state_bytes_per_image": None,
        "device": device,
        "training_batch": entry.step_images,
        "training_precision": precision,
        **_describe_speed("training_", [], 0),
        "batch": batch,
        **_describe_speed("", [], 0),
        "grid": entry.grid_file if entry.grid_file.exists() else None,
        "missing": None,
    }
    if finished is None:
        place = "not begun" if saved is None else f"step {saved.info.training.step:,} of {entry.config.train.steps:,}"
        return {**row, "missing": f"{place}: {failure}" if failure else place}
    training = finished.info.training
    model = load_weights(finished)
    trained = read_samples(entry.training_file, training_speed(entry, device, precision))
    drawn = read_samples(entry.sampling_file, sampling_speed(finished, batch, device))
    untimed = " and ".join(name for name, samples in (("training", trained), ("sampling", drawn)) if not samples)
    return row | {
        "bits_per_dim": training.validation_bits_per_dim,
        "standard_error": training.validation_standard_error,
        "validation_images": training.validation_images,
        "parameters": model.parameter_count(),
        "state_bytes_per_image": model.state_bytes(1),
        **_describe_speed("training_", trained, TIMED_STEPS * entry.step_images),
        **_describe_speed("", drawn, batch),
        "missing": failure or (f"{untimed} not timed" if untimed else None),
    }


def _describe_speed(prefix: str, samples: Sequence[float], images: int) -> dict[str, Any]:
    """Images per second where each of `samples` is the seconds of so many images."""
    rates: tuple[float | None, list[float] | None] = (None, None)
    if samples:
        timing = Timing(tuple(samples))
        rates = images / timing.median, [images / seconds for seconds in reversed(timing.quartiles)]
    return {
        f"{prefix}images_per_second": rates[0],
        f"{prefix}images_per_second_quartiles": rates[1],
        f"{prefix}samples_seconds": list(samples),
    }


def _finished(entry: Entry) -> Checkpoint:
    checkpoint = entry.finished
    if checkpoint is None:
        raise LintxError(f"the run '{entry.folder.path}' is not finished")
    return checkpoint
