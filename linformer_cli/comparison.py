"""One run for every mechanism, on the same images at the same size, and one row of figures for each.

Above training and bench, since it needs both. Everything is kept in files: whatever was finished is not done again.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linformer_cli.bench.cases import build_step_case
from linformer_cli.bench.groups import require_agreement
from linformer_cli.bench.timing import Timing
from linformer_cli.bench.variants import Variant
from linformer_cli.checkpoint import Checkpoint, load_weights, read_checkpoint
from linformer_cli.config import RunConfig
from linformer_cli.data.images import ImageSet
from linformer_cli.errors import DataError, LintxError, UsageError
from linformer_cli.report.grids import encode_png, read_png_metadata, render_grid, write_file
from linformer_cli.report.metrics import read_metrics
from linformer_cli.report.tables import to_json
from linformer_cli.runtime import StopRequest, synchronize
from linformer_cli.sampling.decode import sample_images
from linformer_cli.training.loop import Trainer
from linformer_cli.training.progress import Reporter
from linformer_cli.training.run_folder import RunFolder
from linformer_cli.training.settings import Settings, merge_settings

GRID_IMAGES = 25
# What may differ between a run and the plan it belongs to: where it is computed and where its data lies.
_FREE = {("train", "device"), ("data", "data_dir")}


@dataclass(frozen=True)
class Entry:
    """One mechanism of a comparison: its run, and the files beside it."""

    variant: Variant
    config: RunConfig
    folder: RunFolder

    @property
    def sampling_file(self) -> Path:
        return self.folder.path / "sampling.json"

    @property
    def grid_file(self) -> Path:
        """A grid of samples, beside the runs."""
        return self.folder.path.with_name(f"{self.variant.label}.png")

    @property
    def saved(self) -> Checkpoint | None:
        """What the run saved last; None before that."""
        saved = (self.folder.last, self.folder.last.with_name(f".{self.folder.last.name}.replaced"))
        return read_checkpoint(self.folder.last) if any(path.exists() for path in saved) else None

    @property
    def finished(self) -> Checkpoint | None:
        """The checkpoint at the end of the run, validated; None while there is none."""
        saved = self.saved
        if saved is None or saved.info.training.validation_bits_per_dim is None:
            return None
        return saved if saved.info.training.step == self.config.train.steps else None


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

    All have the network and the training settings of `preset`, `file` and `train`, and the steps that `images` take.
    Validation is at the end. Raises `UsageError` where a run is there already that was told something else.
    """
    entries: list[Entry] = []
    loaded: tuple[ImageSet, ImageSet] | None = None
    for variant in variants:
        model = {"attention": variant.attention, "attention_options": variant.options}
        settings = merge_settings(file, preset, model, data, {**train, "steps": 1})
        loaded = loaded or load(settings)
        config = settings.build(loaded[0].shape)
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
    trainer = Trainer(entry.config, entry.folder, train, validation, device, precision)
    if not entry.folder.config_file.exists():
        entry.folder.create(entry.config)
    with entry.folder.lock():
        if entry.saved is not None:
            trainer.resume()
        trainer.run(reporter, stop)


def draw_grid(entry: Entry, device: str) -> bool:
    """Write the grid of samples of a finished run, where there is none of these weights yet; whether it was written."""
    checkpoint = _finished(entry)
    try:
        if read_png_metadata(entry.grid_file)["checkpoint_sha256"] == checkpoint.digest:
            return False
    except (DataError, KeyError):
        pass  # none yet, or another picture of that name
    images = sample_images(load_weights(checkpoint, device), GRID_IMAGES, seed=0)
    about = {"attention": entry.variant.label, "checkpoint_sha256": checkpoint.digest, "seed": 0}
    write_file(entry.grid_file, encode_png(render_grid(images), about))
    return True


def time_sampling_once(entry: Entry, batch: int, repeats: int, device: str) -> bool:
    """Draw a batch of images and keep the seconds, unless `repeats` were kept before; whether there was need.

    One call for each entry in turn, again and again, interleaves the repeats. Raises `DisagreementError` before the
    first where the two executions disagree.
    """
    checkpoint = _finished(entry)
    samples = read_sampling(entry, checkpoint, batch, device)
    if len(samples) >= repeats:
        return False
    model = load_weights(checkpoint, device)
    if not samples:
        require_agreement(model)
    case = build_step_case(model, batch)
    case.warm_up()
    synchronize(device)
    began = time.perf_counter()
    case.work(case.steps)
    synchronize(device)
    samples.append(time.perf_counter() - began)
    record = {"weights_sha256": checkpoint.digest, "batch": batch, "device": device, "samples_seconds": samples}
    write_file(entry.sampling_file, (to_json(record) + "\n").encode())
    return True


def read_sampling(entry: Entry, checkpoint: Checkpoint, batch: int, device: str) -> list[float]:
    """The seconds kept of drawing a batch with these weights on this device; none where they are of something else."""
    try:
        record = json.loads(entry.sampling_file.read_text(encoding="utf-8"))
        same = (record["weights_sha256"], record["batch"], record["device"]) == (checkpoint.digest, batch, device)
        return [float(seconds) for seconds in record["samples_seconds"]] if same else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def describe_entry(entry: Entry, batch: int, device: str, failure: str | None = None) -> dict[str, Any]:
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
        "training_images_per_second": _median_training_speed(entry),
        "batch": batch,
        "device": device,
        "images_per_second": None,
        "images_per_second_quartiles": None,
        "samples_seconds": [],
        "grid": entry.grid_file if entry.grid_file.exists() else None,
        "missing": None,
    }
    if finished is None:
        place = "not begun" if saved is None else f"step {saved.info.training.step:,} of {entry.config.train.steps:,}"
        return {**row, "missing": f"{place}: {failure}" if failure else place}
    training = finished.info.training
    model = load_weights(finished)
    row |= {
        "bits_per_dim": training.validation_bits_per_dim,
        "standard_error": training.validation_standard_error,
        "validation_images": training.validation_images,
        "parameters": model.parameter_count(),
        "state_bytes_per_image": model.state_bytes(1),
    }
    samples = read_sampling(entry, finished, batch, device)
    if not samples:
        return {**row, "missing": failure or "sampling was not timed"}
    timing = Timing(tuple(samples))
    first, third = (batch / seconds for seconds in reversed(timing.quartiles))
    return {
        **row,
        "images_per_second": batch / timing.median,
        "images_per_second_quartiles": [first, third],
        "samples_seconds": samples,
        "missing": failure,
    }


def _finished(entry: Entry) -> Checkpoint:
    checkpoint = entry.finished
    if checkpoint is None:
        raise LintxError(f"the run '{entry.folder.path}' is not finished")
    return checkpoint


def _median_training_speed(entry: Entry) -> float | None:
    """The median over the run's log, which knows nothing of validation and saving."""
    try:
        rows = read_metrics(entry.folder.metrics_file)
        speeds = [float(row["images_per_second"]) for row in rows if row["images_per_second"]]
    except (LintxError, ValueError, KeyError):
        return None
    return statistics.median(speeds) if speeds else None
