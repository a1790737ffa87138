"""`lintx bench copy`: how fast models with different mechanisms learn the copy task.

Mechanisms are compared by the mean loss of the copied symbols after the same number of updates. For the source of the
task, see `copy_task.py`.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from linformer_cli.attention.base import Attention
from linformer_cli.evaluation.agreement import require_agreement
from linformer_cli.model.variants import Variant
from linformer_cli.report.tables import Shown
from linformer_cli.system.device import seeded
from linformer_cli.system.environment import describe_environment
from linformer_cli.system.signals import StopRequest
from linformer_cli.system.timing import time_work
from linformer_cli.units import format_milliseconds, format_percent

from .copy_task import (
    BATCH,
    HEADS,
    LAYERS,
    LEARNING_RATE,
    LOWER_AFTER_UPDATES,
    LOWER_LEARNING_RATE,
    SYMBOLS,
    CopyModel,
    CopySettings,
    draw_batch,
    learning_rate_at,
)
from .measure.attention_pass import PassSetup, build_checked_model
from .measure.ceilings import Ceilings, CeilingsReport
from .measure.costs import TRAINING_FACTOR, count_product_flops, list_products

Ending = Literal["finished", "budget", "interrupted", "failed"]


@dataclass(frozen=True)
class CopyPoint:
    """A point of a learning curve: the mean loss and accuracy over the `points_every` updates up to `update`.

    `loss` is in nats per copied symbol. `accuracy` is the share of correct predictions.
    """

    update: int
    loss: float
    accuracy: float
    learning_rate: float


@dataclass(frozen=True)
class CopyRow:
    """The results of one mechanism: the last point of its curve, its speed, and all points.

    `product_gigaflops` is the rate of the matrix products of an update in GFLOP/s. `product_share` is this rate as a
    share of the machine's highest rate. `failed` says why the model's training ended early.
    """

    task: str
    reduced: bool
    name: Annotated[str, Shown("attention")]
    attention: str
    attention_options: Mapping[str, object]
    device: str
    parameters: int
    updates: Annotated[int, Shown("updates", ",")]
    loss: Annotated[float | None, Shown("loss, nats per symbol", ".4f")]
    accuracy: Annotated[float | None, Shown("accuracy", ".1%")]
    seconds_per_update: Annotated[float | None, Shown("time per update", format_milliseconds)]
    product_gigaflops: float | None
    product_share: Annotated[float | None, Shown("products", format_percent)]
    failed: Annotated[str | None, Shown("failed")]
    points: tuple[CopyPoint, ...]


@dataclass(frozen=True, kw_only=True)
class CopyConditions:
    """All settings that the figures of a report depend on, except the machine."""

    task: str
    reduced: bool
    length: int
    symbols: int = SYMBOLS
    layers: int = LAYERS
    heads: int = HEADS
    width: int
    feed_forward: int
    batch: int = BATCH
    optimizer: str = "radam"
    learning_rate: float = LEARNING_RATE
    learning_rate_later: float = LOWER_LEARNING_RATE
    learning_rate_later_from_update: int = LOWER_AFTER_UPDATES
    updates_wanted: int
    updates: int
    points_every: int
    budget_seconds: float | None
    interleaved: bool = True
    precision: str = "fp32"
    seed: int


@dataclass(frozen=True)
class CopyReport:
    """One row for each mechanism, and how the benchmark ended."""

    rows: tuple[CopyRow, ...]
    ended: Ending
    settings: CopyConditions
    environment: dict[str, Any]
    ceilings: CeilingsReport


@dataclass(frozen=True)
class _Update:
    loss: float
    accuracy: float
    seconds: float


class Learner:
    """A model with one mechanism, and its curve. `failed` says why its training ended early."""

    def __init__(self, variant: Variant, settings: CopySettings, ceilings: Ceilings) -> None:
        self.variant = variant
        self.failed: str | None = None
        self._settings, self._ceilings = settings, ceilings
        with seeded(settings.seed):
            self.model = CopyModel(variant, settings).to(settings.device).train()
        self._optimizer = torch.optim.RAdam(self.model.parameters(), lr=LEARNING_RATE)
        self._updates: list[_Update] = []

    def time_update(self, sequences: Tensor, copied: Tensor) -> _Update:
        """Train on one batch and time the update, without recording it."""
        found: list[tuple[float, float]] = []
        number = len(self._updates)
        seconds = time_work(lambda: found.append(self.update(sequences, copied, number)), self._settings.device)
        return _Update(*found[0], seconds)

    def record(self, update: _Update) -> None:
        """Add an update to the curve. If the loss is NaN or infinite, the model has failed, and nothing is added."""
        if math.isfinite(update.loss):
            self._updates.append(update)
        else:
            self.failed = f"the loss was NaN or infinite at update {len(self._updates) + 1}"

    def update(self, sequences: Tensor, copied: Tensor, number: int) -> tuple[float, float]:
        """Train on one batch. Return loss and accuracy before the update, when the model has not yet seen the batch."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate_at(number)
        for module in self.model.modules():
            if isinstance(module, Attention):
                module.on_training_step(number, self._settings.seed)
        targets = copied[:, 1:]
        logits = self.model(sequences)[:, :-1][targets]
        wanted = sequences[:, 1:][targets]
        loss = functional.cross_entropy(logits, wanted)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        return float(loss.detach()), float((logits.argmax(dim=-1) == wanted).float().mean())

    def point(self, update: int) -> CopyPoint:
        """Return the point of the curve at `update`, counted from 1."""
        recent = self._updates[max(0, update - self._settings.points_every) : update]
        loss, accuracy = (statistics.fmean(getattr(one, key) for one in recent) for key in ("loss", "accuracy"))
        return CopyPoint(update, loss, accuracy, learning_rate_at(update - 1))

    def row(self) -> CopyRow:
        """Return all points so far. Unless the model has failed, the last point is at the last update."""
        done, every = len(self._updates), self._settings.points_every
        places = list(range(every, done + 1, every))
        if self.failed is None and done % every:
            places.append(done)
        points = tuple(self.point(place) for place in places)
        last = points[-1] if points else None
        seconds = rate = share = None
        if self.failed is None and done:
            seconds = statistics.fmean(update.seconds for update in self._updates)
            positions = BATCH * self._settings.length
            rate = positions * TRAINING_FACTOR * count_product_flops(self.model) / seconds / 1e9
            share = rate / self._ceilings.product(list_products(self.model), positions, "fp32").gigaflops
        return CopyRow(
            task=self._settings.title,
            reduced=self._settings.reduced,
            name=self.variant.label,
            attention=self.variant.attention,
            attention_options=self.variant.options,
            device=self._settings.device,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            updates=0 if last is None else last.update,
            loss=None if last is None else last.loss,
            accuracy=None if last is None else last.accuracy,
            seconds_per_update=seconds,
            product_gigaflops=rate,
            product_share=share,
            failed=self.failed,
            points=points,
        )


