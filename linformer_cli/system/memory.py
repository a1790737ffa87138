"""Memory: how freed blocks are kept, what is free, what was used at the peak, and batches that shrink to fit."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from linformer_cli.errors import LintxError

Result = TypeVar("Result")


# Of malloc.h: M_MMAP_MAX, no mappings of their own; M_TRIM_THRESHOLD, nothing back; M_TOP_PAD, bytes to grow by.
_KEEPING = {-4: 0, -1: -1, -2: 2**26}


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


def measure_free_memory(device: str) -> int | None:
    """Bytes that can still be had, of the device or of this machine (and of the container); None where unknown."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()  # what torch keeps for later use can be had
        return int(torch.cuda.mem_get_info(device)[0])
    give_back_freed_memory()
    bounds = []
    with contextlib.suppress(OSError, ValueError):
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        bounds.append(int(fields["MemAvailable"].split()[0]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        # What was read from files is counted as used, and can be had all the same.
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(statistics["inactive_file"])
        bounds.append(int((group / "memory.max").read_text()) - used)
    return min(bounds) if bounds and device == "cpu" else None
