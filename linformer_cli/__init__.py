"""lintx: autoregressive pixel models with linear attention, sampled in constant memory."""

from .version import __version__

# Nothing else is imported here, so that `lintx` soon begins to handle Ctrl-C. Type checkers take this name to be true.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from .api import (
        build_attention,
        build_layer,
        complete,
        evaluate,
        load_model,
        load_picture,
        sample_images,
        score,
        to_picture,
        train,
    )

__all__ = [
    "__version__",
    "build_attention",
    "build_layer",
    "complete",
    "evaluate",
    "load_model",
    "load_picture",
    "sample_images",
    "score",
    "to_picture",
    "train",
]


def __getattr__(name: str) -> object:
    """Import the Python interface on first use, so that `import linformer_cli` does not import torch."""
    import importlib

    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.api"), name)