def prepare(variants: Sequence[Variant], settings: CopySettings, ceilings: Ceilings) -> list[Learner]:
    """Return an untrained model for each of `variants`.

    Raises `UsageError` for sizes that a mechanism does not support, and `DisagreementError` if the parallel and the
    step form of a mechanism disagree.
    """
    for variant in variants:
        setup = PassSetup(variant.attention, variant.options, HEADS, settings.width // HEADS, settings.length)
        require_agreement(build_checked_model(setup))
    return [Learner(variant, settings, ceilings) for variant in variants]


def run_copy_task(
    variants: Sequence[Variant],
    settings: CopySettings,
    ceilings: Ceilings,
    budget_seconds: float | None = None,
    stop: StopRequest | None = None,
    report: Callable[[int, dict[str, CopyPoint]], None] = lambda update, points: None,
) -> CopyReport:
    """Train one model per variant on the same sequences. The models take one update each in turn.

    The benchmark ends after all updates, after `budget_seconds`, or when `stop` is set. A model whose loss becomes
    NaN or infinite keeps its points and takes no more updates. An update counts only if all other models finished it,
    so the curves are comparable wherever they end. `report` receives the new point of every mechanism.

    Raises the errors of `prepare` before any training.
    """
    began = time.monotonic()
    stop = stop or StopRequest()
    learners = prepare(variants, settings, ceilings)

    def is_over() -> bool:
        late = budget_seconds is not None and time.monotonic() - began >= budget_seconds
        return late or stop.signal_number is not None

    def report_points(update: int) -> None:
        report(update, {one.variant.label: one.point(update) for one in learners if one.failed is None})

    done = 0
    while done < settings.updates and not is_over() and _measure_round(learners, settings, done, is_over):
        done += 1
        if done % settings.points_every == 0:
            report_points(done)
    if done % settings.points_every:
        report_points(done)
    ended: Ending = "finished"
    if done < settings.updates:
        failed = all(learner.failed is not None for learner in learners)
        ended = "interrupted" if stop.signal_number is not None else "failed" if failed else "budget"
    return CopyReport(
        tuple(learner.row() for learner in learners),
        ended,
        _describe_conditions(settings, budget_seconds, done),
        describe_environment(),
        ceilings.describe(),
    )


def _measure_round(
    learners: Sequence[Learner], settings: CopySettings, number: int, is_over: Callable[[], bool]
) -> bool:
    """Update every model that has not failed. Return False if all have failed or time ran out.

    If time runs out during the round, the round is not recorded.
    """
    batch = [part.to(settings.device) for part in draw_batch(settings.length, settings.seed, number)]
    learning = [learner for learner in learners if learner.failed is None]
    updates: list[_Update] = []
    for learner in learning:
        if updates and is_over():
            return False
        updates.append(learner.time_update(*batch))
    for learner, update in zip(learning, updates, strict=True):
        learner.record(update)
    return any(learner.failed is None for learner in learning)


def _describe_conditions(settings: CopySettings, budget_seconds: float | None, done: int) -> CopyConditions:
    return CopyConditions(
        task=settings.title,
        reduced=settings.reduced,
        length=settings.length,
        width=settings.width,
        feed_forward=4 * settings.width,
        updates_wanted=settings.updates,
        updates=done,
        points_every=settings.points_every,
        budget_seconds=budget_seconds,
        seed=settings.seed,
    )
