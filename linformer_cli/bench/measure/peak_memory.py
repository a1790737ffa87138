"""Peak memory of work: on a GPU as torch counts it, on a CPU the growth of a fresh process's resident memory."""

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from linformer_cli.errors import LintxError
from linformer_cli.system.memory import give_back_freed_memory, is_out_of_memory, measure_peak_memory
from linformer_cli.system.timing import time_work

# Seconds allowed beyond a limit, for a warm-up, compiling a kernel and loading torch on a busy machine.
STARTING_SECONDS = 120.0
OUT_OF_MEMORY = "needs more memory than there is"
# On Linux, a server loads torch once and forks for every measurement. Elsewhere, forking is not safe.
FORKS = sys.platform == "linux"
_PACKAGE = Path(__file__).resolve().parents[3]
_ENVIRONMENT = {
    # The current folder may hold another version of the package, or a file numpy.py.
    "PYTHONSAFEPATH": "1",
    # With these, the C library returns freed large blocks, so that resident memory is memory in use.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}


class PassFailed(LintxError):
    """The work could not be finished. The message gives the reason briefly."""


@dataclass(frozen=True)
class PeakMemory:
    """The rise of the peak of memory by a piece of work (None: cannot be counted), and its seconds."""

    bytes: int | None
    seconds: float


Result = TypeVar("Result")
# A function at the top of a module, which warms up the work that a setup describes, and returns it. The setup has the
# attribute `device`, and is pickled for the fresh process.
Build = Callable[[Any], Callable[[], object]]


def measure_peak(build: Build, setup: Any, limit_seconds: float) -> PeakMemory:
    """Measure the work that `build` returns. Raises `PassFailed` if it fails, does not fit or takes far too long."""
    if setup.device == "cpu":
        return run_fresh(measure_process_growth, build, setup, limit_seconds=limit_seconds)
    with refuse_misfits():
        work = build(setup)
        if not setup.device.startswith("cuda"):
            return PeakMemory(None, time_work(work, setup.device))
        torch.cuda.synchronize(setup.device)
        torch.cuda.reset_peak_memory_stats(setup.device)
        before = torch.cuda.memory_allocated(setup.device)
        seconds = time_work(work, setup.device)
        return PeakMemory(torch.cuda.max_memory_allocated(setup.device) - before, seconds)


def measure_process_growth(build: Build, setup: Any) -> PeakMemory:
    """Measure the work on the CPU in this process, which should be fresh."""
    work = build(setup)
    gc.collect()
    with contextlib.suppress(OSError):  # systems other than Linux cannot reset the peak
        Path("/proc/self/clear_refs").write_text("5")
    before = _peak()
    seconds = time_work(work, "cpu")
    return PeakMemory(max(0, _peak() - before), seconds)


def _peak() -> int:
    # getrusage is unsuitable: its maximum can come from the parent process.
    with contextlib.suppress(OSError):
        fields = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        return next((int(words[1]) * 1024 for words in fields if words[0] == "VmHWM:"), 0) or measure_peak_memory()
    return measure_peak_memory()


@contextlib.contextmanager
def refuse_misfits() -> Iterator[None]:
    """Turn an out-of-memory error of any device into `PassFailed`."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise PassFailed(OUT_OF_MEMORY) from None


def run_fresh(work: Callable[..., Result], *arguments: object, limit_seconds: float) -> Result:
    """Call `work`, a function at the top of a module, in a fresh process. Raises `PassFailed` without a result."""
    give_back_freed_memory()
    context: Any = multiprocessing.get_context("forkserver" if FORKS else "spawn")
    if FORKS:
        functions = [one for one in (work, *arguments) if callable(one)]
        context.set_forkserver_preload(["__main__", *(one.__module__ for one in functions)])
    receiver, sender = context.Pipe(duplex=False)
    # Pickled here, so that the process reports a module that does not load.
    call = pickle.dumps((work, arguments))
    process = context.Process(target=_answer, args=(sender, torch.get_num_threads(), call), daemon=True)
    try:
        with _set_environment():
            process.start()
        sender.close()
        if not receiver.poll(limit_seconds + STARTING_SECONDS):
            raise PassFailed(f"it took more than {limit_seconds:.3g} s")
        result, reason = receiver.recv()
    except (EOFError, OSError):  # the process ended, or the server did before it could start the process
        if process.pid is not None:
            process.join()
        # When memory runs out, the system kills a process with signal 9.
        reason = OUT_OF_MEMORY if process.exitcode == -9 else "its process ended"
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
        receiver.close()
    if reason is not None:
        raise PassFailed(reason)
    found: Result = result
    return found


@contextlib.contextmanager
def _set_environment() -> Iterator[None]:
    """Set the environment of the processes that are started meanwhile. They import this version of the package."""
    before = dict(os.environ)
    paths = [str(_PACKAGE), *filter(None, [before.get("PYTHONPATH")])]
    os.environ.update({**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _answer(sender: Connection, threads: int, call: bytes) -> None:
    """Send the result of `call` and None, or None and the reason why it failed. This runs in the fresh process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # libraries print to stdout, which is for the caller's results
    torch.set_num_threads(threads)
    try:
        work, arguments = pickle.loads(call)
        sender.send((work(*arguments), None))
    except BaseException as error:
        reason = f"failed: {type(error).__name__}: {error}".splitlines()[0][:200]
        sender.send((None, OUT_OF_MEMORY if is_out_of_memory(error) else reason))
