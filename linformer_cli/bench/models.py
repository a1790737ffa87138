"""The models that a benchmark times: trained runs with their bits/dim, or untrained models of a preset's size."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linformer_cli.checkpoint import load_weights, read_checkpoint
from linformer_cli.checkpoint_files import holds_checkpoint
from linformer_cli.config import ImageShape, ModelConfig
from linformer_cli.documents import parse_config
from linformer_cli.errors import CheckpointError
from linformer_cli.evaluation.agreement import require_agreement
from linformer_cli.metrics import label_runs
from linformer_cli.model.mixers import SOFTMAX, Variant, parse_options
from linformer_cli.model.pixel_model import PixelModel, build_softmax_twin
from linformer_cli.presets import find_preset, find_preset_image
from linformer_cli.system.device import seeded, torch_dtype
from .rows import Quality

CHECKED_LAYERS = 2  # of an untrained model, this many layers are checked

# A pair (name of the preset or None, network).
Network = tuple[str | None, ModelConfig]


@dataclass(frozen=True)
class TrainedRun:
    """The model of a run, and the quality columns of its rows, whose bits/dim are never None."""

    path: Path
    model: ModelConfig
    quality: Quality

    @property
    def folder(self) -> Path:
        return self.path.parent if self.path.name in ("best", "last") else self.path


def read_trained_runs(folders: Sequence[str]) -> list[TrainedRun]:
    """Read runs, checkpoints, or folders of runs. Raises `CheckpointError` for one that was never validated."""
    runs = []
    for folder in folders:
        path = Path(folder)
        inside = [] if _is_run(path) else [str(each) for each in sorted(path.glob("*")) if _is_run(each)]
        found = [read_checkpoint(run) for run in inside or [folder]]
        validated = [one for one in found if one.info.training.validation_bits_per_dim is not None]
        if not validated:
            hint = "train it further, or leave it out"
            raise CheckpointError(f"'{folder}' has no bits/dim: its weights were never validated; {hint}")
        for one in validated:
            training = one.info.training
            quality = Quality(
                run=one.path,
                data=one.info.data.name,
                classes=one.info.model.required_classes,
                images_seen=training.images_seen,
                bits_per_dim=training.validation_bits_per_dim,
                bits_per_dim_standard_error=training.validation_standard_error,
                validation_images=training.validation_images,
            )
            runs.append(TrainedRun(one.path, one.info.model, quality))
    return runs


def find_trained(runs: Sequence[TrainedRun], model: ModelConfig) -> TrainedRun | None:
    """Return the run with the lowest bits/dim for this model. Everything except dropout must be equal."""
    wanted = _without_dropout(model)
    same = [run for run in runs if _without_dropout(run.model) == wanted]
    return min(same, key=lambda run: run.quality.bits_per_dim or math.inf, default=None)


def _is_run(folder: Path) -> bool:
    return any(holds_checkpoint(path) for path in (folder, folder / "best", folder / "last"))


def _without_dropout(model: ModelConfig) -> ModelConfig:
    """`model` without dropout and with all options of its mechanism written out."""
    options = parse_options(model.attention, model.attention_options).model_dump(exclude_none=True)
    return model.model_copy(update={"attention_options": options, "dropout": 0.0})


@dataclass(frozen=True)
class BenchModel:
    """A model to time, its name in tables, its network's `preset`, and the trained `run` that it is from, if any."""

    name: str
    model: PixelModel
    preset: str | None = None
    trained: bool = True
    run: TrainedRun | None = None

    def find_quality(self, runs: Sequence[TrainedRun]) -> Quality:
        """Return the bits/dim of the model's own run, or of the best of `runs` with exactly this model."""
        found = self.run or find_trained(runs, self.model.config)
        return Quality() if found is None else found.quality

    def describe(self, runs: Sequence[TrainedRun]) -> dict[str, Any]:
        config = self.model.config
        return {
            "name": self.name,
            "preset": self.preset,
            "item": config.image.words.item,
            "attention": config.attention,
            "attention_options": config.attention_options,
            "device": str(self.model.device),
            "positions": config.image.positions,
            **vars(self.find_quality(runs)),
        }

    @property
    def precision(self) -> str:
        return "bf16" if self.model.dtype == torch_dtype("bf16") else "fp32"

    @property
    def network(self) -> ModelConfig:
        """The sizes of the model. Models with equal ones are compared."""
        return self.model.config.model_copy(update={"attention": SOFTMAX, "attention_options": {}, "dropout": 0.0})

    def require_agreement(self) -> None:
        """Raise `DisagreementError` if the forms disagree, in the first layers of an untrained model."""
        model = self.model
        if not self.trained and model.config.layers > CHECKED_LAYERS:
            with seeded(0):
                model = PixelModel(model.config.model_copy(update={"layers": CHECKED_LAYERS})).eval()
        require_agreement(model)


def group_models(models: Sequence[BenchModel], batches: Sequence[int]) -> list[tuple[list[BenchModel], int]]:
    """Return the models of each preset with each batch size. Their rounds are interleaved."""
    presets = dict.fromkeys(timed.preset for timed in models)
    groups = [[timed for timed in models if timed.preset == preset] for preset in presets]
    return list(itertools.product(groups, batches))


def with_softmax(name: str, model: PixelModel) -> list[BenchModel]:
    """Return a trained model and a softmax model of the same size. A trained softmax model is returned alone."""
    models = [BenchModel(name, model)]
    if model.config.attention != SOFTMAX:
        models.append(BenchModel(SOFTMAX, build_softmax_twin(model), trained=False))
    return models


def build_models(
    variants: Sequence[Variant], networks: Sequence[Network], device: str, precision: str
) -> list[BenchModel]:
    models = []
    for preset, network in networks:
        for variant in variants:
            config = network.model_copy(update={"attention": variant.attention, "attention_options": variant.options})
            with seeded(0):
                model = PixelModel(config)
            model = model.to(device=device, dtype=torch_dtype(precision)).eval()
            models.append(BenchModel(variant.label, model, preset, trained=False))
    return models


def load_models(runs: Sequence[TrainedRun], device: str, precision: str) -> list[BenchModel]:
    labels = label_runs([run.folder for run in runs])
    models = (load_weights(read_checkpoint(run.path), device, torch_dtype(precision)) for run in runs)
    return [BenchModel(label, one, run=run) for label, one, run in zip(labels, models, runs, strict=True)]


def preset_network(name: str) -> tuple[str, ModelConfig]:
    return name, ModelConfig(**find_preset(name).model_dump(), image=find_preset_image(name))


def resize_network(name: str, network: ModelConfig, side: int) -> tuple[str, ModelConfig]:
    """`network` for `side` x `side` pixels, and its name. Raises `UsageError` for too many pixels."""
    sizes = {**network.image.model_dump(), "height": side, "width": side}
    image = parse_config(ImageShape, sizes, f"--image-size {side}")
    return f"{name}, {side} x {side}", network.model_copy(update={"image": image})
