"""The peak memory of one forward and backward pass.

On a GPU torch counts it. On a CPU nothing counts all of it, so it is the growth of a fresh process's resident memory,
which also keeps a pass that needs more memory than there is from ending the caller.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from linformer_cli.system.device import synchronize
from linformer_cli.system.memory import is_out_of_memory, measure_peak_memory

from .attention_pass import PassSetup, build_pass
from .fresh_process import OUT_OF_MEMORY, PassFailed, run_fresh

# Where torch's lazy parts are loaded and its buffers made, so that they are not counted.
WARM_UP_POSITIONS = 256


@dataclass(frozen=True)
class PassMemory:
    """Bytes at the peak of one pass, its inputs included and its parameters not; and the seconds it took, unwarmed."""

    peak_bytes: int | None
    seconds: float


@contextlib.contextmanager
def refuse_misfits() -> Iterator[None]:
    """Turn memory that runs out in here, whatever the device says then, into `PassFailed`."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise PassFailed(OUT_OF_MEMORY) from None


def measure_pass_memory(setup: PassSetup, limit_seconds: float) -> PassMemory:
    """Measure one pass in the way its device has. Raises `PassFailed` where it does not fit, ends or takes too long."""
    if setup.device == "cpu":
        return PassMemory(**run_fresh(__name__, asdict(setup), limit_seconds))
    with refuse_misfits():
        return _measure_here(setup)


def _measure_here(setup: PassSetup) -> PassMemory:
    """In this process, on a device."""
    work = build_pass(setup)
    counted = setup.device.startswith("cuda")
    before = 0
    if counted:
        torch.cuda.synchronize(setup.device)
        torch.cuda.reset_peak_memory_stats(setup.device)
        before = torch.cuda.memory_allocated(setup.device)
    began = time.perf_counter()
    work()
    synchronize(setup.device)
    seconds = time.perf_counter() - began
    return PassMemory(torch.cuda.max_memory_allocated(setup.device) - before if counted else None, seconds)


def measure(given: dict[str, Any]) -> dict[str, Any]:
    """A `PassMemory` as plain values, of one pass on the CPU in this process, which should be fresh.

    How far resident memory rises above what it was; `given` is a `PassSetup` as plain values.
    """
    setup = PassSetup(**given)
    warm_up = PassSetup(**{**asdict(setup), "positions": min(setup.positions, WARM_UP_POSITIONS), "batch": 1})
    build_pass(warm_up)()
    work = build_pass(setup)
    seconds, growth = measure_work_growth(work)
    return asdict(PassMemory(growth, seconds))


def measure_work_growth(work: Callable[[], object]) -> tuple[float, int]:
    """The seconds of `work`, and how many bytes the resident memory of this process rises above what it was."""
    gc.collect()
    before = _forget_peak()
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    return seconds, max(0, _peak() - before)


def _forget_peak() -> int:
    """Bytes that the next peak rises from. Linux can forget the one before; elsewhere that one is all there is."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    # Not getrusage: its maximum may be that of the process which this one was forked from.
    with contextlib.suppress(OSError):
        fields = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        return next((int(words[1]) * 1024 for words in fields if words[0] == "VmHWM:"), 0) or measure_peak_memory()
    return measure_peak_memory()
