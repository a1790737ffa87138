"""Memory: free and peak bytes, reuse of freed blocks, and batches that shrink to fit."""

import contextlib
import ctypes
import math
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from linformer_cli.errors import LintxError
from linformer_cli.units import format_bytes

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")

# Options in malloc.h: M_MMAP_MAX (no separate mappings), M_TRIM_THRESHOLD (never shrink), M_TOP_PAD (grow by 64 MiB).
_KEEPING = {-4: 0, -1: -1, -2: 2**26}
_LARGE_PAGE = 2**21


def keep_freed_memory() -> None:
    """Let glibc reuse freed memory, which saved a fifth of a training's time, unless malloc is configured."""
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries have no mallopt
        for option, value in _KEEPING.items():
            mallopt(option, value)


def give_back_freed_memory() -> None:
    """Make glibc return freed memory to the system, so that other processes can use it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def allocate_zeros(shape: tuple[int, ...], dtype: "torch.dtype") -> "torch.Tensor":
    """Return zeros on the CPU, in pages of 2 MiB where there are any, which makes large caches faster to read."""
    import torch

    size = math.prod(shape) * dtype.itemsize
    if size >= _LARGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError, OverflowError):  # too little memory, or a kernel without such pages
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
            memory.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(memory, dtype=dtype).view(shape)
    return torch.zeros(shape, dtype=dtype)


def measure_peak_memory(device: str = "cpu") -> int:
    """Peak bytes of this process's resident memory, or of a CUDA device's allocated memory; 0 on Windows."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means that memory ran out, on the CPU or on a GPU."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # torch's allocators for the CPU and for Apple GPUs raise plain RuntimeErrors.
    signs = ("can't allocate memory", "not enough memory", "out of memory", "Invalid buffer size")
    text = str(error)
    # oneDNN does not say that its memory ran out. "... a primitive descriptor" is a different error.
    one_dnn = text.endswith("could not create a primitive")
    return isinstance(error, RuntimeError) and (one_dnn or any(sign in text for sign in signs))


def work_in_batches(
    indices: Sequence[int],
    batch: int,
    work: Callable[[Sequence[int]], Result],
    on_halve: Callable[[int], None] | None = None,
) -> Iterator[Result]:
    """Split `indices` into consecutive parts of at most `batch` indices, and yield `work(part)` (never None) for each.

    When memory runs out, the batch is halved from then on, `on_halve` gets the new batch, and the same indices are
    tried again. Raises `LintxError` if there is not enough memory for a single index.
    """
    start = 0
    while start < len(indices):
        part = indices[start : start + batch]
        if (result := _work_if_memory_allows(work, part)) is not None:
            yield result
            start += len(part)
            continue
        if len(part) == 1:
            raise LintxError("there is not enough memory for a single image")
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
    # Memory is freed outside the handler: inside, the exception would keep the tensors of the attempt alive.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def measure_free_memory(device: str) -> int | None:
    """Return bytes that can still be allocated on a CUDA device, or in this process's container. None if unknown."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()  # returns torch's reserve to the device, so that it counts as free
        return int(torch.cuda.mem_get_info(device)[0])
    if device != "cpu":
        return None
    give_back_freed_memory()
    bounds = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        bounds.append(int(fields["MemAvailable"].split()[0]) * 1024)
    with contextlib.suppress(OSError, ValueError, KeyError):
        group = Path("/sys/fs/cgroup")
        # Cached file contents count as used memory, but the system frees them when memory is needed.
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(statistics["inactive_file"])
        bounds.append(int((group / "memory.max").read_text()) - used)
    return min(bounds, default=None)


def require_memory(needed: float, device: str, items: str) -> None:
    """Raise `LintxError` if the `items` of a message need more bytes than are free on `device`."""
    free = measure_free_memory(device)
    if free is not None and needed > free:
        raise LintxError(f"{items} need {format_bytes(int(needed))}, and {format_bytes(free)} are free")
