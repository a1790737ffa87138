"""Engines: ways to step a model, all with the same results up to rounding. A new one is one file and one line here."""

from linformer_cli.errors import UsageError, unknown_name
from linformer_cli.model.pixel_model import PixelModel, PixelState
from linformer_cli.system.device import Choice

from .base import Engine as Engine
from .cuda import CudaEngine
from .native import NativeEngine, StepwiseEngine
from .textbook import TextbookEngine as TextbookEngine

# From the fastest to the one that serves everything.
ENGINES: dict[str, type[Engine]] = {
    engine.name: engine for engine in (NativeEngine, StepwiseEngine, CudaEngine, TextbookEngine)
}
AUTO, NATIVE, STEPWISE, TEXTBOOK = "auto", NativeEngine.name, StepwiseEngine.name, TextbookEngine.name


def build_engine(wanted: str, model: PixelModel, batch: int, state: PixelState | None = None) -> Engine:
    """The engine that `choose_engine` chooses, for `batch` images from `state` (None: the start of an image)."""
    return ENGINES[choose_engine(wanted, model).value](model, batch, state)


def choose_engine(wanted: str, model: PixelModel) -> Choice:
    """The engine `wanted`, or for `auto` the fastest that serves `model`, and why.

    Raises `UsageError` for a name that is not known and for an engine that does not serve the model.
    """
    if wanted != AUTO:
        if wanted not in ENGINES:
            raise unknown_name("engine", wanted, [AUTO, *ENGINES])
        refusal = ENGINES[wanted].refusal(model)
        if refusal is not None:
            raise UsageError(f"engine '{wanted}' does not serve this model here: {refusal}")
        return Choice(wanted, "asked for")
    refusals: list[str] = []
    for name, engine in ENGINES.items():
        if not engine.automatic:
            continue
        refusal = engine.refusal(model)
        if refusal is None and not engine.tried:
            refusal = f"it has not been tried on such a device yet, --engine {name} asks for it"
        if refusal is None:
            return Choice(name, "; ".join(refusals) or "the fastest here")
        refusals.append(f"not {name}: {refusal}")
    raise AssertionError("the textbook engine serves every model")
