"""Training steps of a task, with one process or several, and the state that the next step needs."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from linformer_cli.attention.base import Attention
from linformer_cli.attention.tensors import HOSTS, defer_checks
from linformer_cli.checkpoint import TrainingState
from linformer_cli.errors import TrainingError, UsageError
from linformer_cli.sampling.engines.cuda import Graphs
from linformer_cli.system.distributed import ALONE, Team, keep_own
from linformer_cli.system.timing import time_work
from .optimizer import build_average, load_optimizer_tensors, optimizer_tensors, strip_prefix
from .progress import Progress
from .task import AnyTask, Task

# Used if weights are averaged: the key of the number of averaged steps, and the prefix of the weights in training.
_AVERAGED, _IN_TRAINING = "averaged_steps", "training."


@dataclass(frozen=True)
class Step:
    """A training step: mean nats per value, the gradient norm before clipping, and the learning rate."""

    nats: float
    gradient_norm: float
    learning_rate: float


class Learner(Generic[AnyTask]):
    """A task in training. Each process of a `team` trains on its share of every batch; all have the same weights."""

    def __init__(self, task: AnyTask, team: Team = ALONE) -> None:
        self.task, self.team = task, team
        self.rows = share_batch(team, task.settings.batch)
        # Gradients are averaged with equal weights, but the shares of the batch may differ in size.
        self._weight = len(self.rows) / task.settings.batch
        self.average = build_average(task.model, task.settings)
        self.progress = Progress(evaluated_at=-1 if task.pretrained else 0)
        # Several processes exchange gradients, which a graph could not do.
        self._recorded = _RecordedPasses(self._run_passes, task) if (task.settings.graph and team.count == 1) else None

    @property
    def evaluated_model(self) -> nn.Module:
        """The model to evaluate, sample from and save. It has the average of the weights if there is one."""
        return self.task.model if self.average is None else self.average.module

    @functools.cached_property
    def measure_loss(self) -> Callable[[Any], tuple[Tensor, Tensor]]:
        """The loss of the task. Its backward pass averages the gradients of all processes."""
        if self.team.count == 1:
            return self.task.measure_loss
        return self.team.parallel(_Loss(self.task), has_idle_parameters(self.task))

    def train_step(self, share: float = 0.0) -> Step:
        """Take one optimizer step. Raises `TrainingError`, with the weights unchanged, for NaN and infinity."""
        task, settings, progress = self.task, self.task.settings, self.progress
        rate = task.learning_rate_at(progress.step, share)
        for group in task.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_share", 1.0)
        for module in task.model.modules():
            if isinstance(module, Attention):
                module.on_training_step(progress.step, settings.seed)
        with defer_checks():
            total, norm = self._differentiate(self._recorded or self._run_passes)
        if not (math.isfinite(total) and math.isfinite(norm)) and torch.device(task.device).type not in HOSTS:
            total, norm = self._differentiate(self._run_passes)
        if not (math.isfinite(total) and math.isfinite(norm)):
            found = f"(loss {total}, gradient norm {norm}), {task.describe_batch(progress.step)}"
            raise TrainingError(f"the loss or its gradient is NaN or infinite at step {progress.step} {found}")
        task.optimizer.step()
        if self.average is not None:
            self.average.update_parameters(task.model)
        self.progress = replace(
            progress,
            step=progress.step + 1,
            images_seen=progress.images_seen + settings.batch * settings.accumulation,
            interval_nats=progress.interval_nats + total,
            interval_steps=progress.interval_steps + 1,
        )
        return Step(total, norm, rate)

    def _differentiate(self, run_passes: Callable[[list[Any]], Tensor]) -> tuple[float, float]:
        """Compute the clipped gradients of a step, and return the mean nats, and the gradient norm before clipping."""
        task, count = self.task, self.task.settings.accumulation
        seed_own_dropout(self.team, task.settings.seed, self.progress.step)
        batches = [task.load_batch(self.progress.step * count + part, self.rows) for part in range(count)]
        *found, norm_before = run_passes(batches).tolist()
        return self.team.total(sum(nats * self._weight / count for nats in found)), norm_before

    def _run_passes(self, batches: list[Any]) -> Tensor:
        """Set the clipped gradients of all batches. Return the nats of each, and the norm before clipping."""
        task, count, parts = self.task, len(batches), []
        task.optimizer.zero_grad(set_to_none=True)
        for part, batch in enumerate(batches):
            with keep_own(self.measure_loss) if part + 1 < count else contextlib.nullcontext():
                loss, nats = self.measure_loss(batch)
                (loss * (self._weight * self.team.count / count)).backward()
            parts.append(nats.detach())
        norm = nn.utils.clip_grad_norm_(task.model.parameters(), task.settings.clip or math.inf)
        return torch.stack([*parts, norm])

    def time_one_step(self) -> float:
        self.train_step()
        return time_work(self.train_step, self.task.device)

    def collect_state(self) -> TrainingState:
        """Return what the next step needs besides the saved weights, which are the average if there is one."""
        tensors = optimizer_tensors(self.task.optimizer) | random_state(self.task.device)
        values = dataclasses.asdict(self.progress)
        if self.average is not None:
            tensors |= {f"{_IN_TRAINING}{key}": tensor.cpu() for key, tensor in self.task.model.state_dict().items()}
            values[_AVERAGED] = int(self.average.n_averaged)
        return TrainingState(tensors, values)

    def restore(self, weights: Mapping[str, Tensor], state: TrainingState) -> None:
        """Continue from a save. Raises `KeyError`, `TypeError`, `ValueError`, `IndexError` or `RuntimeError`."""
        values = dict(state.values)
        self.evaluated_model.load_state_dict(weights)
        if self.average is not None:
            self.average.n_averaged.fill_(values.pop(_AVERAGED))
            self.task.model.load_state_dict(strip_prefix(state.tensors, _IN_TRAINING))
        complete = load_optimizer_tensors(self.task.optimizer, state.tensors)
        if not complete and values["step"] != 0 and not has_idle_parameters(self.task):
            raise ValueError("moments of the optimizer are missing")
        restore_random_state(state.tensors, self.task.device)
        self.progress = Progress.from_values(values)


class _RecordedPasses:
    """`Learner._run_passes` as a CUDA graph: it always reads the same batches and writes the same gradients."""

    def __init__(self, run: Callable[[list[Any]], Tensor], task: Task[Any, Any]) -> None:
        self._run, self._parameters = run, list(task.model.parameters())
        self._graphs = Graphs(torch.device(task.device))
        self._batches: list[Any] | None = None
        self._found: tuple[Tensor, list[Tensor | None]] | None = None

    def __call__(self, batches: list[Any]) -> Tensor:
        if self._batches is None:
            self._batches = tree_map_only(Tensor, Tensor.clone, batches)
        for own, new in zip(tree_leaves(self._batches), tree_leaves(batches), strict=True):
            if isinstance(own, Tensor):
                own.copy_(new)
        self._graphs.run("passes", self._work)
        assert self._found is not None
        numbers, gradients = self._found
        # A replay knows nothing of gradients that other passes have set since.
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        return numbers

    def _work(self) -> None:
        assert self._batches is not None
        numbers = self._run(self._batches)
        self._found = numbers, [parameter.grad for parameter in self._parameters]


class _Loss(nn.Module):
    """The loss of a task as a module's forward pass, which `Team.parallel` needs."""

    def __init__(self, task: Task[Any, Any]) -> None:
        super().__init__()
        self.model, self._task = task.model, task

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self._task.measure_loss(batch)


