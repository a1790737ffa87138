"""The precision in which `auto` samples a model."""

import hashlib
from collections.abc import Callable

import torch

from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.native.library import describe_library
from linformer_cli.probe import CLEARLY_FASTER, measure_gain, remember
from linformer_cli.system.device import Choice, SamplingPrecision, product_dtype
from .engines import ENGINES, NATIVE
from .engines.native import NativeEngine

# One choice holds for all batch sizes, so that an image does not depend on the batch size.
_BATCH, _STEPS = 8, 4


def choose_sampling_precision(model: PixelModel, engine: str) -> Choice:
    """Return int8 or fp32 for `engine`: int8, whose images are the same everywhere, unless fp32 is clearly faster."""
    if engine != NATIVE or (refusal := NativeEngine.refusal(model, torch.int8)) is not None:
        return Choice("fp32", f"only the engine {NATIVE} supports int8" if engine != NATIVE else f"no int8: {refusal}")
    digest = hashlib.sha256(f"{model.config.model_dump_json()} {describe_library()}".encode()).hexdigest()
    gain = remember(f"sampling {digest[:16]}: int8", lambda: _measure_int8_gain(model))
    return Choice("int8" if gain * CLEARLY_FASTER > 1 else "fp32", f"int8 is {gain:.2g} times as fast as fp32 here")


def choose_formats(wanted: SamplingPrecision, model: PixelModel) -> tuple[Choice, dict[str, torch.dtype]]:
    """Choose the precision in which the native engine samples all models of a table, and each engine's `products`."""
    if wanted == "auto":
        choice = choose_sampling_precision(model, NATIVE)
        return choice, {NATIVE: torch.int8} if choice.value == "int8" else {}
    products = product_dtype(wanted)
    return Choice(wanted, "requested"), {} if products is None else dict.fromkeys(ENGINES, products)


def _measure_int8_gain(model: PixelModel) -> float:
    tokens = torch.zeros(_BATCH, dtype=torch.int64)

    def steps_in(products: torch.dtype) -> Callable[[], None]:
        engine = NativeEngine(model, _BATCH, look_ahead=False, products=products)

        @torch.no_grad()
        def work() -> None:
            engine.start()
            for _ in range(min(_STEPS, model.config.image.positions)):
                engine.step(tokens)

        return work

    return measure_gain(steps_in(torch.float32), steps_in(torch.int8))
