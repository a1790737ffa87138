"""Figures of finished runs, kept in files in the folder of each run: speeds, and the bits/dim of each validation image.

Speeds are timed in interleaved repeats. The bits/dim put mechanisms into groups that do not differ.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from linformer_cli.checkpoint import Checkpoint, load_weights
from linformer_cli.data.images import ImageSet
from linformer_cli.documents import read_json
from linformer_cli.errors import LintxError
from linformer_cli.evaluation.agreement import require_agreement
from linformer_cli.evaluation.bits import measure_mean, measure_nats
from linformer_cli.files import write_file
from linformer_cli.native.library import has_library
from linformer_cli.report.tables import to_json
from linformer_cli.sampling.decode import WholeImages
from linformer_cli.system.environment import processor_name
from linformer_cli.system.signals import Check, never_stop
from linformer_cli.system.timing import time_work
from linformer_cli.training.learner import Learner
from linformer_cli.training.pixel_task import PixelTask
from .entries import Conditions, Entry

# The number of training steps in one timed sample.
TIMED_STEPS = 3
_SHORTEST = 1e-9
# The conditions of the figures in a file, which are not reused under others.
Asked = Mapping[str, object]


def training_speed(entry: Entry, conditions: Conditions) -> Asked:
    return _describe_machine(conditions.device, conditions.precision, batch=entry.step_images, steps=TIMED_STEPS)


def sampling_speed(checkpoint: Checkpoint, conditions: Conditions) -> Asked:
    """Return the conditions of sampling times, with the sampled weights."""
    return _describe_machine(conditions.device, "fp32", batch=conditions.batch, weights_sha256=checkpoint.digest)


def _describe_machine(device: str, precision: str, **more: object) -> Asked:
    return {
        "device": device,
        "precision": precision,
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "kernels": has_library(),
        **more,
    }


def time_training_once(entry: Entry, images: tuple[ImageSet, ImageSet], conditions: Conditions) -> bool:
    """Time a few training steps and add the seconds to the file of `entry`. Return False if the file has all repeats.

    The timed steps train as the run did, after one warm-up step. Their weights are discarded. Calling this function for
    each entry in turn interleaves the repeats. Raises `DisagreementError` before the first repeat if the model's
    parallel and step forms give different results.
    """
    checkpoint = entry.require_finished()

    def measure(done: int) -> float:
        if not done:
            require_agreement(load_weights(checkpoint, conditions.device))
        learner = Learner(PixelTask(entry.config, images, conditions.device, conditions.precision))
        learner.train_step()
        return time_work(lambda: [learner.train_step() for _ in range(TIMED_STEPS)], conditions.device)

    return _add_sample(entry.training_file, training_speed(entry, conditions), conditions.repeats, measure)


def time_sampling_once(entry: Entry, conditions: Conditions, check: Check = never_stop) -> bool:
    """Like `time_training_once`, but time the sampling of a batch of images. `check` may raise to stop."""
    checkpoint = entry.require_finished()

    def measure(done: int) -> float:
        model = load_weights(checkpoint, conditions.device)
        if not done:
            require_agreement(model)
        return WholeImages(model, conditions.batch, check=check, drawn=done * conditions.batch).time_sample()

    return _add_sample(entry.sampling_file, sampling_speed(checkpoint, conditions), conditions.repeats, measure)


def _add_sample(file: Path, asked: Asked, repeats: int, measure: Callable[[int], float]) -> bool:
    """Add what `measure` returns for the number of samples in `file`, unless there are enough."""
    samples = read_figures(file, asked)
    if len(samples) >= repeats:
        return False
    keep_figures(file, asked, [*samples, measure(len(samples))])
    return True


def read_figures(file: Path, asked: Asked, key: str = "samples_seconds") -> list[float]:
    """Read the figures kept in `file`, such as seconds: none if their conditions were not those of `asked`."""
    try:
        record = read_json(file)
        same = all(record.get(name) == value for name, value in asked.items())
        samples: list[float] = record[key] if same else []
        # No clock measures less than a nanosecond.
        return samples if all(isinstance(one, float) and _SHORTEST <= one < math.inf for one in samples) else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def keep_figures(file: Path, asked: Asked, samples: Sequence[float], key: str = "samples_seconds") -> None:
    """Write `samples` with their conditions."""
    write_file(file, (to_json({**asked, key: samples}) + "\n").encode())


def forget_speeds(entry: Entry) -> None:
    for file in (entry.training_file, entry.sampling_file):
        file.unlink(missing_ok=True)


def measure_bits(entry: Entry, validation: ImageSet, device: str, check: Check = never_stop) -> None:
    """Keep the bits/dim of each validation image of a finished run, unless those of its weights are kept."""
    checkpoint = entry.require_finished()
    if not _read_bits(entry, checkpoint):
        model = load_weights(checkpoint, device)
        labels = validation.require_labels(classes) if (classes := model.config.required_classes) else None
        images = validation.images[: entry.config.train.evaluate_images]
        bits = measure_nats(model, images, before_batch=check, labels=labels).bits_per_image.tolist()
        keep_figures(entry.bits_file, _describe_bits(checkpoint, len(bits)), bits, "bits_per_dim")


def _read_bits(entry: Entry, checkpoint: Checkpoint) -> list[float]:
    asked = _describe_bits(checkpoint, checkpoint.info.training.validation_images)
    return read_figures(entry.bits_file, asked, "bits_per_dim")


def _describe_bits(checkpoint: Checkpoint, images: int | None) -> Asked:
    """Return what was validated: the weights with this checksum, and the number of images."""
    return {"weights_sha256": checkpoint.digest, "images": images}


def read_runs(entries: Sequence[Entry]) -> dict[str, Tensor]:
    """Return the kept bits/dim [S, N] of N images and all S seeds, for each mechanism that has them."""
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
