"""Engines that step a model in different ways, with results that are equal up to rounding, listed in `ENGINES`."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from linformer_cli.errors import UsageError, unknown_name
from linformer_cli.model.pixel_model import PixelModel, PixelState
from linformer_cli.system.device import Choice
from .ahead import AheadEngine
from .base import Engine as Engine
from .cuda import CudaEngine, FusedCudaEngine, HalfSumsEngine
from .native import NativeEngine
from .reference import ReferenceEngine as ReferenceEngine

# Ordered from the fastest engine to the engine that supports every model.
_ALL = NativeEngine, CudaEngine, FusedCudaEngine, HalfSumsEngine, AheadEngine, ReferenceEngine
ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in _ALL}
AUTO, NATIVE, REFERENCE = "auto", NativeEngine.name, ReferenceEngine.name


def build_engine(
    wanted: str,
    model: PixelModel,
    batch: int,
    state: PixelState | None = None,
    look_ahead: bool = True,
    products: torch.dtype | None = None,
) -> Engine:
    """Build the engine that `choose_engine` chooses, or raise its errors; other arguments are those of `Engine`."""
    return ENGINES[choose_engine(wanted, model, products).value](model, batch, state, look_ahead, products)


class EngineCache:
    """Keeps the engine of the last batch size. Weights must not change meanwhile: engines may hold copies."""

    def __init__(self, wanted: str, model: PixelModel, products: torch.dtype | None = None) -> None:
        self.model, self._wanted, self._products = model, wanted, products
        self._engine: Engine | None = None

    @property
    def batch(self) -> int:
        return 0 if self._engine is None else self._engine.batch

    @contextmanager
    def start(self, batch: int) -> Iterator[Engine]:
        """Yield an engine that has started `batch` images; it is dropped if the work fails, for lack of memory."""
        try:
            if self._engine is None or self.batch != batch:
                self._engine = None  # free its memory before the next engine is built
                self._engine = build_engine(self._wanted, self.model, batch, products=self._products)
            else:
                self._engine.start()
            yield self._engine
        except BaseException:
            self._engine = None
            raise


def choose_engine(wanted: str, model: PixelModel, products: torch.dtype | None = None, forks: bool = False) -> Choice:
    """Return the engine `wanted`, or for `auto` the fastest engine that supports `model`, and the reason.

    `Engine` explains `products`, and `Engine.doubt` explains `forks`. Raises `UsageError` for an unknown engine, or one
    that does not support the model.
    """
    if wanted != AUTO:
        if wanted not in ENGINES:
            raise unknown_name("engine", wanted, [AUTO, *ENGINES])
        refusal = ENGINES[wanted].refusal(model, products)
        if refusal is not None:
            raise UsageError(f"engine '{wanted}' does not support this model here: {refusal}")
        return Choice(wanted, "requested")
    refusals: list[str] = []
    for name, engine in ENGINES.items():
        refusal = engine.refusal(model, products) or engine.doubt(model, forks)
        if refusal is None:
            return Choice(name, "; ".join(refusals) or "the fastest here")
        refusals.append(f"not {name}: {refusal}")
    raise UsageError(f"no engine supports this model here: {'; '.join(refusals)}")
