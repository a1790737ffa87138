"""Checkpoints (docs/reference/formats.md): folders written whole or not at all. Pickled files are never opened."""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from .checkpoint_files import (
    CARD,
    CHECKPOINT_FORMAT,
    CONFIG,
    REPLACED,
    TRAINING,
    WEIGHTS,
    CheckpointInfo,
    find_checkpoint,
    find_shipped_name,
    holds_checkpoint,
    render_card,
    replace_folder,
)
from .config import Origin
from .data.look import Look
from .documents import describe_validation_error, parse_json, read_bytes, read_json
from .errors import CheckpointError, UsageError, describe_reason
from .files import flush_folder, temporary_path, write_flushed
from .hub import find_hub_name
from .model.mixers import describe_mixing
from .model.pixel_model import PixelModel, build_skeleton, expected_weights
from .units import printable

# Bounds of files: the size of a header, and how much larger a training state is than its weights. Both are generous.
_HEADER_BYTES, _COPIES_OF_WEIGHTS = 2**24, 8
_ATTEMPTS = 50  # how often a checkpoint is read again that a run replaces meanwhile

Result = TypeVar("Result")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose configuration has been read."""

    path: Path
    info: CheckpointInfo

    @property
    def name(self) -> str:
        """The name of a shipped model or of a repository of the Hub, or the path of another checkpoint."""
        return find_shipped_name(self.path) or find_hub_name(self.path) or str(self.path)

    @property
    def digest(self) -> str:
        """The SHA-256 of the weights, which identifies a model in pictures and reports."""
        return self.info.weights_sha256

    @property
    def origin(self) -> Origin:
        return Origin(
            checkpoint=self.name,
            weights_sha256=self.digest,
            attention=self.info.model.attention,
            step=self.info.training.step,
        )


@dataclass(frozen=True)
class TrainingState:
    """The data that a resume needs besides the weights: named tensors, and plain JSON values."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


class _ReplacedError(CheckpointError):
    """Another checkpoint, such as the next save of a run, has replaced the one that was being read."""


