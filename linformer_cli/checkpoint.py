"""Checkpoints: a folder of `model.safetensors`, `config.json` and a model card, written whole or not at all.

`config.json` is the only copy of the configuration and holds the SHA-256 of the weights, and of the training state
where there is one. No pickle is ever opened. See docs/reference/formats.md.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .config import CHECKPOINT_FORMAT, CheckpointInfo, describe_validation_error
from .errors import CheckpointError, UsageError, unknown_name
from .files import flush_folder, write_flushed
from .model.catalogue import describe_mixing
from .model.pixel_model import PixelModel
from .report.model_card import render_card

DEFAULT_CHECKPOINT = "mnist-deep"
WEIGHTS, CONFIG, TRAINING, CARD = "model.safetensors", "config.json", "training.safetensors", "README.md"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose configuration has been read."""

    path: Path
    info: CheckpointInfo

    @property
    def digest(self) -> str:
        """The SHA-256 of the weights: what names a model in pictures and reports."""
        return self.info.weights_sha256


@dataclass(frozen=True)
class TrainingState:
    """What exact resumption needs besides the weights: named tensors, and plain JSON values."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


def shipped_checkpoints() -> dict[str, Path]:
    """The models that come with lintx, by name: beside the package's code, or in the repository it is edited in."""
    package = Path(__file__).resolve().parent
    folders = (package / "checkpoints", package.parent / "checkpoints")
    found = next((folder for folder in folders if folder.is_dir()), None)
    return {path.parent.name: path.parent for path in sorted(found.glob(f"*/{CONFIG}"))} if found else {}


def find_checkpoint(name: str | Path | None = None) -> Path:
    """The folder of a run, of a checkpoint, or of a shipped name; an existing path wins over a name.

    None is the shipped default. A run stands for its best checkpoint, or its last where there is no best yet.
    Raises `CheckpointError` for a path that is none of these, `UsageError` for a name that nothing has.
    """
    if name is None:  # whatever else is called so here
        return _find_shipped(DEFAULT_CHECKPOINT)
    try:
        return _find(name, Path(name))
    except (OSError, ValueError) as error:  # a name that the system takes for no path at all: too long, say
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CheckpointError(f"no checkpoint at '{str(name)[:200]}': {reason}") from None


def _find(name: str | Path, path: Path) -> Path:
    if path.is_dir():
        for folder in (path, path / "best", path / "last"):
            if (found := _settled(folder)) is not None:
                return found
        raise CheckpointError(f"'{path}' holds no checkpoint: neither {CONFIG} nor best/ or last/ in it")
    if path.is_file():
        if path.name in (WEIGHTS, CONFIG):
            return path.parent
        raise CheckpointError(
            f"'{path}' is a file; a lintx checkpoint is a folder with {WEIGHTS} and {CONFIG}, and pickled files "
            "(.pt, .pth, .ckpt) are never opened, since opening one can run any code"
        )
    if (found := _settled(path)) is not None:
        return found
    if os.sep in str(name) or path.suffix:
        raise CheckpointError(f"no checkpoint at '{name}'; shipped ones: {', '.join(shipped_checkpoints()) or 'none'}")
    return _find_shipped(str(name))


def _find_shipped(name: str) -> Path:
    shipped = shipped_checkpoints()
    if name in shipped:
        return shipped[name]
    raise unknown_name("checkpoint", name, shipped)


def holds_checkpoint(folder: Path) -> bool:
    """Whether `folder` holds a checkpoint, be it one whose replacement was cut off."""
    return _settled(folder) is not None