def share_batch(team: Team, batch: int) -> range:
    """Return this process's share of every batch. Raises `UsageError` if a process would have no images."""
    if team.count > batch:
        hint = "start fewer processes, or a run with a larger --batch"
        raise UsageError(f"a batch of {batch} images cannot be divided among {team.count} processes; {hint}")
    return team.share(batch)


def has_idle_parameters(task: Task[Any, Any]) -> bool:
    """Return whether some parameter does not affect the loss. An image may be too short to use every parameter."""
    training = task.model.training
    task.model.eval()  # dropout would advance the random generator
    loss, _ = task.measure_loss(task.load_batch(0, range(1)))
    task.model.train(training)
    return None in torch.autograd.grad(loss, list(task.model.parameters()), allow_unused=True)


def seed_own_dropout(team: Team, seed: int, step: int) -> None:
    """Seed the dropout of one of several processes from seed, step and rank; a single one keeps its generator."""
    if team.count > 1:
        key = np.array([seed, step], dtype=np.uint64)
        torch.manual_seed(int(np.random.Philox(key=key).random_raw(team.rank + 1)[-1]))


def random_state(device: str) -> dict[str, Tensor]:
    tensors = {"random.cpu": torch.get_rng_state()}
    if device.startswith("cuda"):
        tensors["random.cuda"] = torch.cuda.get_rng_state(device)
    elif device == "mps":
        tensors["random.mps"] = torch.mps.get_rng_state()
    return tensors


def restore_random_state(tensors: Mapping[str, Tensor], device: str) -> None:
    """Restore the random states of the CPU and, if saved, of `device`. Raises `KeyError` if the CPU's is missing."""
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and device.startswith("cuda"):
        torch.cuda.set_rng_state(tensors["random.cuda"], device)
    if "random.mps" in tensors and device == "mps":
        torch.mps.set_rng_state(tensors["random.mps"])