def _read_again(read: Callable[[], Result]) -> Result:
    """Return the result of `read`, which is called again while a run replaces what it reads."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(_ReplacedError):
            return read()
        time.sleep(0.01)
    return read()


def read_checkpoint(name: str | Path | None = None) -> Checkpoint:
    """Find a checkpoint and read its configuration, not its weights."""
    return _read_again(lambda: _read_info(name))


def open_checkpoint(
    name: str | Path | None = None, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Checkpoint, PixelModel]:
    """Find a checkpoint, read its configuration and model, which belong together, and check that weights are finite."""

    def read() -> tuple[Checkpoint, PixelModel]:
        checkpoint = _read_info(name)
        return checkpoint, load_weights(checkpoint, device, dtype)

    checkpoint, model = _read_again(read)
    model.look = Look.of(checkpoint.info)
    for key, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise CheckpointError(f"'{checkpoint.path}' is damaged: {key} has a value that is not a finite number")
    return checkpoint, model


def _read_info(name: str | Path | None) -> Checkpoint:
    path = find_checkpoint(name)
    file = path / CONFIG
    try:
        document = read_json(file)
    except FileNotFoundError:
        raise _ReplacedError(f"no {CONFIG} in '{path}': not a lintx checkpoint") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"'{file}' is damaged: {error}") from None
    found = document.get("format") if isinstance(document, dict) else None
    if type(found) is int and found > CHECKPOINT_FORMAT:
        newer = f"format {found}; this version reads formats up to {CHECKPOINT_FORMAT}"
        raise CheckpointError(f"'{path}' was written by a newer lintx ({newer})")
    signed = document.get("config_sha256") if isinstance(document, dict) else None
    if signed is not None and signed != _document_digest(document):
        hint = "to use it, remove that line"
        raise CheckpointError(f"'{file}' is damaged or was edited: its SHA-256 differs from config_sha256; {hint}")
    try:
        return Checkpoint(path, CheckpointInfo.model_validate(document))
    except ValidationError as error:
        fault = describe_validation_error(CheckpointInfo, error, CONFIG)
        raise CheckpointError(f"'{file}' is damaged: {fault}") from None


def reopen_checkpoint(origin: Origin) -> Checkpoint:
    """Read the checkpoint that a run recorded. Raises `CheckpointError` if its weights have changed since."""
    checkpoint = read_checkpoint(origin.checkpoint)
    if checkpoint.digest != origin.weights_sha256:
        recorded = f"the weights that the run recorded (SHA-256 {origin.weights_sha256[:12]}...)"
        hint = "a new run can name others with --init-from and --distill-from"
        raise CheckpointError(f"'{checkpoint.path}' no longer has {recorded}; {hint}")
    return checkpoint


def load_model(name: str | Path | None = None, device: str = "cpu", dtype: torch.dtype = torch.float32) -> PixelModel:
    """Load the model that `name` refers to, as in `find_checkpoint` (None: the shipped default), in evaluation mode."""
    return open_checkpoint(name, device, dtype)[1]


def load_weights(checkpoint: Checkpoint, device: str = "cpu", dtype: torch.dtype = torch.float32) -> PixelModel:
    """Load the model of `checkpoint`, in evaluation mode. Raises `CheckpointError` if its files do not fit together."""
    file = checkpoint.path / WEIGHTS
    # Compare shapes before allocating memory, because a damaged configuration may ask for any amount.
    expected = _expected_weights(checkpoint)
    tensors, _ = _load_tensors(checkpoint, file, checkpoint.info.weights_sha256, _most_bytes(expected))
    missing, unknown = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    for fault, names in (("missing", missing), ("unknown", unknown)):
        if names:
            raise CheckpointError(f"'{file}' does not fit its config: {len(names)} {fault} tensors, {min(names)} first")
    for key, tensor in tensors.items():
        if tensor.shape != expected[key].shape:
            shapes = f"{list(tensor.shape)}, its config needs {list(expected[key].shape)}"
            raise CheckpointError(f"'{file}': {key} has shape {shapes}")
        wanted = expected[key].dtype
        if tensor.dtype != wanted and not (tensor.is_floating_point() and wanted.is_floating_point):
            raise CheckpointError(f"'{file}': {key} has type {_name(tensor.dtype)}, its config needs {_name(wanted)}")
    # Copy the tensors, so that the file's bytes are freed and every tensor has torch's own alignment.
    copies = {key: tensor.to(expected[key].dtype, copy=True) for key, tensor in tensors.items()}
    model = build_skeleton(checkpoint.info.model)
    model.load_state_dict(copies, assign=True)
    return model.to(device=device, dtype=dtype).eval()


def load_training_state(checkpoint: Checkpoint) -> TrainingState:
    """Load the training state of a checkpoint. Raises `CheckpointError` if it is missing or damaged."""
    digest = checkpoint.info.training_sha256
    if digest is None:
        raise CheckpointError(f"'{checkpoint.path}' has no training state, so it cannot be resumed; resume from last/")
    file = checkpoint.path / TRAINING
    most = _COPIES_OF_WEIGHTS * _most_bytes(_expected_weights(checkpoint))
    tensors, metadata = _load_tensors(checkpoint, file, digest, most)
    try:
        values = parse_json(metadata.get("values", "null"))
    except ValueError as error:
        raise CheckpointError(f"'{file}' is damaged: its progress cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"'{file}' is not a training state of lintx: it has no progress")
    return TrainingState(tensors, values)


def save_checkpoint(
    folder: Path,
    model: PixelModel,
    info: CheckpointInfo,
    training_state: TrainingState | None = None,
    weights_dtype: torch.dtype | None = None,
    new: bool = False,
) -> CheckpointInfo:
    """Replace a checkpoint folder. A crash at any moment leaves the old or the new checkpoint whole.

    A temporary folder beside `folder` is written and swapped with it or, if it must be `new`, renamed. Raises
    `CheckpointError` if the system refuses. Floating-point weights are rounded to `weights_dtype`, if given.
    """
    folder = Path(os.path.abspath(folder))  # a hidden name cannot be derived from `.`
    writing = temporary_path(folder.parent)
    try:
        writing.mkdir(parents=True)
        tensors = {
            key: tensor.detach().to("cpu", weights_dtype if tensor.is_floating_point() else None)
            for key, tensor in model.state_dict().items()
        }
        digest = _save_tensors(writing / WEIGHTS, tensors)
        training_digest = None
        if training_state is not None:
            values = {"values": json.dumps(training_state.values)}
            training_digest = _save_tensors(writing / TRAINING, training_state.tensors, values)
        info = info.model_copy(update={"weights_sha256": digest, "training_sha256": training_digest})
        info = info.model_copy(update={"config_sha256": _document_digest(json.loads(info.model_dump_json()))})
        write_flushed(writing / CONFIG, (info.model_dump_json(indent=2) + "\n").encode())
        card = render_card(printable(folder.name), info, model.parameter_count(), describe_mixing(info.model.attention))
        write_flushed(writing / CARD, card.encode())
        flush_folder(writing)
        (os.rename if new else replace_folder)(writing, folder)
    except BaseException as error:  # including Ctrl-C
        shutil.rmtree(writing, ignore_errors=True)
        if not isinstance(error, OSError | SafetensorError):
            raise
        rest = "the older checkpoint is untouched" if holds_checkpoint(folder) else "nothing was saved"
        raise CheckpointError(f"cannot save '{folder}': {describe_reason(error)}; {rest}") from None
    return info


def _save_tensors(file: Path, tensors: dict[str, Tensor], values: dict[str, str] | None = None) -> str:
    data = save({key: tensor.contiguous() for key, tensor in tensors.items()}, metadata=values)
    write_flushed(file, data)
    return hashlib.sha256(data).hexdigest()


def _expected_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    try:
        return expected_weights(lambda: PixelModel(checkpoint.info.model))
    except UsageError as error:
        raise CheckpointError(f"'{checkpoint.path / CONFIG}' describes no valid model: {error}") from None


def _most_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the largest possible size of a file with `tensors`: eight bytes a value, and a header."""
    return _HEADER_BYTES + 8 * sum(tensor.numel() for tensor in tensors.values())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _load_tensors(
    checkpoint: Checkpoint, file: Path, digest: str, most: int
) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        return _read_tensors(file, digest, most)
    except CheckpointError:
        if _is_replaced(checkpoint):
            raise _ReplacedError(f"'{checkpoint.path}' was replaced while it was read; try again") from None
        raise


def _is_replaced(checkpoint: Checkpoint) -> bool:
    """Return whether another checkpoint, such as the next save of a run, has replaced this one."""
    try:
        return checkpoint.path.name.endswith(REPLACED) or read_checkpoint(checkpoint.path) != checkpoint
    except CheckpointError:
        return not (checkpoint.path / CONFIG).is_file()


def _read_tensors(file: Path, digest: str, most: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata in a file of at most `most` bytes."""
    if not file.exists():
        raise CheckpointError(f"no {file.name} in '{file.parent}'")
    if file.resolve().parent != file.parent.resolve():
        raise CheckpointError(f"'{file}' links to a file outside its folder; copy that file into the folder instead")
    try:
        # The file is read, not mapped into memory, because a resumed run replaces it.
        data = read_bytes(file, most)
        if hashlib.sha256(data).hexdigest() != digest:
            raise CheckpointError(f"'{file}' is damaged or was replaced: its SHA-256 is not the one in {CONFIG}")
        tensors = load(data)
        header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"'{file}' cannot be read: {error}") from None
    return tensors, header.get("__metadata__", {})


def _document_digest(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a `config.json` without its own digest. It does not depend on key order or white space."""
    content = {key: value for key, value in document.items() if key != "config_sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
