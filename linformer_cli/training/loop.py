"""The training loop: evaluate, sample, save, stop if requested, train. A resumed run gives the same result."""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from linformer_cli.checkpoint import TrainingState, load_training_state, load_weights, read_checkpoint, save_checkpoint
from linformer_cli.checkpoint_files import holds_checkpoint
from linformer_cli.errors import CheckpointError, DataError, Interrupted, LintxError, TrainingError
from linformer_cli.metrics import MetricsRow, append_row, cut_metrics
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.system.distributed import ALONE, Team
from linformer_cli.system.memory import is_out_of_memory, measure_peak_memory
from linformer_cli.system.signals import StopRequest
from .learner import Learner, Step
from .logs import RunLog
from .progress import Progress, Reporter
from .run_folder import RunFolder
from .task import AnyTask, measure_progress


class Trainer(Learner[AnyTask]):
    """The training of a task. With a `folder`, rank 0 logs, validates, samples and saves it, so it can be resumed."""

    def __init__(self, task: AnyTask, folder: RunFolder | None = None, team: Team = ALONE) -> None:
        super().__init__(task, team)
        self.folder = folder
        self.logs: Sequence[RunLog] = ()
        # The progress at the save in last/. A new run has no save, so it saves before its first step.
        self._saved: tuple[int, int, int, bool] | None = None
        self.peak_learning_rate = 0.0
        # The seconds of the longest validation and grid so far.
        self._ending_seconds = 0.0

    @property
    def has_lost_patience(self) -> bool:
        return 0 < self.task.settings.patience <= self.progress.worse_validations

    @property
    def share_without_time(self) -> float:
        """The finished share of the steps or epochs in [0, 1]; 1 if only a time is given."""
        settings = self.task.settings.model_copy(update={"max_time": None})
        return measure_progress(settings, self.progress.step, 0.0, self.task.items)

    def run(self, reporter: Reporter, stop: StopRequest) -> Progress:
        """Train to the end of the schedule. If `stop` is set, save and raise `Interrupted`."""
        for _ in self.steps(reporter, stop):
            pass
        return self.progress

    def steps(self, reporter: Reporter | None = None, stop: StopRequest | None = None) -> Iterator[Step]:
        """Train as `run` does, and yield every step, so that several models can take their steps in turn."""
        reporter, stop, settings = reporter or Reporter(), stop or StopRequest(), self.task.settings
        folder, leads = self.folder, self.team.leads
        if leads and folder and not folder.data_file.exists() and (digest := self.task.digest_data()) is not None:
            folder.record_data(digest)
        started = time.monotonic() - self.progress.elapsed_seconds
        timed_steps, timed_seconds = 0, 0.0
        while True:
            # All processes use the leader's time, so that all end after the same step.
            elapsed_seconds, ending = self.team.from_leader(lambda: (time.monotonic() - started, self._ending_seconds))
            self.progress = replace(self.progress, elapsed_seconds=elapsed_seconds)
            share = measure_progress(settings, self.progress.step, elapsed_seconds, self.task.items, ending)
            finished = share >= 1 or self.has_lost_patience
            checked = self._check_is_due()
            with contextlib.suppress(Interrupted):  # --resume repeats the interrupted evaluation or grid
                if validated := self._evaluation_is_due(finished, checked):
                    reporter.on_busy("validating")
                    self._evaluate(reporter, stop)
                    finished = finished or self.has_lost_patience
                if sampled := self._sample_is_due(finished, checked):
                    reporter.on_busy("drawing samples")
                    self._sample(reporter, stop)
                reporter.on_busy("")
                if checked:
                    self.progress = replace(self.progress, checked_seconds=elapsed_seconds)
                if validated or sampled:
                    self._ending_seconds = max(self._ending_seconds, time.monotonic() - started - elapsed_seconds)
            stopped = self.team.most(stop.signal_number or 0)
            if self._save_is_due(finished or checked or stopped > 0):
                self._save_last(reporter)
            if stopped:
                self._leave(stopped)
            if finished:
                if self.folder is not None and self.team.leads:
                    self.folder.drop_previous()
                return
            began = time.perf_counter()
            try:
                step = self.train_step(share)
            except TrainingError as error:
                raise self._diverged(str(error)) from None
            # Only training steps are timed: the speed should not depend on validation, samples or saves.
            timed_steps, timed_seconds = timed_steps + 1, timed_seconds + time.perf_counter() - began
            self.peak_learning_rate = max(self.peak_learning_rate, step.learning_rate)
            self._watch_loss(step.nats, reporter)
            if self.progress.step % settings.log_every == 0:
                self.progress = replace(self.progress, elapsed_seconds=time.monotonic() - started)
                self._log(reporter, step, timed_steps / timed_seconds, share)
                timed_steps, timed_seconds = 0, 0.0
            yield step

    def resume(self, accept_changed_data: bool = False) -> str:
        """Restore the contents of `last/`: weights, optimizer, position in the data, random state, metrics.

        A run that was killed before its first save starts again. Raises `DataError` if its images have changed, unless
        this is accepted, which is then the text that is returned, and `CheckpointError` if the save is damaged.
        """
        folder = self.folder
        assert folder is not None
        if folder.is_untouched:
            if self.task.pretrained:
                raise CheckpointError(f"'{folder.path}' was killed before its first save; start it again")
            if self.team.leads:
                cut_metrics(folder.metrics_file, -1)
                folder.data_file.unlink(missing_ok=True)
            return ""
        checkpoint = read_checkpoint(folder.last)
        images, data = checkpoint.info.data.train_images, self.task.describe(self.progress).data
        changed = ""
        if data.train_images != images:
            changed = f"'{folder.path}' was trained on {images:,} images, but '{data.name}' has {data.train_images:,}"
        elif self.team.leads and (digest := self.task.digest_data()) is not None:
            found = folder.compare_data(digest)
            changed = f"'{data.name}' has changed since '{folder.path}' began: {found}" if found else ""
        if changed and not accept_changed_data:
            raise DataError(f"{changed}; use the same images, start a new run, or resume with --accept-changed-data")
        state = load_training_state(checkpoint)
        try:
            self.restore(load_weights(checkpoint, self.task.device).state_dict(), state)
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            reason = " ".join(f"{type(error).__name__} {error}".split())[:200]
            problem = f"does not fit its weights or this version of lintx: {reason}"
            raise CheckpointError(f"the training state in '{checkpoint.path}' {problem}") from None
        self._saved = self.progress.marks
        if self.team.leads:
            cut_metrics(folder.metrics_file, self.progress.step, validated=self.progress.is_validated)
            if changed:  # the images are recorded again
                folder.data_file.unlink(missing_ok=True)
        return f"{changed}, which is accepted" if changed else ""

    def _check_is_due(self) -> bool:
        every, last = self.task.settings.check_every, self.progress.checked_seconds
        return every is not None and self.progress.elapsed_seconds - last >= (every if last else every / 2)

    def _evaluation_is_due(self, finished: bool, checked: bool) -> bool:
        step, settings = self.progress.step, self.task.settings
        if finished:
            return not self.progress.is_validated
        due = checked if settings.check_every is not None else step % settings.evaluate_every == 0
        return step != self.progress.evaluated_at and (due or self.progress.evaluated_at < 0)

    def _sample_is_due(self, finished: bool, checked: bool) -> bool:
        step, settings = self.progress.step, self.task.settings
        every = settings.sample_every
        due = checked if settings.check_every is not None else every and step % every == 0
        return every > 0 and step != self.progress.sampled_at and bool(finished or due)

    def _save_is_due(self, ending: bool) -> bool:
        if self.folder is None or self.progress.marks == self._saved:
            return False
        timed = self.task.settings.check_every is not None and self._saved is not None
        return ending or (not timed and self.progress.step % self.task.settings.save_every == 0)

    def _diverged(self, what: str) -> TrainingError:
        """Return the error for weights whose loss is NaN. If they were saved, the save before them is put back."""
        folder = self.folder
        if folder is None:
            return TrainingError(what)
        step, good = self.progress.step, f"the last good checkpoint is '{folder.last}'"
        saved = self._saved is not None and self._saved[0] == step
        if saved and not self.team.from_leader(lambda: folder.put_back_previous(step)):
            good = f"there is no good checkpoint: '{folder.last}' is the first"
        elif not holds_checkpoint(folder.last):
            good = "there is no checkpoint yet"
        return TrainingError(f"{what}; {good}; try a lower --learning-rate")

    def _leave(self, signal_number: int) -> None:
        self.team.wait()  # if a process ended now, torchrun would also end the process that is saving
        done = f"Stopped at step {self.progress.step}"
        if self.folder is not None:
            done = f"{done}, saved; continue with: lintx train --resume '{self.folder.path}'"
        raise Interrupted(done, signal_number)

    def _watch_loss(self, nats: float, reporter: Reporter) -> None:
        """If the loss has jumped, warn, and keep the save from before the jump, which later saves would replace."""
        trend, step, folder = self.progress.loss, self.progress.step - 1, self.folder
        self.progress = replace(self.progress, loss=trend.follow(nats))
        if folder is None or not self.team.leads:
            return
        if self.progress.loss.high and not trend.high:
            try:
                kept = f"is kept in '{folder.keep_before_spike(step)}'"
            except LintxError as error:
                kept = f"could not be kept: {error}"
            jump = f"from {trend.mean / math.log(2):.3f} to {nats / math.log(2):.3f} {self.task.words.bits}"
            place = f"at step {step}, {self.task.describe_batch(step)}"
            reporter.on_spike(f"the loss jumped {jump} {place}; the save before it {kept}")
        if self._saved is not None and self._saved[0] == step:
            folder.drop_previous()  # the loss of the weights in last/ is known now

    def _log(self, reporter: Reporter, step: Step, steps_per_second: float, share: float) -> None:
        settings, progress = self.task.settings, self.progress
        row = MetricsRow(
            step=progress.step,
            images=progress.images_seen,
            learning_rate=step.learning_rate,
            train_bits_per_dim=progress.interval_nats / progress.interval_steps / math.log(2),
            gradient_norm=step.gradient_norm,
            elapsed_seconds=round(progress.elapsed_seconds, 3),
            images_per_second=round(steps_per_second * settings.batch * settings.accumulation, 3),
            peak_memory_bytes=measure_peak_memory(self.task.device),
        )
        self.progress = replace(progress, interval_nats=0.0, interval_steps=0)
        self._append(row)
        if self.team.leads:
            reporter.on_step(row, share)

    def _append(self, row: MetricsRow) -> None:
        if self.folder is not None and self.team.leads:
            self.folder.require_lock()
            append_row(self.folder.metrics_file, row)
            for log in self.logs:
                log.append(row)

    def _evaluate(self, reporter: Reporter, stop: StopRequest) -> None:
        bits = self.team.from_leader(lambda: self.task.validate(self.evaluated_model, stop.raise_if_set))
        if bits is None:
            return
        if not math.isfinite(bits.bits_per_dim):
            place = f"at step {self.progress.step}"
            raise self._diverged(f"the validation {self.task.words.bits} are NaN or infinite {place}")
        best = self.progress.best_bits_per_dim
        is_best = best is None or bits.bits_per_dim < best
        self.progress = replace(
            self.progress,
            validation_bits_per_dim=bits.bits_per_dim,
            validation_standard_error=bits.standard_error,
            best_bits_per_dim=bits.bits_per_dim if is_best else best,
            worse_validations=0 if is_best else self.progress.worse_validations + 1,
            evaluated_at=self.progress.step,
        )
        row = MetricsRow(
            step=self.progress.step,
            images=self.progress.images_seen,
            validation_bits_per_dim=bits.bits_per_dim,
            validation_standard_error=bits.standard_error,
            elapsed_seconds=round(self.progress.elapsed_seconds, 3),
        )
        self._append(row)
        if self.team.leads:
            if self.folder is not None and is_best:
                self._save(self.folder.best)
            reporter.on_evaluate(self.progress, bits, is_best)

    def _sample(self, reporter: Reporter, stop: StopRequest) -> None:
        if self.folder is None:
            return
        path = self.folder.samples / f"step-{self.progress.step:07d}"
        where = path, self.progress, stop.raise_if_set
        drawn = self.team.from_leader(lambda: self.task.draw(self.evaluated_model, *where))
        self.progress = replace(self.progress, sampled_at=self.progress.step)
        if drawn is not None and self.team.leads:
            for log in self.logs:
                log.append_samples(drawn, self.progress.step)
            reporter.on_sample(drawn)

    def _save_last(self, reporter: Reporter) -> None:
        folder = self.folder
        assert folder is not None
        self._saved = self.progress.marks
        if not self.team.leads:
            return
        folder.require_lock()
        with contextlib.suppress(LintxError):  # keeping the previous save is only a precaution
            folder.hold_previous()
        self._save(folder.last, self.collect_state())
        folder.keep(self.progress.step, self.task.settings.keep_last)
        reporter.on_save(folder.last, self.progress)

    def _save(self, folder: Path, state: TrainingState | None = None) -> None:
        save_checkpoint(folder, cast(PixelModel, self.evaluated_model), self.task.describe(self.progress), state)
