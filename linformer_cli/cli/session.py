"""A checkpoint opened for a command: its model on a device, in a precision."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from linformer_cli.errors import UsageError
from linformer_cli.system.distributed import ALONE, Team

from .output import talk

if TYPE_CHECKING:
    import torch

    from linformer_cli.checkpoint import Checkpoint
    from linformer_cli.model.pixel_model import PixelModel
    from linformer_cli.system.device import SamplingPrecision


@dataclass(frozen=True)
class Session:
    """An opened model. `record` identifies it in every result: checkpoint, attention, precision, device."""

    checkpoint: "Checkpoint"
    model: "PixelModel"
    device: str
    precision: str

    @property
    def record(self) -> dict[str, object]:
        return {
            "checkpoint": str(self.checkpoint.path),
            "checkpoint_sha256": self.checkpoint.digest,
            "attention": self.model.config.attention,
            "precision": self.precision,
            "device": self.device,
        }

    @property
    def products(self) -> "torch.dtype | None":
        """The argument `products` of an engine for this precision."""
        from linformer_cli.system.device import product_dtype

        return product_dtype(self.precision)

    def choose_classes(self, wanted: str | None) -> list[int]:
        """Return the classes in the value of `--class`: `7`, `1,7` or `all`. The list is empty without a value.

        Raises `UsageError` for a class that the model does not have, and for an unconditional model.
        """
        classes = self.model.config.classes
        if wanted is None:
            return []
        if not classes:
            raise UsageError(f"'{self.checkpoint.path}' was trained without --classes; drop --class {wanted}")
        if wanted.strip() == "all":
            return list(range(classes))
        parts = [part.strip() for part in wanted.split(",")]
        if not all(part.isdecimal() and int(part) < classes for part in parts):
            raise UsageError(f"--class takes classes from 0 to {classes - 1}, such as 0,1, or all, found '{wanted}'")
        return [int(part) for part in parts]

    def choose_engine(self, wanted: str) -> str:
        """Return the name of the engine to sample with. Prints the choice on stderr."""
        from linformer_cli.sampling.engines import choose_engine

        choice = choose_engine(wanted, self.model, self.products)
        talk(f"engine {choice.value} ({choice.reason})")
        return choice.value


def open_session(name: str | None, device: str, precision: "SamplingPrecision", team: Team = ALONE) -> Session:
    """Load the checkpoint `name` (None: the shipped default) for one of `team`. Prints model and device on stderr."""
    from linformer_cli.checkpoint import load_weights, read_checkpoint
    from linformer_cli.model.mixers import describe_mixing
    from linformer_cli.system.device import choose_precision, torch_dtype

    checkpoint = read_checkpoint(name)
    place = team.choose_device(device)
    kind = choose_precision(precision, place.value, "sampling")
    model = load_weights(checkpoint, place.value, torch_dtype(kind.value))
    # A shipped model is shown by its name; a run's checkpoint is shown by its path.
    title = checkpoint.path if name is not None and Path(name).exists() else checkpoint.path.name
    talk(f"{title}: {describe_mixing(model.config.attention)}, {model.parameter_count():,} parameters")
    talk(f"device {place.value} ({place.reason}), precision {kind.value} ({kind.reason})")
    return Session(checkpoint, model, place.value, kind.value)
