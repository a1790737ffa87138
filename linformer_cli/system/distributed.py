"""Support for several processes that torchrun starts for one job. With one process, nothing here has an effect."""

import contextlib
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from linformer_cli.errors import Interrupted, LintxError, UsageError
from linformer_cli.units import parse_count
from .device import Choice, choose_device

if TYPE_CHECKING:
    from torch import nn

Value = TypeVar("Value")

# torchrun sets these variables. torch uses them to find the other processes.
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LARGEST = {"WORLD_SIZE": 2**20, "RANK": 2**20, "LOCAL_RANK": 2**20, "MASTER_PORT": 2**16 - 1}
# A lost process closes its connections. The timeout is longer than validating, saving and sampling take.
_TIMEOUT = timedelta(days=1)
_PATIENCE = 5.0


class ProcessLost(LintxError):
    """Another process of the job has ended, and this one cannot continue."""


def process_rank() -> int:
    """Return the rank of this process in its job, 0 for a single process. Needs no torch."""
    return int(os.environ["RANK"]) if _count() > 1 else 0


def _count() -> int:
    """Count the processes; 1 if torchrun's variables are missing or wrong. `join_team` reports wrong variables."""
    return int(os.environ["WORLD_SIZE"]) if _is_job() and not _find_fault() else 1


def _is_job() -> bool:
    return all(os.environ.get(name) for name in _RENDEZVOUS)


def _find_fault() -> str | None:
    """Describe the first wrong value among torchrun's variables in words for the user, or return None."""
    for name, largest in _LARGEST.items():
        text = os.environ.get(name, "0")
        if parse_count(text, largest) is None:
            return f"the environment variable {name} must be a whole number from 0 to {largest}, found '{text[:50]}'"
    rank, count = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if int(rank) >= int(count):
        return f"the environment variable RANK must be less than WORLD_SIZE, found {rank} and {count}"
    return None


def end_process(code: int) -> NoReturn:
    """End this process: at once if there are others, because torch's threads may abort a slower end."""
    if _count() > 1:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # the disk is full, or the reader has closed the pipe
                stream.flush()
        os._exit(code)
    sys.exit(code)


@dataclass(frozen=True)
class Team:
    """The processes of one job, as seen by one of them: `rank` of `count`, and `local_rank` on this machine.

    Rank 0 leads: only it prints and writes files. All must make the same calls of methods that communicate.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def choose_device(self, wanted: str) -> Choice:
        """Choose the device for this process, as in `choose_device`; each of several processes gets its own GPU."""
        choice = choose_device(wanted)
        if self.count == 1 or choice.value == "cpu":
            return choice
        if choice.value != "cuda":
            raise UsageError(f"{self.count} processes cannot share '{wanted}'; use --device cuda or --device cpu")
        import torch

        own = choose_device(f"cuda:{self.local_rank}").value
        torch.cuda.set_device(own)  # NCCL sends from the current device
        return Choice(own, choice.reason)

    def share(self, count: int) -> range:
        """This process's consecutive share of `range(count)`. The sizes of all shares differ by at most one."""
        return range(self.rank * count // self.count, (self.rank + 1) * count // self.count)

    def total(self, value: float) -> float:
        return sum(self.gather(value))

    def most(self, value: int) -> int:
        return max(self.gather(value))

    def from_leader(self, work: Callable[[], Value]) -> Value:
        """Return the picklable result of `work`, run by rank 0. If it raises `Interrupted`, every process does."""
        found: Value | None = None
        stopped: Interrupted | None = None
        if self.leads:
            try:
                found = work()
            except Interrupted as error:
                stopped = error
        found, is_stopped = self.gather((found, stopped is not None))[0]
        if is_stopped:
            raise stopped or Interrupted("Stopped", signal.SIGTERM)
        return cast(Value, found)

    def gather(self, part: Value) -> list[Value]:
        """Return the `part` of every process, by rank; it must be picklable."""
        if self.count == 1:
            return [part]
        from torch import distributed

        parts: list[Value | None] = [None] * self.count
        distributed.all_gather_object(parts, part)
        return cast(list[Value], parts)

    def wait(self) -> None:
        self.total(0.0)

    @contextlib.contextmanager
    def leader_first(self) -> Iterator[None]:
        """Rank 0 runs the body before the other processes do, for example to download a file for all."""
        if not self.leads:
            self.wait()
        yield
        if self.leads:
            self.wait()

    def parallel(self, module: "nn.Module", has_idle: bool = False) -> "nn.Module":
        """Wrap `module` to average gradients over all processes; `has_idle`: not all parameters get one."""
        if self.count == 1:
            return module
        from torch.nn.parallel import DistributedDataParallel

        # Buffers need no synchronisation: they are constants, or depend only on the seed and the step.
        known = inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        settings: dict[str, Any] = {buffers: False, "gradient_as_bucket_view": True, "find_unused_parameters": has_idle}
        return DistributedDataParallel(module, **settings)


ALONE = Team()


def keep_own(module: object) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a backward pass through a module of `Team.parallel` does not average its gradients."""
    no_sync = getattr(module, "no_sync", None)
    return contextlib.nullcontext() if no_sync is None else no_sync()


@contextlib.contextmanager
def join_team(on_wait: Callable[[str], None] = lambda message: None) -> Iterator[Team]:
    """Join this process's team: `ALONE`, or the one that torchrun's variables describe, connected in the `with` block.

    After `_PATIENCE` seconds without the others, `on_wait` gets a line once. Leaving the block waits for all. Raises
    `UsageError` for wrong variables of torchrun, and `ProcessLost` if another process has ended.
    """
    if _is_job() and (fault := _find_fault()):
        raise UsageError(f"{fault}; start several processes with torchrun, or unset WORLD_SIZE")
    if _count() == 1:
        yield ALONE
        return
    import torch
    from torch import distributed

    cards = torch.cuda.is_available() and distributed.is_nccl_available()
    team = Team(process_rank(), _count(), int(os.environ.get("LOCAL_RANK", "0")))
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    waiting = f"waiting at {place} until all {team.count} processes have started; this is process {team.rank}"
    timer = threading.Timer(_PATIENCE, on_wait, [waiting])
    timer.daemon = True  # so that a signal can end the process
    timer.start()
    with notice_loss("its own message says why"):
        distributed.init_process_group("cpu:gloo,cuda:nccl" if cards else "gloo", timeout=_TIMEOUT)
        timer.cancel()
        yield team
        team.wait()
    distributed.destroy_process_group()


@contextlib.contextmanager
def notice_loss(advice: str) -> Iterator[None]:
    """Turn torch's errors about a lost process into `ProcessLost` with `advice`. The process then ignores SIGTERM."""
    try:
        yield
    except RuntimeError as error:
        if _count() == 1:
            raise
        from torch import distributed

        # The gloo backend raises plain RuntimeErrors.
        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
            raise
        # torchrun is about to send SIGTERM, and the message below is still to be printed.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise ProcessLost(f"another of the {_count()} processes has ended; {advice}") from None
