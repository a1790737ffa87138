"""Devices and number formats: which there are, and what `auto` chooses."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from linformer_cli.errors import UsageError

if TYPE_CHECKING:
    import torch

Precision = Literal["auto", "fp32", "bf16"]


@dataclass(frozen=True)
class Choice:
    """What was chosen and why, for the user to read."""

    value: str
    reason: str


def choose_device(wanted: str) -> Choice:
    """A device for `auto`, `cpu`, `cuda`, `cuda:i` or `mps`; raises `UsageError` for one that is not there."""
    import torch

    kind, colon, index = wanted.partition(":")
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    metal = torch.backends.mps.is_available()
    if wanted == "auto":
        if cards:
            return Choice("cuda", f"a CUDA device is there ({torch.cuda.get_device_name(0)})")
        return Choice("mps", "Apple's GPU is there") if metal else Choice("cpu", "no GPU was found")
    if kind not in ("cpu", "cuda", "mps") or (colon and not (kind == "cuda" and index.isdigit())):
        raise UsageError(f"unknown device '{wanted}'; known: auto, cpu, cuda, cuda:INDEX, mps")
    if kind == "cuda" and not cards:
        raise UsageError("device 'cuda' asked for, but torch finds no CUDA device here; use --device cpu")
    if index and int(index) >= cards:
        raise UsageError(f"device '{wanted}' asked for, but there are only {cards} CUDA devices")
    if kind == "mps" and not metal:
        raise UsageError("device 'mps' asked for, but torch finds no Apple GPU here; use --device cpu")
    return Choice(wanted, "asked for")


def choose_precision(wanted: Precision, device: str, purpose: Literal["training", "sampling"]) -> Choice:
    """fp32 or bf16. `auto` trains in bf16 where the hardware multiplies it, and samples in fp32."""
    import torch

    if wanted != "auto":
        return Choice(wanted, "asked for")
    if purpose == "sampling":
        return Choice("fp32", "the same images at nearly every batch size; bf16 has to be asked for")
    if device == "cpu":
        # A private name, and the only one that tells: without these instructions bf16 products are slower than fp32.
        supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
        if supported is not None and supported():
            return Choice("bf16", "this processor multiplies bf16")
        return Choice("fp32", "this processor has no fast bf16")
    if device.startswith("cuda") and torch.cuda.is_bf16_supported():
        return Choice("bf16", "this GPU multiplies bf16")
    return Choice("fp32", "no fast bf16 is known for this device")


def torch_dtype(precision: str) -> "torch.dtype":
    """The torch type of `fp32`, `bf16` or `fp64`."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[precision]


def synchronize(device: str) -> None:
    """Wait until the device has done all work, so that a clock read next tells the truth."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device == "mps":
        torch.mps.synchronize()
