"""The runs of a comparison, all under the same conditions. Finished work, which files keep, is not repeated."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from linformer_cli.attention.base import Attention
from linformer_cli.checkpoint import Checkpoint, load_weights, read_checkpoint
from linformer_cli.checkpoint_files import holds_checkpoint
from linformer_cli.config import LARGEST_STEP, LENGTHS, ModelConfig, RunConfig, TrainConfig
from linformer_cli.data.images import ImageSet
from linformer_cli.data.sequence import paint
from linformer_cli.documents import parse_config
from linformer_cli.errors import DataError, LintxError, UsageError
from linformer_cli.evaluation.agreement import require_agreement
from linformer_cli.files import write_file
from linformer_cli.model.lstm import LstmBlock
from linformer_cli.model.mixers import Variant, find_mixer
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.report.grids import encode_png, read_png_metadata, render_grid
from linformer_cli.report.terminal import render_windows
from linformer_cli.sampling.decode import Sampler
from linformer_cli.system.signals import Check, StopRequest, never_stop
from linformer_cli.training.loop import Trainer
from linformer_cli.training.pixel_task import PixelTask
from linformer_cli.training.progress import Reporter
from linformer_cli.training.run_folder import RunFolder
from linformer_cli.training.settings import Given, Settings, merge_settings, read_tables
from linformer_cli.training.task import measure_progress
from linformer_cli.units import WINDOWS

DEFAULT_PRESET = "mnist-small"
GRID_IMAGES, TEXTS = 25, 4
_DIGEST = "checkpoint_sha256"
# The default number of validation images.
_EVALUATED_IMAGES = 2_000
# Settings that a comparison decides: there is one validation, at the end, and samples are drawn after it.
_DECIDED = (*LENGTHS, "evaluate_every", "sample_every")
# The largest allowed difference from the target number of parameters, as a share of the target.
_TOLERANCE = 0.03
# Widths are multiples of this number, or of the model's width for the `boom` layer.
_UNIT = 8
# Settings in which an existing run may differ from the plan.
_FREE = {("train", "device"), ("data", "data_dir")}


@dataclass(frozen=True)
class Conditions:
    """The conditions of the runs. Sampling uses float32. A speed is the median of `repeats` repeats."""

    device: str
    precision: str
    batch: int
    repeats: int


@dataclass(frozen=True)
class Plan:
    """What all runs have in common: the folder, the length of training, and the sources of settings.

    Each run trains on `images` images, or else for `max_time` seconds. With `match`, models have equal sizes. Each
    mechanism has runs with `seeds` seeds, which begin with that of `train`.
    """

    runs: Path
    images: int | None
    max_time: float | None = None
    match: bool = False
    file: Path | None = None
    preset: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 1


@dataclass(frozen=True)
class Entry:
    """A run of the mechanism `name`, and its files. The label of `variant` adds the seed, except for the first seed."""

    variant: Variant
    config: RunConfig
    folder: RunFolder
    name: str

    @property
    def training_file(self) -> Path:
        return self.folder.path / "training.json"

    @property
    def sampling_file(self) -> Path:
        return self.folder.path / "sampling.json"

    @property
    def bits_file(self) -> Path:
        return self.folder.path / "validation.json"

    @property
    def is_timed(self) -> bool:
        """Whether speeds are measured: for the first seed."""
        return self.variant.label == self.name

    @property
    def step_images(self) -> int:
        return self.config.train.batch * self.config.train.accumulation

    @property
    def samples_file(self) -> Path:
        """The picture or the text with samples, next to the run folders."""
        ending = "txt" if self.config.data.words is WINDOWS else "png"
        return self.folder.path.with_name(f"{self.variant.label}.{ending}")

    @property
    def saved(self) -> Checkpoint | None:
        return read_checkpoint(self.folder.last) if holds_checkpoint(self.folder.last) else None

    @property
    def finished(self) -> Checkpoint | None:
        """The validated checkpoint at the end of the run, or None."""
        saved = self.saved
        if saved is None or saved.info.training.validation_bits_per_dim is None:
            return None
        done, images = saved.info.training, saved.info.data.train_images
        share = measure_progress(self.config.train, done.step, done.elapsed_seconds, images)
        return saved if share >= 1 else None

    def require_finished(self) -> Checkpoint:
        checkpoint = self.finished
        if checkpoint is None:
            raise LintxError(f"the run '{self.folder.path}' is not finished")
        return checkpoint


def choose_training(file: Path | None, given: Mapping[str, Any], say: Callable[[str], None]) -> TrainConfig:
    """Return the training settings of all runs. The command line (`given`) overrides `file`, which overrides defaults.

    Settings that a comparison decides are ignored in `file`, and `say` gets a warning.
    """
    tables = {} if file is None else read_tables(file)
    if ignored := [key for key in ("init_from", "distill_from") if tables.get(key)]:
        say(f"'{file}': ignored {', '.join(ignored)}; a comparison starts from random weights, without teachers")
    table = tables.get("train", {})
    if ignored := [key for key in _DECIDED if table.pop(key, None) is not None]:
        keys = ", ".join(ignored)
        say(f"'{file}': ignored {keys} of [train]; a comparison sets them itself (see --images and --max-time)")
    return parse_config(TrainConfig, {"evaluate_images": _EVALUATED_IMAGES, **table, **given, "steps": 1}, "train")


def plan_entries(
    variants: Sequence[Variant], plan: Plan, load: Callable[[Settings], tuple[ImageSet, ImageSet]]
) -> tuple[list[Entry], tuple[ImageSet, ImageSet]]:
    """Return an entry for each seed and each of `variants`, and the training and validation images, loaded once.

    Apart from the mechanism, all runs have the same network and settings; with `plan.match`, the feed-forward widths
    differ. Raises `UsageError` if a run exists with other settings, and what `match_parameters` raises.
    """
    entries: list[Entry] = []
    loaded: tuple[ImageSet, ImageSet] | None = None
    wanted: int | None = None
    for place, variant in itertools.product(range(plan.seeds), variants):
        model = {"attention": variant.attention, "attention_options": variant.options}
        train = {**plan.train, "steps": 1}
        given = Given(plan.preset, model, plan.data, train)
        settings = merge_settings(given, plan.file, images_preset=DEFAULT_PRESET)
        loaded = loaded or load(settings)
        config = settings.build(loaded[0].shape, loaded[0].classes)
        if plan.match:
            wanted = wanted or count_parameters(config.model)
            config = config.model_copy(update={"model": match_parameters(config.model, wanted)})
        lengths = _choose_lengths(plan, config.train)
        seed = config.train.seed + place
        config = config.model_copy(update={"train": config.train.model_copy(update={**lengths, "seed": seed})})
        own = replace(variant, label=f"{variant.label}-seed{seed}") if place else variant
        entry = Entry(own, config, RunFolder(plan.runs / own.label), variant.label)
        _require_same(entry)
        entries.append(entry)
    if loaded is None:
        raise UsageError("there is nothing to compare; name mechanisms with --attention")
    return entries, loaded


def _choose_lengths(plan: Plan, train: TrainConfig) -> dict[str, Any]:
    """Return the length of a run, with one validation at its end and no samples."""
    steps = None if plan.images is None else math.ceil(plan.images / (train.batch * train.accumulation))
    length = {"steps": steps} if steps else {"steps": None, "max_time": plan.max_time}
    return {**length, "evaluate_every": steps or LARGEST_STEP, "sample_every": 0}


def _require_same(entry: Entry) -> None:
    if not entry.folder.config_file.exists():
        return
    found, planned = (config.model_dump() for config in (entry.folder.read_config(), entry.config))
    for table in ("model", "data", "train"):
        for key, value in planned[table].items():
            if (table, key) not in _FREE and found[table][key] != value:
                raise UsageError(
                    f"'{entry.folder.path}' was begun with {table}.{key} = {found[table][key]}, not {value}; give the "
                    "same options, or another folder with --runs"
                )


def train_entry(
    entry: Entry, images: tuple[ImageSet, ImageSet], conditions: Conditions, reporter: Reporter, stop: StopRequest
) -> None:
    """Begin or resume the run of `entry` and finish it. If `stop` is set, save and raise `Interrupted`."""
    trainer = Trainer(PixelTask(entry.config, images, conditions.device, conditions.precision), entry.folder)
    begun = entry.folder.config_file.exists()
    if not begun:
        entry.folder.create(entry.config)
    with entry.folder.lock():
        if begun:
            trainer.resume()
        trainer.run(reporter, stop)


def draw_samples(entry: Entry, device: str, check: Check = never_stop) -> bool:
    """Write samples of a finished run, unless its weights have some already. Return whether they were written.

    They are a grid of images, or a few windows of text. `check` is called before every step and may raise to stop.
    Raises `DisagreementError` if the model's parallel and step forms disagree at any position of an image.
    """
    checkpoint = entry.require_finished()
    if _read_digest(entry) == checkpoint.digest:
        return False
    model, text = load_weights(checkpoint, device), entry.config.data.words is WINDOWS
    require_agreement(model, images=1, positions=None)
    images = Sampler(model).sample_images(TEXTS if text else GRID_IMAGES, before_step=check)
    if text:
        heading = f"{_DIGEST} {checkpoint.digest}\n"
        samples = (heading + render_windows([window.tobytes() for window in images])).encode()
    else:
        about = {"attention": entry.variant.label, _DIGEST: checkpoint.digest, "seed": 0}
        samples = encode_png(render_grid(paint(images, entry.config.model.image)), about)
    write_file(entry.samples_file, samples)
    return True


def _read_digest(entry: Entry) -> object:
    """Return the digest of the weights that drew the samples of `entry`, or None if there are none."""
    try:
        if entry.config.data.words is WINDOWS:
            return entry.samples_file.read_text(errors="replace").partition("\n")[0].removeprefix(f"{_DIGEST} ")
        return (read_png_metadata(entry.samples_file) or {}).get(_DIGEST)
    except (OSError, DataError):
        return None


def match_parameters(config: ModelConfig, wanted: int) -> ModelConfig:
    """Return `config` with the feed-forward width for which the model has about `wanted` parameters.

    A gated block has no feed-forward network, so the width of its values changes instead. An LSTM chooses its own.
    Raises `UsageError` if the closest model differs by more than `_TOLERANCE`.
    """
    mixer = find_mixer(config.attention)

    def change(width: int) -> ModelConfig:
        if issubclass(mixer, Attention) and mixer.gated:
            options = {**config.attention_options, "value_width": width}
            return config.model_copy(update={"attention_options": options})
        return config.model_copy(update={"feed_forward": width})

    if mixer is not LstmBlock:
        unit = config.width if config.feed_forward_kind == "boom" else _UNIT
        # The number of parameters is a linear function of the width.
        first, second = (count_parameters(change(width)) for width in (unit, 2 * unit))
        config = change(max(1, round((wanted - first) / (second - first)) + 1) * unit)
    found = count_parameters(config)
    if abs(found - wanted) > _TOLERANCE * wanted:
        raise UsageError(
            f"'{config.attention}' cannot have {wanted:,} parameters in this network; the closest is {found:,}"
        )
    return config


def count_parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return PixelModel(config).parameter_count()
