"""lintx: autoregressive pixel models with linear attention, sampled in constant memory."""

from .version import __version__

# Nothing else is imported here, so that `lintx` soon begins to handle Ctrl-C. Type checkers take this name to be true.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from .checkpoint import load_model as load_model
    from .sampling.decode import sample_images as sample_images


__all__ = ["__version__", "load_model", "sample_images"]

_HOMES = {"load_model": "checkpoint", "sample_images": "sampling.decode"}


def __getattr__(name: str) -> object:
    """Import the Python interface on first use, so that `import linformer_cli` does not import torch."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
