"""The environment that measurements depend on: versions, processor, threads, GPUs; and packages of the extras."""

import contextlib
import importlib
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from linformer_cli.errors import LintxError
from linformer_cli.version import __version__
from .device import multiplies_bf16


def describe_environment() -> dict[str, Any]:
    import torch

    packages = ("numpy", "pillow", "pydantic", "rich", "safetensors", "torch", "torchvision", "triton", "typer")
    return {
        "versions": {
            "lintx": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in packages},
        },
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_bf16": multiplies_bf16(),
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "mps": torch.backends.mps.is_available(),
    }


def describe_machine(environment: Mapping[str, Any]) -> str:
    return f"{environment['processor']}, {environment['threads']} threads, torch {environment['versions']['torch']}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor_name() -> str:
    """Return the processor's model, or its architecture if the model is unknown."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def import_extra(package: str, extra: str) -> Any:
    """Import module `package` of an extra of lintx. Raises `LintxError` if it or a library that it needs is missing."""
    try:
        return importlib.import_module(package)
    except (ImportError, OSError) as error:  # soundfile raises OSError if libsndfile is missing
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LintxError(f"{package} does not load ({reason}); in a clone of lintx: pip install '.[{extra}]'") from None
