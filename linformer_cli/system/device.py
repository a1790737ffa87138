"""Devices, number formats and seeds of torch."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from linformer_cli.errors import UsageError
from linformer_cli.units import parse_count

if TYPE_CHECKING:
    import torch

Precision = Literal["auto", "fp32", "bf16"]
SamplingPrecision = Literal[Precision, "int8"]


@dataclass(frozen=True)
class Choice:
    """A choice, and its reason in words for the user."""

    value: str
    reason: str


def choose_device(wanted: str) -> Choice:
    """Return the device for `auto`, `cpu`, `cuda`, `cuda:i` or `mps`. Raises `UsageError` if this machine lacks it."""
    import torch

    kind, colon, index = wanted.partition(":")
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    metal = torch.backends.mps.is_available()
    if wanted == "auto":
        if cards:
            return Choice("cuda", f"CUDA device found ({torch.cuda.get_device_name(0)})")
        return Choice("mps", "Apple GPU found") if metal else Choice("cpu", "no GPU found")
    if kind not in ("cpu", "cuda", "mps") or (colon and not (kind == "cuda" and parse_count(index) is not None)):
        raise UsageError(f"unknown device '{wanted}'; known: auto, cpu, cuda, cuda:INDEX, mps")
    if kind == "cuda" and not cards:
        raise UsageError("torch finds no CUDA device on this machine; use --device cpu")
    if index and int(index) >= cards:
        raise UsageError(f"'{wanted}' does not exist; the last CUDA device of this machine is cuda:{cards - 1}")
    if kind == "mps" and not metal:
        raise UsageError("torch finds no Apple GPU on this machine; use --device cpu")
    return Choice(f"{kind}{colon}{int(index) if index else ''}", "requested")


def multiplies_bf16() -> bool:
    """Return whether this processor has instructions that multiply bf16. They may still be slower than float32."""
    import torch

    # This name is private, but torch has no public one.
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is not None and bool(supported())


def torch_dtype(precision: str) -> "torch.dtype":
    """Return a model's type in this precision: float32 for `int8` or `auto`, which an engine may round later."""
    import torch

    return {"bf16": torch.bfloat16, "fp64": torch.float64}.get(precision, torch.float32)


def product_dtype(precision: str) -> "torch.dtype | None":
    """Return the type of the inputs of an engine's matrix products in `precision`; None if it is the model's type."""
    import torch

    return torch.int8 if precision == "int8" else None


def synchronize(device: str) -> None:
    """Wait until the device has finished all work; call it before reading a clock."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device == "mps":
        torch.mps.synchronize()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within the block, torch's random numbers depend only on `seed`. Those of the CPU after it do not depend on it."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
