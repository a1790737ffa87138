"""The models that a benchmark times: one that was trained, or untrained ones of a preset's size."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from linformer_cli.checkpoint import load_weights, read_checkpoint
from linformer_cli.config import ImageShape, ModelConfig, parse_config
from linformer_cli.metrics import label_runs
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.presets import find_preset, find_preset_image
from linformer_cli.system.device import torch_dtype

from .trained import UNTRAINED, TrainedRun, find_trained
from .variants import Variant


@dataclass(frozen=True)
class Subject:
    """A model to be timed, under a name; `preset` is its network's, where it was made from one.

    `run` is the one that it is the model of; the bits/dim of other models are those of any run of the same model.
    """

    name: str
    model: PixelModel
    preset: str | None = None
    trained: bool = True
    run: TrainedRun | None = None

    def find_run(self, runs: Sequence[TrainedRun]) -> dict[str, Any]:
        """What its own run reached, or else the best of `runs` that has exactly its model, as a record."""
        found = self.run or find_trained(runs, self.model.config)
        return UNTRAINED if found is None else found.record


def build_softmax_twin(model: PixelModel) -> PixelModel:
    """Softmax of the same size with random weights: time does not depend on their values."""
    config = model.config.model_copy(update={"attention": "softmax", "attention_options": {}})
    return PixelModel(config).to(device=model.device, dtype=model.dtype).eval()


def with_softmax(name: str, model: PixelModel) -> list[Subject]:
    """A model, and softmax of the same size beside it where it is not softmax itself."""
    subjects = [Subject(name, model)]
    if model.config.attention != "softmax":
        subjects.append(Subject("softmax", build_softmax_twin(model), trained=False))
    return subjects


def build_subjects(
    variants: Sequence[Variant], networks: Sequence[tuple[str | None, ModelConfig]], device: str, precision: str
) -> list[Subject]:
    """An untrained model of every network, by the name of its preset, with every mechanism in it."""
    subjects = []
    for preset, network in networks:
        for variant in variants:
            config = network.model_copy(update={"attention": variant.attention, "attention_options": variant.options})
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = PixelModel(config)
            model = model.to(device=device, dtype=torch_dtype(precision)).eval()
            subjects.append(Subject(variant.label, model, preset, trained=False))
    return subjects


def load_subjects(runs: Sequence[TrainedRun], device: str, precision: str) -> list[Subject]:
    """The models of `runs`, by the names of their folders."""
    labels = label_runs([run.folder for run in runs])
    return [
        Subject(label, load_weights(read_checkpoint(run.path), device, torch_dtype(precision)), run=run)
        for label, run in zip(labels, runs, strict=True)
    ]


def preset_network(name: str) -> tuple[str, ModelConfig]:
    """The network called `name` for the images that it is made for."""
    return name, ModelConfig(**find_preset(name).model_dump(), image=find_preset_image(name))


def resize_network(name: str, network: ModelConfig, side: int) -> tuple[str, ModelConfig]:
    """`network` for images of `side` x `side` pixels, and its name; raises `UsageError` for too many pixels."""
    sizes = {**network.image.model_dump(), "height": side, "width": side}
    image = parse_config(ImageShape, sizes, f"--image-size {side}")
    return f"{name}, {side} x {side}", network.model_copy(update={"image": image})
