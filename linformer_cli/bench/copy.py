"""`lintx bench copy`: how fast models with different mechanisms learn the copy task.

Mechanisms are compared by the mean loss of the copied symbols after the same number of updates. For the source of the
task, see `copy_task.py`.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from linformer_cli.errors import TrainingError
from linformer_cli.evaluation.agreement import require_agreement
from linformer_cli.model.variants import Variant
from linformer_cli.system.environment import describe_environment
from linformer_cli.system.signals import StopRequest
from linformer_cli.system.timing import time_work
from linformer_cli.training.loop import Trainer

from .copy_report import CopyConditions, CopyEnding, CopyPoint, CopyReport, CopyRow
from .copy_task import (
    BATCH,
    HEADS,
    CopySettings,
    CopyTask,
    learning_rate_at,
)
from .measure.attention_pass import PassSetup, build_checked_model
from .measure.ceilings import Ceilings
from .measure.costs import TRAINING_FACTOR, count_product_flops, list_products


@dataclass(frozen=True)
class _Update:
    """An update, or the reason why it failed."""

    loss: float
    accuracy: float
    seconds: float
    failed: str | None = None


class CopyRun:
    """The training of one mechanism, and its updates. `failed` says why its training ended early."""

    def __init__(self, variant: Variant, settings: CopySettings, ceilings: Ceilings) -> None:
        self.variant = variant
        self.failed: str | None = None
        self._settings, self._ceilings = settings, ceilings
        self.trainer = Trainer(CopyTask(variant, settings))
        self._steps = self.trainer.steps()
        self.updates: list[_Update] = []

    def time_update(self) -> _Update:
        """Train on one batch and time the update, without recording it."""
        found: list[tuple[float, float]] = []
        try:
            seconds = time_work(lambda: found.append(self.update()), self._settings.device)
        except TrainingError as error:
            return _Update(math.nan, math.nan, math.nan, str(error))
        return _Update(*found[0], seconds)

    def record(self, update: _Update) -> None:
        """Add an update to the curve, unless it failed."""
        self.failed = update.failed
        if self.failed is None:
            self.updates.append(update)

    def update(self) -> tuple[float, float]:
        """Train on one batch. Return loss and accuracy before the update, when the model has not yet seen the batch."""
        loss = next(self._steps).nats
        return loss, float(self.trainer.task.accuracy)

    def point(self, update: int) -> CopyPoint:
        """Return the point of the curve at `update`, counted from 1."""
        recent = self.updates[max(0, update - self._settings.points_every) : update]
        loss, accuracy = (statistics.fmean(getattr(one, key) for one in recent) for key in ("loss", "accuracy"))
        return CopyPoint(update, loss, accuracy, learning_rate_at(update - 1))

    def row(self) -> CopyRow:
        """Return all points so far. Unless the model has failed, the last point is at the last update."""
        done, every = len(self.updates), self._settings.points_every
        places = list(range(every, done + 1, every))
        if self.failed is None and done % every:
            places.append(done)
        points = tuple(self.point(place) for place in places)
        last = points[-1] if points else None
        seconds = rate = share = None
        if self.failed is None and done:
            seconds = statistics.fmean(update.seconds for update in self.updates)
            positions = BATCH * self._settings.length
            rate = positions * TRAINING_FACTOR * count_product_flops(self.trainer.task.model) / seconds / 1e9
            share = rate / self._ceilings.product(list_products(self.trainer.task.model), positions, "fp32").gigaflops
        return CopyRow(
            task=self._settings.title,
            reduced=self._settings.reduced,
            name=self.variant.label,
            attention=self.variant.attention,
            attention_options=self.variant.options,
            device=self._settings.device,
            parameters=sum(parameter.numel() for parameter in self.trainer.task.model.parameters()),
            updates=0 if last is None else last.update,
            loss=None if last is None else last.loss,
            accuracy=None if last is None else last.accuracy,
            seconds_per_update=seconds,
            product_gigaflops=rate,
            product_share=share,
            failed=self.failed,
            points=points,
        )


def prepare(variants: Sequence[Variant], settings: CopySettings, ceilings: Ceilings) -> list[CopyRun]:
    """Return an untrained model for each of `variants`.

    Raises `UsageError` for sizes that a mechanism does not support, and `DisagreementError` if the parallel and the
    step form of a mechanism disagree.
    """
    for variant in variants:
        setup = PassSetup(variant.attention, variant.options, HEADS, settings.width // HEADS, settings.length)
        require_agreement(build_checked_model(setup))
    return [CopyRun(variant, settings, ceilings) for variant in variants]


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
    runs = prepare(variants, settings, ceilings)

    def is_over() -> bool:
        late = budget_seconds is not None and time.monotonic() - began >= budget_seconds
        return late or stop.signal_number is not None

    def report_points(update: int) -> None:
        report(update, {one.variant.label: one.point(update) for one in runs if one.failed is None})

    done = 0
    while done < settings.updates and not is_over() and _measure_round(runs, done, is_over):
        done += 1
        if done % settings.points_every == 0:
            report_points(done)
    if done % settings.points_every:
        report_points(done)
    ended: CopyEnding = "finished"
    if done < settings.updates:
        failed = all(run.failed is not None for run in runs)
        ended = "interrupted" if stop.signal_number is not None else "failed" if failed else "budget"
    return CopyReport(
        tuple(run.row() for run in runs),
        ended,
        _describe_conditions(settings, budget_seconds, done),
        describe_environment(),
        ceilings.describe(),
    )


def _measure_round(runs: Sequence[CopyRun], number: int, is_over: Callable[[], bool]) -> bool:
    """Update every model that has not failed. Return False if all have failed or time ran out.

    If time runs out during the round, the round is not recorded.
    """
    learning = [run for run in runs if run.failed is None]
    learning[0].trainer.task.load_batch(number, range(BATCH))  # drawn here, so that no update includes the time
    updates: list[_Update] = []
    for run in learning:
        if updates and is_over():
            return False
        updates.append(run.time_update())
    for run, update in zip(learning, updates, strict=True):
        run.record(update)
    return any(run.failed is None for run in learning)


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
