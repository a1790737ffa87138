"""Several processes on one job, as torchrun starts them. With one process all of it does nothing."""

import contextlib
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, cast

from linformer_cli.errors import Interrupted, LintxError, UsageError

from .device import Choice, choose_device

if TYPE_CHECKING:
    from torch import nn

Value = TypeVar("Value")

# What torch needs to find the other processes, as torchrun sets it.
_MEETING = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# A process that is gone is noticed by its closed connection. Waiting is for one that validates, saves or draws.
_PATIENCE = timedelta(days=1)


class ProcessLost(LintxError):
    """Another process of the job has ended, so that this one cannot go on."""


def process_rank(environment: Mapping[str, str] = os.environ) -> int:
    """The number of this process in its job, from 0; 0 where it is alone. Needs no torch."""
    return int(environment["RANK"]) if _count(environment) > 1 else 0


def _count(environment: Mapping[str, str] = os.environ) -> int:
    return int(environment["WORLD_SIZE"]) if all(environment.get(name) for name in _MEETING) else 1


def end_process(code: int) -> NoReturn:
    """End this process now, where it is one of several; alone, as `sys.exit` does.

    While the interpreter is torn down, threads of torch that still belong to the others' connection may ask for it once
    more, which aborts a process that has done all its work.
    """
    if _count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


@dataclass(frozen=True)
class Team:
    """The processes of one job, as one of them sees them: `rank` of `count`, and `local_rank` on this machine.

    Rank 0 leads: it alone talks and writes. Every process must make the same calls in the same order, but for `share`
    and what only looks; each waits for all. Numbers travel by way of `device`. Raises whatever torch does where
    another process is gone; `join_team` makes `ProcessLost` of it.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    device: str = "cpu"

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def on(self, device: str) -> Self:
        """The same, with numbers that travel by way of `device`."""
        return replace(self, device=device)

    def choose_device(self, wanted: str) -> Choice:
        """This process's device, as `choose_device` has it; of several processes each has a card of its own."""
        choice = choose_device(wanted)
        if self.count == 1 or choice.value == "cpu":
            return choice
        if choice.value != "cuda":
            raise UsageError(f"{self.count} processes cannot share '{wanted}'; use --device cuda or --device cpu")
        import torch

        own = choose_device(f"cuda:{self.local_rank}").value
        torch.cuda.set_device(own)  # by which torch finds the card for what it sends between processes
        return Choice(own, choice.reason)

    def share(self, count: int) -> range:
        """Which of `count` things are this process's: neighbours, as many as another's or one more or less."""
        return range(self.rank * count // self.count, (self.rank + 1) * count // self.count)

    def total(self, value: float) -> float:
        """The sum of every process's `value`."""
        return self._reduce(value, "SUM")

    def most(self, value: int) -> int:
        """The largest `value` of any process."""
        return int(self._reduce(value, "MAX"))

    def from_leader(self, work: Callable[[], Value]) -> Value:
        """What `work` gives in rank 0, which alone does it; it can be pickled. `Interrupted` there is so everywhere."""
        if self.count == 1:
            return work()
        from torch import distributed

        found: Value | None = None
        stopped: Interrupted | None = None
        if self.leads:
            try:
                found = work()
            except Interrupted as error:
                stopped = error
        parts = [found, stopped is not None]
        distributed.broadcast_object_list(parts, src=0)
        if parts[1]:
            raise stopped or Interrupted("Stopped", signal.SIGTERM)
        return cast(Value, parts[0])

    def gather(self, part: Value) -> list[Value]:
        """Every process's `part`, which can be pickled, in the order of ranks."""
        if self.count == 1:
            return [part]
        from torch import distributed

        parts: list[Value | None] = [None] * self.count
        distributed.all_gather_object(parts, part)
        return cast(list[Value], parts)

    def wait(self) -> None:
        """Until every process is here."""
        self.total(0.0)

    @contextlib.contextmanager
    def leader_first(self) -> Iterator[None]:
        """Inside, rank 0 does alone what the others then find done, such as a download."""
        if not self.leads:
            self.wait()
        yield
        if self.leads:
            self.wait()

    def parallel(self, module: "nn.Module", has_idle: bool = False) -> "nn.Module":
        """`module`, whose gradients a backward pass leaves as the mean over all processes' own.

        `has_idle` says that some of its parameters get none: to find them takes time.
        """
        if self.count == 1:
            return module
        from torch.nn.parallel import DistributedDataParallel

        # Buffers are constants here, or drawn anew from the seed and the step: the same in every process already.
        known = inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        settings: dict[str, Any] = {buffers: False, "gradient_as_bucket_view": True, "find_unused_parameters": has_idle}
        return DistributedDataParallel(module, **settings)

    def _reduce(self, value: float, operation: str) -> float:
        if self.count == 1:
            return value
        import torch
        from torch import distributed

        number = torch.tensor(value, dtype=torch.float64, device=self.device)
        distributed.all_reduce(number, getattr(distributed.ReduceOp, operation))
        return number.item()


ALONE = Team()


def keep_own(module: "nn.Module") -> contextlib.AbstractContextManager[None]:
    """Inside, a backward pass through what `Team.parallel` gave adds to this process's gradients alone."""
    no_sync = getattr(module, "no_sync", None)
    return contextlib.nullcontext() if no_sync is None else no_sync()


@contextlib.contextmanager
def join_team() -> Iterator[Team]:
    """The team that this process belongs to, alone or as torchrun says; inside, they can reach each other.

    Leaving waits for all, unless there is an error. Raises `ProcessLost` where another process has ended.
    """
    if _count() == 1:
        yield ALONE
        return
    import torch
    from torch import distributed

    cards = torch.cuda.is_available() and distributed.is_nccl_available()
    team = Team(process_rank(), _count(), int(os.environ.get("LOCAL_RANK", "0")))
    with notice_loss("what it said tells why"):
        distributed.init_process_group("cpu:gloo,cuda:nccl" if cards else "gloo", timeout=_PATIENCE)
        yield team
        team.wait()
    distributed.destroy_process_group()


@contextlib.contextmanager
def notice_loss(advice: str) -> Iterator[None]:
    """Inside, what torch says of another process that is gone becomes `ProcessLost`, with what to do.

    The process should end then; of SIGTERM it hears no more.
    """
    try:
        yield
    except RuntimeError as error:
        if _count() == 1:
            raise
        from torch import distributed

        # gloo's errors have no type of their own.
        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
            raise
        # torchrun is about to end this process as well, which ends by itself as soon as it has said why.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise ProcessLost(f"another of the {_count()} processes has ended; {advice}") from None
