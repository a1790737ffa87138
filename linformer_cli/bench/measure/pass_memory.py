"""Peak memory of a piece of work, and of one forward and backward pass of a mechanism.

On a GPU, torch counts the memory. On a CPU, no counter covers all memory, so the result is the growth of a fresh
process's resident memory. If the work needs more memory than there is, the system kills only the fresh process.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from linformer_cli.system.memory import is_out_of_memory, measure_peak_memory
from linformer_cli.system.timing import time_work

from .attention_pass import PassSetup, build_pass
from .fresh_process import OUT_OF_MEMORY, PassFailed, run_fresh

# A warm-up at this length loads what torch loads on first use and creates torch's buffers, so neither is counted.
WARM_UP_POSITIONS = 256


@dataclass(frozen=True)
class PassMemory:
    """Peak bytes and seconds of one pass. Memory includes the inputs of the pass, but not the parameters.

    The seconds do not include the warm-up. `peak_bytes` is None if memory cannot be counted.
    """

    peak_bytes: int | None
    seconds: float


@contextlib.contextmanager
def refuse_misfits() -> Iterator[None]:
    """Turn an out-of-memory error of any device into `PassFailed`."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise PassFailed(OUT_OF_MEMORY) from None


def measure_pass_memory(setup: PassSetup, limit_seconds: float) -> PassMemory:
    """Measure one pass. Raises `PassFailed` if it does not fit into memory, fails or takes longer than the limit."""
    if setup.device == "cpu":
        return PassMemory(**run_fresh(__name__, asdict(setup), limit_seconds))
    with refuse_misfits():
        seconds, peak_bytes = measure_device_growth(build_pass(setup), setup.device)
        return PassMemory(peak_bytes, seconds)


def measure(given: dict[str, Any]) -> dict[str, Any]:
    """Measure a pass in this process, which should be fresh.

    `given` has the fields of a `PassSetup`. The result has the fields of a `PassMemory`.
    """
    setup = PassSetup(**given)
    build_pass(replace(setup, positions=min(setup.positions, WARM_UP_POSITIONS), batch=1))()
    seconds, growth = measure_process_growth(build_pass(setup))
    return asdict(PassMemory(growth, seconds))


def measure_device_growth(work: Callable[[], object], device: str) -> tuple[float, int | None]:
    """Return the seconds of `work` on a GPU and the growth of torch's peak of allocated bytes (None without CUDA)."""
    if not device.startswith("cuda"):
        return time_work(work, device), None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    seconds = time_work(work, device)
    return seconds, torch.cuda.max_memory_allocated(device) - before


def measure_process_growth(work: Callable[[], object]) -> tuple[float, int]:
    """Return the seconds of `work` on the CPU and the growth of this process's peak resident memory in bytes."""
    gc.collect()
    before = _reset_peak()
    seconds = time_work(work, "cpu")
    return seconds, max(0, _peak() - before)


def _reset_peak() -> int:
    """Reset the process's peak, if the system is Linux. Return the bytes from which growth is counted."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    # getrusage is unsuitable: its maximum can come from the parent process.
    with contextlib.suppress(OSError):
        fields = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        return next((int(words[1]) * 1024 for words in fields if words[0] == "VmHWM:"), 0) or measure_peak_memory()
    return measure_peak_memory()
