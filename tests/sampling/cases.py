"""Models for the tests of engines, given as changes to a tiny model, and inputs for these models."""

from collections.abc import Sequence
from typing import Any

import torch

from linformer_cli.config import ImageShape
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.native.program import Builder, Program
from linformer_cli.native.program_file import Images
from linformer_cli.native.runner import Runner
from linformer_cli.sampling.choose import Filters
from linformer_cli.sampling.complete import Completion, complete_values
from linformer_cli.sampling.decode import SampledBatch, Sampler
from linformer_cli.sampling.engines.native import NativeEngine

# Seven colours, the first of them transparent and the last half transparent.
_COLOURS = ("#00000000", "#ff8000", "#0080ff", "#ffffff", "#000000", "#20a040", "#80208080")
PALETTE = ImageShape(height=7, width=6, levels=len(_COLOURS), palette=_COLOURS)
CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "post norm": {"norm": "post"},
    "relu": {"activation": "relu"},
    "relu map": {"attention_options": {"feature_map": "relu"}},
    "previous": {"context": "previous"},
    "the paper's": {
        "norm": "post",
        "activation": "relu",
        "embedding": "paper",
        "context": "previous",
        "head": "mixture",
    },
    "mixture": {"head": "mixture"},
    "three layers, odd widths": {"layers": 3, "width": 20, "head_width": 7, "heads": 3, "feed_forward": 29},
    "boom": {"width": 21, "feed_forward": 63, "feed_forward_kind": "boom"},
    "classes": {"classes": 3},
    "optional class": {"classes": 3, "optional_class": True},
    "the paper's with classes": {"classes": 3, "embedding": "paper", "context": "previous"},
    "colour": {"image": ImageShape(height=5, width=4, channels=3, levels=256)},
    "wide": {"context": "wide"},
    "wide, colour, odd widths": {
        **{"context": "wide", "width": 21, "feed_forward": 19, "norm": "post"},
        "image": ImageShape(height=5, width=4, channels=3, levels=256),
    },
    "hashed": {"context": "hashed"},
    "hashed, colour, odd widths": {
        **{"context": "hashed", "width": 21, "feed_forward": 19, "norm": "post"},
        "image": ImageShape(height=5, width=4, channels=3, levels=256),
    },
    "palette": {"context": "wide", "image": PALETTE},
    "palette, hashed, odd widths": {
        **{"context": "hashed", "width": 21, "feed_forward": 19, "norm": "post", "classes": 3, "image": PALETTE},
    },
    "RGBA": {"context": "residual", "image": ImageShape(height=4, width=5, channels=4, levels=16), "head": "mixture"},
    "pixels": {"context": "residual", "image": ImageShape(height=5, width=4, channels=3, levels=16)},
    "pixels, odd widths": {
        **{"context": "residual", "width": 21, "feed_forward": 19, "norm": "post", "head": "mixture"},
        **{"classes": 3, "image": ImageShape(height=5, width=4, channels=3, levels=256)},
    },
    "pixels, the paper's embedding": {
        **{"context": "residual", "embedding": "paper", "head": "mixture"},
        "image": ImageShape(height=5, width=4, channels=3, levels=256),
    },
    "many columns": {"width": 276, "norm": "post"},
}

_ALL_PARTS = {"short_convolution": 4, "normalise_keys": True, "norm_heads": True, "output_gate": True}
# Attention layers with optional parts.
LAYER_PARTS: dict[str, dict[str, Any]] = {
    "all parts": _ALL_PARTS,
    # The extra scalars of deltanet follow the convolved columns, which are more than a block of `for_columns` has.
    "all parts of deltanet, odd widths": {
        **_ALL_PARTS,
        **{"attention": "deltanet", "width": 20, "head_width": 23, "heads": 3, "layers": 3, "norm": "post"},
    },
    "a shared projection, a wide convolution": {"attention": "lsh", "short_convolution": 21, "normalise_keys": True},
    "a gate and normalised heads": {"attention": "softmax", "norm_heads": True, "output_gate": True},
}


def sample_values(
    model: PixelModel,
    indices: Sequence[int],
    seed: int = 0,
    filters: Filters | None = None,
    engine: str = "auto",
    **options: Any,
) -> SampledBatch:
    """Sample one batch with a new sampler; `options` are those of `Sampler.sample`."""
    return Sampler(model, seed, filters, engine).sample(indices, **options)


def draw_tokens(model: PixelModel, batch: int, count: int = 60) -> torch.Tensor:
    """Return tokens [batch, count]: start tokens of rotating classes, then random values."""
    values = torch.randint(0, model.config.image.levels, (batch, count), generator=torch.Generator().manual_seed(3))
    return model.shift_values(values, model.take_turns(range(1, 1 + batch))).to(model.device)


def step_native(model: PixelModel, tokens: torch.Tensor, threads: int = 1, **options: Any) -> torch.Tensor:
    """Return the parameters [B, T, P] that a new native engine computes for tokens [B, T]."""
    engine = NativeEngine(model, len(tokens), **options)
    engine.use_threads(threads)
    return torch.stack([engine.step(token).clone() for token in tokens.unbind(dim=1)], dim=1)


def open_runner(builder: Builder, output: int, batch: int, positions: int = 1) -> Runner:
    """Return a runner for operations alone: without tokens, and with `output` as the parameters of a value."""
    recent = builder.state(1, dtype=torch.int16)
    parts = tuple(builder.buffers), tuple(builder.operations)
    return Runner.of(Program(builder.products, 1, *parts, recent, -1, output, ()), Images(1, 1, positions, 2, 0), batch)


def complete_top(sampler: Sampler, original: torch.Tensor, known: int, *settings: Any, **named: Any) -> Completion:
    """Complete `original` int64 [T] from its first `known` values; `complete_values` explains the settings."""
    return complete_values(sampler, original, torch.arange(len(original)) < known, *settings, **named)
