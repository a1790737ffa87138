"""The bits/dim of each validation image, kept in the folder of each run, and groups of mechanisms."""

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from linformer_cli.checkpoint import Checkpoint, load_weights
from linformer_cli.data.images import ImageSet
from linformer_cli.errors import LintxError
from linformer_cli.evaluation.bits import measure_mean, measure_nats
from linformer_cli.system.signals import Check, never_stop
from .entries import Entry
from .speed import Asked, keep_figures, read_figures


def measure_bits(entry: Entry, validation: ImageSet, device: str, check: Check = never_stop) -> None:
    """Keep the bits/dim of each validation image of a finished run, unless those of its weights are kept."""
    checkpoint = entry.require_finished()
    if not _read_bits(entry, checkpoint):
        model = load_weights(checkpoint, device)
        labels = validation.require_labels(classes) if (classes := model.config.required_classes) else None
        images = validation.images[: entry.config.train.evaluate_images]
        bits = measure_nats(model, images, before_batch=check, labels=labels).bits_per_image.tolist()
        keep_figures(entry.bits_file, _describe(checkpoint, len(bits)), bits, "bits_per_dim")


def _read_bits(entry: Entry, checkpoint: Checkpoint) -> list[float]:
    asked = _describe(checkpoint, checkpoint.info.training.validation_images)
    return read_figures(entry.bits_file, asked, "bits_per_dim")


def _describe(checkpoint: Checkpoint, images: int | None) -> Asked:
    """What was validated: the weights with this checksum, and the number of images."""
    return {"weights_sha256": checkpoint.digest, "images": images}


def read_runs(entries: Sequence[Entry]) -> dict[str, Tensor]:
    """The kept bits/dim [S, N] of N images and all S seeds, for each mechanism that has them."""
    found: dict[str, list[list[float]]] = {entry.name: [] for entry in entries}
    for entry in entries:
        with contextlib.suppress(LintxError):  # not finished, or damaged, which the row of the entry says
            found[entry.name] += filter(None, [_read_bits(entry, entry.require_finished())])
    seeds = len(entries) // len(found)
    return {name: torch.tensor(bits, dtype=torch.float64) for name, bits in found.items() if len(bits) == seeds}


def find_groups(bits: Mapping[str, Tensor]) -> dict[str, int]:
    """Number the mechanisms with `bits` [S, N] from 1 on, so that a group has those that do not differ from its best.

    They do not differ if their mean difference on the same runs and images is at most two standard errors.
    """
    left, groups = sorted(bits, key=lambda name: float(bits[name].mean())), dict[str, int]()
    while left:
        number, best = max(groups.values(), default=0) + 1, bits[left[0]]
        for name in left:
            difference, error = measure_mean(bits[name] - best)
            if difference <= 2 * (error or 0):
                groups[name] = number
        left = [name for name in left if name not in groups]
    return groups