def read_checkpoint(name: str | Path | None = None) -> Checkpoint:
    """Find a checkpoint and read its configuration, not its weights."""
    path = find_checkpoint(name)
    file = path / CONFIG
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"no {CONFIG} in '{path}': not a lintx checkpoint") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"'{file}' is damaged: {error}") from None
    found = document.get("format") if isinstance(document, dict) else None
    if isinstance(found, int) and found > CHECKPOINT_FORMAT:
        raise CheckpointError(
            f"'{path}' was written by a newer lintx (format {found}, this one reads {CHECKPOINT_FORMAT})"
        )
    signed = document.get("config_sha256") if isinstance(document, dict) else None
    if signed is not None and signed != _document_digest(document):
        raise CheckpointError(
            f"'{file}' is damaged or was changed: its SHA-256 is not its config_sha256; leave that line out to use it"
        )
    try:
        return Checkpoint(path, CheckpointInfo.model_validate(document))
    except ValidationError as error:
        fault = describe_validation_error(CheckpointInfo, error, CONFIG)
        raise CheckpointError(f"'{file}' is damaged: {fault}") from None


def load_model(name: str | Path | None = None, device: str = "cpu", dtype: torch.dtype = torch.float32) -> PixelModel:
    """The model of a run, a checkpoint folder or a shipped name (None: the default), ready to sample and evaluate."""
    return load_weights(read_checkpoint(name), device, dtype)


