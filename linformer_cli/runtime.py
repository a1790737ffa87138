"""The machine: device, precision, memory, signals. Everything here is called; nothing runs at import."""

import contextlib
import ctypes
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from . import __version__
from .errors import Interrupted, LintxError, UsageError

if TYPE_CHECKING:
    import torch

Precision = Literal["auto", "fp32", "bf16"]
Result = TypeVar("Result")

# Of malloc.h: M_MMAP_MAX, no mappings of their own; M_TRIM_THRESHOLD, nothing back; M_TOP_PAD, bytes to grow by.
_KEEPING = {-4: 0, -1: -1, -2: 2**26}


def limit_spinning() -> None:
    """Let waiting threads of OpenMP (GNU's) sleep sooner than by default, unless the environment says otherwise.

    To be called before torch is loaded. A thread that spins for milliseconds takes the core from the very thread that
    it waits for, as soon as anything else runs: one image then took two to seven times as long as on a quiet machine,
    with this twice as long. Where nothing else runs no difference was measured, in sampling or in training.
    """
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = "10000"


def keep_freed_memory() -> None:
    """Let the C library (glibc) keep what is freed for what is asked for next, unless the environment says otherwise.

    It gives every large block back to the system and takes the next one anew, page by page, each of them cleared. In
    a long training run a fifth of the time was seen to go there.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries have none
        for option, value in _KEEPING.items():
            mallopt(option, value)


def give_back_freed_memory() -> None:
    """Give back to the system what `keep_freed_memory` keeps (glibc), for other processes to have."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


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


def measure_peak_memory(device: str = "cpu") -> int:
    """Bytes: peak resident memory of this process, or peak allocated memory of a CUDA device."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows has no resource module
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out: Python's, a GPU's, or that of torch on the CPU."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # torch's allocators for the CPU and for Apple's GPU have no exception of their own.
    signs = ("can't allocate memory", "not enough memory", "out of memory", "Invalid buffer size")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def work_in_batches(
    indices: Sequence[int],
    batch: int,
    work: Callable[[Sequence[int]], Result],
    on_halve: Callable[[int], None] | None = None,
) -> Iterator[Result]:
    """`work(part)`, which is never None, for all of `indices`, parts of `batch` at a time.

    Where memory runs out the batch is halved for good, `on_halve` is told the new one, and the same indices are tried
    again. Raises `LintxError` when there is no memory for a single one.
    """
    start = 0
    while start < len(indices):
        part = indices[start : start + batch]
        if (result := _work_if_memory_allows(work, part)) is not None:
            yield result
            start += len(part)
            continue
        if len(part) == 1:
            raise LintxError("there is not enough memory for even one image at a time")
        batch = len(part) // 2
        if on_halve is not None:
            on_halve(batch)


def _work_if_memory_allows(work: Callable[[Sequence[int]], Result], indices: Sequence[int]) -> Result | None:
    import torch

    try:
        return work(indices)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # Here, and not in the handler, where the error still holds all that the attempt had allocated.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def synchronize(device: str) -> None:
    """Wait until the device has done all work, so that a clock read next tells the truth."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device == "mps":
        torch.mps.synchronize()


def describe_environment() -> dict[str, Any]:
    """What a figure depends on: versions, processor, threads, GPUs. Plain values, ready for JSON."""
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
        "cpu_bf16": choose_precision("auto", "cpu", "training").value == "bf16",
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "mps": torch.backends.mps.is_available(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor_name() -> str:
    return _read_processor("model name") or platform.processor() or platform.machine()


def processor_features() -> str:
    """What the processor can do, as Linux lists it; empty elsewhere. A virtual machine may hide its model."""
    return _read_processor("flags") or _read_processor("Features")


def _read_processor(key: str) -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(key):
                return line.partition(":")[2].strip()
    return ""


@dataclass
class StopRequest:
    """Set by the first Ctrl-C or SIGTERM; long work looks at it between steps."""

    signal_number: int | None = field(default=None)

    def raise_if_set(self, message: str = "Stopped") -> None:
        if self.signal_number is not None:
            raise Interrupted(message, self.signal_number)


@contextlib.contextmanager
def catch_signals() -> Iterator[StopRequest]:
    """Inside, the first SIGINT or SIGTERM only sets the request; a second one ends the process at once."""
    request = StopRequest()
    previous: dict[int, Any] = {}

    def handle(number: int, _frame: object) -> None:
        if request.signal_number is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        request.signal_number = number

    for caught in (signal.SIGINT, signal.SIGTERM):
        previous[caught] = signal.signal(caught, handle)
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
