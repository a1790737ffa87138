"""Bits/dim of trained runs, shown next to the speed of the same model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linformer_cli.checkpoint import read_checkpoint
from linformer_cli.checkpoint_folders import holds_checkpoint
from linformer_cli.config import ModelConfig
from linformer_cli.errors import CheckpointError
from linformer_cli.model.mixers import parse_options

from .rows import Quality


@dataclass(frozen=True)
class TrainedRun:
    """The model of a run, and the quality columns of its rows, whose bits/dim are never None."""

    path: Path
    model: ModelConfig
    quality: Quality

    @property
    def folder(self) -> Path:
        """Return the run's folder: `path`, or its parent if `path` is a checkpoint in a run."""
        return self.path.parent if self.path.name in ("best", "last") else self.path


def read_trained_runs(folders: Sequence[str]) -> list[TrainedRun]:
    """Read the results in each folder. A folder is a run, a checkpoint, or a folder of runs.

    In a folder of runs, runs without a validation are skipped. Raises `CheckpointError` if a folder has no validated
    checkpoint.
    """
    runs = []
    for folder in folders:
        inside = [str(path) for path in _list_runs(Path(folder))]
        validated = [run for run in map(_read, inside or [folder]) if run is not None]
        if not validated:
            raise CheckpointError(
                f"'{folder}' has no bits/dim: its weights were never validated; train it further, or leave it out"
            )
        runs += validated
    return runs


def find_trained(runs: Sequence[TrainedRun], model: ModelConfig) -> TrainedRun | None:
    """Return the run with the lowest bits/dim for this model. Everything except dropout must be equal."""
    wanted = _without_dropout(model)
    same = [run for run in runs if _without_dropout(run.model) == wanted]
    return min(same, key=lambda run: run.quality.bits_per_dim or math.inf, default=None)


def _list_runs(folder: Path) -> list[Path]:
    """List the runs with a checkpoint in `folder`. The list is empty if `folder` is a run or a checkpoint itself."""
    if not folder.is_dir() or _is_run(folder):
        return []
    return [path for path in sorted(folder.iterdir()) if _is_run(path)]


def _is_run(folder: Path) -> bool:
    """Whether `folder` is a checkpoint or contains the best or last checkpoint of a run."""
    return any(holds_checkpoint(path) for path in (folder, folder / "best", folder / "last"))


def _read(folder: str) -> TrainedRun | None:
    """Read a run. Return None if its weights were never validated."""
    checkpoint = read_checkpoint(folder)
    training = checkpoint.info.training
    if training.validation_bits_per_dim is None:
        return None
    quality = Quality(
        run=checkpoint.path,
        data=checkpoint.info.data.name,
        classes=checkpoint.info.model.required_classes,
        images_seen=training.images_seen,
        bits_per_dim=training.validation_bits_per_dim,
        bits_per_dim_standard_error=training.validation_standard_error,
        validation_images=training.validation_images,
    )
    return TrainedRun(checkpoint.path, checkpoint.info.model, quality)


def _without_dropout(model: ModelConfig) -> ModelConfig:
    """Return `model` without dropout and with all options of its mechanism written out."""
    options = parse_options(model.attention, model.attention_options).model_dump(exclude_none=True)
    return model.model_copy(update={"attention_options": options, "dropout": 0.0})
