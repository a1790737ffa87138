"""The default guidance, and the check that the images of a model can be guided. `choose.guide` applies it."""

from linformer_cli.config import CLASS_GUIDANCE
from linformer_cli.errors import UsageError
from linformer_cli.model.pixel_model import PixelModel


def choose_guidance(model: PixelModel, weight: float | None, has_class: bool) -> float:
    """Return `weight`, or if it is None, the default for images of `model` with a class or without."""
    if weight is not None:
        return weight
    return CLASS_GUIDANCE if has_class and model.config.optional_class else 1.0


def check_guidance(model: PixelModel, weight: float, has_class: bool) -> None:
    """Raise `UsageError` if images of `model`, with a class or without, cannot be drawn with this guidance."""
    if weight == 1:
        return
    if not model.config.optional_class:
        raise UsageError("--guidance needs a model that also draws without a class, trained with --hide-class")
    if not has_class:
        raise UsageError("--guidance compares drawing with a class and without; choose a class with --class")