class _WithoutDraws(TorchFunctionMode):
    """New weights are left as they are: drawing into tensors without memory loads torch's compiler, for seconds."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(function, "__module__", None) == "torch.nn.init":
            return None
        return function(*args, **(kwargs or {}))


def load_weights(checkpoint: Checkpoint, device: str = "cpu", dtype: torch.dtype = torch.float32) -> PixelModel:
    """Build the model of `checkpoint` and fill in its weights, after comparing their digest."""
    file = checkpoint.path / WEIGHTS
    tensors = _load_tensors(checkpoint, file, checkpoint.info.weights_sha256)
    try:
        # Shapes first, without memory: a damaged configuration may ask for any amount of it.
        with torch.device("meta"), _WithoutDraws():
            expected = PixelModel(checkpoint.info.model).state_dict()
    except UsageError as error:
        raise CheckpointError(f"'{checkpoint.path / CONFIG}' cannot be built: {error}") from None
    for fault, names in (
        ("lacks", expected.keys() - tensors.keys()),
        ("has unknown", tensors.keys() - expected.keys()),
    ):
        if names:
            raise CheckpointError(f"'{file}' {fault} {len(names)} tensors for its config, {sorted(names)[0]} first")
    for key, tensor in tensors.items():
        if tensor.shape != expected[key].shape:
            shapes = f"{list(tensor.shape)}, its config wants {list(expected[key].shape)}"
            raise CheckpointError(f"'{file}': {key} has shape {shapes}")
    model = PixelModel(checkpoint.info.model)
    model.load_state_dict(tensors)
    return model.to(device=device, dtype=dtype).eval()


def load_training_state(checkpoint: Checkpoint) -> TrainingState:
    """The training state beside the weights; raises `CheckpointError` where there is none or it is damaged."""
    digest = checkpoint.info.training_sha256
    if digest is None:
        raise CheckpointError(f"'{checkpoint.path}' has no training state, so it cannot be resumed; resume from last/")
    file = checkpoint.path / TRAINING
    tensors = _load_tensors(checkpoint, file, digest)
    with safe_open(file, "pt") as opened:
        written = (opened.metadata() or {}).get("values", "")
    try:
        values = json.loads(written)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise CheckpointError(f"'{file}' does not say where its run was: it is no training state of lintx")
    return TrainingState(tensors, values)


def save_checkpoint(
    folder: Path,
    model: PixelModel,
    info: CheckpointInfo,
    training_state: TrainingState | None = None,
    weights_dtype: torch.dtype | None = None,
) -> CheckpointInfo:
    """Write a checkpoint folder in place of an older one; a crash at any moment leaves the old or the new one whole.

    All is written and flushed under a temporary name beside `folder`, which is then swapped in by renaming. Raises
    `CheckpointError` when the disk is full or the place not writable; the older checkpoint is untouched then.
    `weights_dtype` rounds floating-point weights, for shipping.
    """
    folder = Path(os.path.abspath(folder))  # `.` has no name to put something beside
    writing = folder.with_name(f".{folder.name}.writing")
    try:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        tensors = {key: _rounded(tensor, weights_dtype) for key, tensor in model.state_dict().items()}
        digest = _save_tensors(writing / WEIGHTS, tensors)
        training_digest = None
        if training_state is not None:
            values = {"values": json.dumps(training_state.values)}
            training_digest = _save_tensors(writing / TRAINING, training_state.tensors, values)
        info = info.model_copy(update={"weights_sha256": digest, "training_sha256": training_digest})
        info = info.model_copy(update={"config_sha256": _document_digest(json.loads(info.model_dump_json()))})
        write_flushed(writing / CONFIG, (info.model_dump_json(indent=2) + "\n").encode())
        write_flushed(
            writing / CARD,
            render_card(folder.name, info, model.parameter_count(), describe_mixing(info.model.attention)).encode(),
        )
        flush_folder(writing)
        _swap(writing, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(writing, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CheckpointError(f"cannot save '{folder}': {reason}; what was saved before is untouched") from None
    return info


def _settled(folder: Path) -> Path | None:
    """`folder` if it holds a checkpoint, or what a swap that was cut off between its two renames left of it."""
    whole = Path(os.path.abspath(folder))
    aside = whole.parent / f".{whole.name}.replaced"
    return next((path for path in (folder, aside) if (path / CONFIG).is_file()), None)


def _swap(writing: Path, folder: Path) -> None:
    """Put `writing` in the place of `folder`. Between the two renames `_settled` still finds the older one."""
    aside = folder.with_name(f".{folder.name}.replaced")
    if folder.exists():
        shutil.rmtree(aside, ignore_errors=True)
        if aside.exists():  # on a network file system a file that another process has open stays
            os.rename(aside, aside.with_name(f"{aside.name}-{time.time_ns()}"))
        os.rename(folder, aside)
    os.rename(writing, folder)
    flush_folder(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _rounded(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """On the CPU, in `dtype` if it is a floating-point tensor: counters and indices must stay what they are."""
    return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None)


def _save_tensors(file: Path, tensors: dict[str, Tensor], values: dict[str, str] | None = None) -> str:
    data = save({key: tensor.contiguous() for key, tensor in tensors.items()}, metadata=values)
    write_flushed(file, data)
    return hashlib.sha256(data).hexdigest()


def _load_tensors(checkpoint: Checkpoint, file: Path, digest: str) -> dict[str, Tensor]:
    try:
        return _read_tensors(file, digest)
    except CheckpointError:
        if _is_replaced(checkpoint):
            raise CheckpointError(f"'{checkpoint.path}' was saved anew while it was read; try again") from None
        raise


def _is_replaced(checkpoint: Checkpoint) -> bool:
    """Whether another checkpoint stands in its place by now, as a run's next save does."""
    try:
        return read_checkpoint(checkpoint.path).info != checkpoint.info
    except CheckpointError:
        return False


def _read_tensors(file: Path, digest: str) -> dict[str, Tensor]:
    if not file.is_file():
        raise CheckpointError(f"no {file.name} in '{file.parent}'")
    if file.resolve().parent != file.parent.resolve():
        raise CheckpointError(f"'{file}' is a link out of its folder; copy the file itself there")
    try:
        # Read, not mapped into memory: a run goes on to replace the very files that it was resumed from.
        data = file.read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise CheckpointError(f"'{file}' is damaged or was exchanged: its SHA-256 is not the one in {CONFIG}")
        return load(data)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"'{file}' cannot be read: {error}") from None


def _document_digest(document: Mapping[str, Any]) -> str:
    """The SHA-256 of a `config.json` without its own digest, whatever the order of its keys and its spaces."""
    content = {key: value for key, value in document.items() if key != "config_sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
