"""Tells whether Triton kernels are available. They are compiled for a CUDA device on first use."""

import functools
import importlib.util
from typing import TYPE_CHECKING

from .library import compiled_allowed

if TYPE_CHECKING:
    import torch

_LEAST_CAPABILITY = (8, 0)  # the lowest compute capability with matrix units for TF32 and bfloat16


def has_triton(device: "torch.device") -> bool:
    """Return whether Triton kernels may be used here for tensors of `device`."""
    return compiled_allowed() and triton_refusal(device) is None


@functools.cache
def triton_refusal(device: "torch.device") -> str | None:
    """Return why Triton kernels may not be used for tensors of `device`; None if they may."""
    import torch

    if device.type != "cuda" or torch.version.cuda is None:
        return "Triton kernels need a CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not torch.cuda.is_available():
        return None
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return "this GPU is too old for Triton kernels"
    try:
        # Triton needs a C compiler and a writable cache.
        importlib.import_module("linformer_cli.native.triton_probe").run_kernel(device)
    except Exception as error:
        return f"Triton does not work here: {type(error).__name__}: {error}".splitlines()[0]
    return None
