"""The contents of a save besides the weights: a description of the model, and the state that --resume needs."""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from linformer_cli.checkpoint import TrainingState
from linformer_cli.checkpoint_files import CheckpointInfo, DataSummary, TrainingSummary
from linformer_cli.config import RunConfig
from linformer_cli.data.images import ImageSet
from linformer_cli.model.pixel_model import PixelModel

from .optimizer import optimizer_tensors
from .progress import Progress

# Used if weights are averaged: the key of the number of averaged steps, and the prefix of the weights in training.
AVERAGED, IN_TRAINING = "averaged_steps", "training."


def describe_run(config: RunConfig, progress: Progress, train: ImageSet, validation: ImageSet) -> CheckpointInfo:
    """Describe the network, its images and its training. bits/dim are included only if the weights were validated."""
    measured = progress.is_validated
    return CheckpointInfo(
        model=config.model,
        data=DataSummary(
            name=train.name,
            train_images=len(train),
            border_mean=round(train.border_mean(), 2),
            frame=train.frame,
        ),
        training=TrainingSummary(
            step=progress.step,
            images_seen=progress.images_seen,
            elapsed_seconds=round(progress.elapsed_seconds, 3),
            validation_bits_per_dim=progress.validation_bits_per_dim if measured else None,
            validation_standard_error=progress.validation_standard_error if measured else None,
            validation_images=min(config.train.evaluate_images, len(validation)) if measured else None,
            preset=config.preset,
            init_from=config.init_from,
            distill_from=config.distill_from,
            settings=config.train,
        ),
    )


def collect_state(
    model: PixelModel, average: AveragedModel | None, optimizer: Optimizer, progress: Progress, device: str
) -> TrainingState:
    """Collect everything that the next step needs besides the saved weights.

    With `average`, the averaged weights are saved as the model's, so the state includes the weights in training.
    """
    tensors = optimizer_tensors(optimizer) | _random_state(device)
    values = dataclasses.asdict(progress)
    if average is not None:
        tensors |= {f"{IN_TRAINING}{key}": tensor.cpu() for key, tensor in model.state_dict().items()}
        values[AVERAGED] = int(average.n_averaged)
    return TrainingState(tensors, values)


def _random_state(device: str) -> dict[str, Tensor]:
    tensors = {"random.cpu": torch.get_rng_state()}
    if device.startswith("cuda"):
        tensors["random.cuda"] = torch.cuda.get_rng_state(device)
    elif device == "mps":
        tensors["random.mps"] = torch.mps.get_rng_state()
    return tensors


def restore_random_state(tensors: Mapping[str, Tensor], device: str) -> None:
    """Restore the random states of the CPU and, if saved, of `device`. Raises `KeyError` if the CPU's is missing."""
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and device.startswith("cuda"):
        torch.cuda.set_rng_state(tensors["random.cuda"], device)
    if "random.mps" in tensors and device == "mps":
        torch.mps.set_rng_state(tensors["random.mps"])
