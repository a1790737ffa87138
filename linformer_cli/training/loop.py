"""The training loop: evaluate, sample, save, stop if requested, train.

A resumed run gives the same result as an uninterrupted run.
"""

import contextlib
import math
import time
from dataclasses import replace
from pathlib import Path

from linformer_cli.checkpoint import load_training_state, load_weights, read_checkpoint, save_checkpoint
from linformer_cli.config import RunConfig
from linformer_cli.data.images import ImageSet
from linformer_cli.errors import CheckpointError, DataError, Interrupted, LintxError, TrainingError
from linformer_cli.evaluation.bits import measure_nats
from linformer_cli.files import write_file
from linformer_cli.metrics import MetricsRow, append_row, cut_metrics
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.report.grids import encode_png, render_grid
from linformer_cli.report.terminal import render_windows
from linformer_cli.sampling.decode import Sampler
from linformer_cli.system.distributed import ALONE, Team
from linformer_cli.system.memory import is_out_of_memory, measure_peak_memory
from linformer_cli.system.signals import StopRequest
from linformer_cli.units import WINDOWS

from .learner import Learner
from .optimizer import build_average
from .progress import Progress, Reporter
from .run_folder import RunFolder
from .saving import collect_state, describe_run
from .schedule import learning_rate_at, measure_progress
from .takeover import Takeover, take_over


class Trainer(Learner):
    """A run: a learner with a folder, a schedule and progress.

    `precision` is kept in `config`. `images` are the training and the validation images. Only rank 0 of a `team`
    validates, samples, writes and reports. Raises the errors of `Learner`.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        images: tuple[ImageSet, ImageSet],
        device: str,
        precision: str,
        team: Team = ALONE,
    ) -> None:
        # A run keeps the precision that "auto" chose, even if it is resumed on another machine.
        settings = config.train.model_copy(update={"precision": precision})
        training, self.validation = images
        super().__init__(config.model_copy(update={"train": settings}), training, device, precision, team)
        classes = config.model.required_classes
        self.validation_labels = self.validation.require_labels(classes) if classes else None
        self.folder = folder
        self.progress = Progress()
        # The progress at the save in last/. A new run has no save, so it saves before its first step.
        self._saved: tuple[int, int, int, bool] | None = None

    def take_over(self, source: PixelModel) -> Takeover:
        """Start from every tensor of `source` that fits. The result is validated before the first step."""
        moved = take_over(self.model, source)
        self.average = build_average(self.model, self.config.train)
        self.progress = replace(self.progress, evaluated_at=-1)
        return moved

    def resume(self) -> None:
        """Restore the contents of `last/`: weights, optimizer, position in the data, random state, metrics.

        A run that was killed before its first save starts again. Raises `DataError` if the number of training images
        has changed, and `CheckpointError` if the save is damaged.
        """
        if self.folder.is_untouched:
            if self.config.init_from is not None:
                raise CheckpointError(f"'{self.folder.path}' was killed before its first save; start it again")
            if self.team.leads:
                cut_metrics(self.folder.metrics_file, -1)
            return
        checkpoint = read_checkpoint(self.folder.last)
        images, now = checkpoint.info.data.train_images, len(self.train_set)
        if now != images:
            raise DataError(
                f"'{self.folder.path}' was trained on {images:,} images, but '{self.train_set.name}' now has {now:,}; "
                "use the same images, or start a new run"
            )
        state = load_training_state(checkpoint)
        try:
            self.restore(load_weights(checkpoint, self.device), state)
            self.progress = Progress.from_values(state.values)
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            reason = " ".join(f"{type(error).__name__} {error}".split())[:200]
            raise CheckpointError(
                f"the training state in '{checkpoint.path}' does not fit its weights or this version of lintx: {reason}"
            ) from None
        self._saved = self.progress.marks
        if self.team.leads:
            cut_metrics(self.folder.metrics_file, self.progress.step, validated=self.progress.is_validated)

    def run(self, reporter: Reporter, stop: StopRequest) -> Progress:
        """Train to the end of the schedule. If `stop` is set, save and raise `Interrupted`."""
        settings = self.config.train
        started = time.monotonic() - self.progress.elapsed_seconds
        timed_steps, timed_seconds = 0, 0.0
        while True:
            step = self.progress.step
            # All processes use the leader's time, so that all end after the same step.
            elapsed_seconds = self.team.from_leader(lambda: time.monotonic() - started)
            self.progress = replace(self.progress, elapsed_seconds=elapsed_seconds)
            share = measure_progress(settings, step, self.progress.elapsed_seconds, len(self.train_set))
            finished = share >= 1
            try:
                if self._evaluation_is_due(finished):
                    self._evaluate(reporter, stop)
                if self._sample_is_due(finished):
                    self._sample(reporter, stop)
            except Interrupted:
                pass  # --resume repeats the interrupted evaluation or grid
            stopped = self.team.most(stop.signal_number or 0)
            if self.progress.marks != self._saved and (finished or stopped or step % settings.save_every == 0):
                self._saved = self.progress.marks
                if self.team.leads:
                    self._save_last(reporter)
            if stopped:
                self.team.wait()  # if a process ended now, torchrun would also end the process that is saving
                raise Interrupted(
                    f"Stopped at step {step}, saved; continue with: lintx train --resume '{self.folder.path}'", stopped
                )
            if finished:
                if self.team.leads:
                    self.folder.drop_previous()
                return self.progress

            began = time.perf_counter()
            rate = learning_rate_at(settings, step, share)
            try:
                nats, gradient_norm = self.train_step(self.progress, rate)
            except TrainingError as error:
                raise self._diverged(str(error)) from None
            # Only training steps are timed: the speed should not depend on validation, samples or saves.
            timed_steps, timed_seconds = timed_steps + 1, timed_seconds + time.perf_counter() - began
            self._watch_loss(nats, reporter)
            self.progress = replace(
                self.progress,
                step=step + 1,
                images_seen=self.progress.images_seen + settings.batch * settings.accumulation,
                interval_nats=self.progress.interval_nats + nats,
                interval_steps=self.progress.interval_steps + 1,
            )
            if (step + 1) % settings.log_every == 0:
                self.progress = replace(self.progress, elapsed_seconds=time.monotonic() - started)
                self._log(reporter, rate, gradient_norm, timed_steps / timed_seconds, share)
                timed_steps, timed_seconds = 0, 0.0

    def _evaluation_is_due(self, finished: bool) -> bool:
        if finished:
            return not self.progress.is_validated
        step = self.progress.step
        return step != self.progress.evaluated_at and step % self.config.train.evaluate_every == 0

    def _sample_is_due(self, finished: bool) -> bool:
        every, step = self.config.train.sample_every, self.progress.step
        return every > 0 and step != self.progress.sampled_at and (finished or step % every == 0)

    def _diverged(self, what: str) -> TrainingError:
        return TrainingError(f"{what}; the last good checkpoint is '{self.folder.last}'; try a lower --learning-rate")

    def _watch_loss(self, nats: float, reporter: Reporter) -> None:
        """If the loss has jumped, warn, and keep the save from before the jump, which later saves would replace."""
        trend = self.progress.loss
        self.progress = replace(self.progress, loss=trend.follow(nats))
        if not self.team.leads:
            return
        if self.progress.loss.high and not trend.high:
            try:
                kept = f"is kept in '{self.folder.keep_before_spike(self.progress.step)}'"
            except LintxError as error:
                kept = f"could not be kept: {error}"
            reporter.on_spike(
                f"the loss jumped from {trend.mean / math.log(2):.3f} to {nats / math.log(2):.3f} "
                f"{self.config.data.words.bits} at step {self.progress.step}, {self.describe_batch(self.progress)}; "
                f"the save before it {kept}"
            )
        if self._saved is not None and self._saved[0] == self.progress.step:
            self.folder.drop_previous()  # the loss of the weights in last/ is known now

    def _log(self, reporter: Reporter, rate: float, norm: float, steps_per_second: float, share: float) -> None:
        settings, progress = self.config.train, self.progress
        row = MetricsRow(
            step=progress.step,
            images=progress.images_seen,
            learning_rate=rate,
            train_bits_per_dim=progress.interval_nats / progress.interval_steps / math.log(2),
            gradient_norm=norm,
            elapsed_seconds=round(progress.elapsed_seconds, 3),
            images_per_second=round(steps_per_second * settings.batch * settings.accumulation, 3),
            peak_memory_bytes=measure_peak_memory(self.device),
        )
        self.progress = replace(progress, interval_nats=0.0, interval_steps=0)
        if self.team.leads:
            append_row(self.folder.metrics_file, row)
            reporter.on_step(row, share)

    def _evaluate(self, reporter: Reporter, stop: StopRequest) -> None:
        """Measure bits/dim on the first validation images, and save the weights if they are the best so far.

        Raises `Interrupted` if `stop` is set.
        """
        images, labels = self.validation.images[: self.config.train.evaluate_images], self.validation_labels
        model = self.evaluated_model
        bits = self.team.from_leader(
            lambda: measure_nats(model, images, before_batch=stop.raise_if_set, labels=labels).describe()
        )
        if not math.isfinite(bits.bits_per_dim):
            raise self._diverged(
                f"the validation {self.config.data.words.bits} are NaN or infinite at step {self.progress.step}"
            )
        best = self.progress.best_bits_per_dim
        is_best = best is None or bits.bits_per_dim < best
        self.progress = replace(
            self.progress,
            validation_bits_per_dim=bits.bits_per_dim,
            validation_standard_error=bits.standard_error,
            best_bits_per_dim=bits.bits_per_dim if is_best else best,
            evaluated_at=self.progress.step,
        )
        row = MetricsRow(
            step=self.progress.step,
            images=self.progress.images_seen,
            validation_bits_per_dim=bits.bits_per_dim,
            validation_standard_error=bits.standard_error,
            elapsed_seconds=round(self.progress.elapsed_seconds, 3),
        )
        if self.team.leads:
            append_row(self.folder.metrics_file, row)
            if is_best:
                self._save(self.folder.best, with_state=False)
            reporter.on_evaluate(self.progress, bits, is_best)

    def _sample(self, reporter: Reporter, stop: StopRequest) -> None:
        """Write samples, always from the same random streams. Raises `Interrupted` if `stop` is set."""
        self.team.from_leader(lambda: self._write_samples(reporter, stop))
        self.progress = replace(self.progress, sampled_at=self.progress.step)

    def _write_samples(self, reporter: Reporter, stop: StopRequest) -> None:
        model, count = self.evaluated_model, self.config.train.sample_images
        model.eval()
        try:
            images = Sampler(model, self.config.train.seed).sample_images(count, before_step=stop.raise_if_set)
        finally:
            model.train()
        path = self.folder.samples / f"step-{self.progress.step:07d}.png"
        if self.config.data.words is WINDOWS:
            path = path.with_suffix(".txt")
            write_file(path, render_windows([window.tobytes() for window in images]).encode())
        else:
            facts = {"step": self.progress.step, "images_seen": self.progress.images_seen}
            write_file(path, encode_png(render_grid(images), facts))
        reporter.on_sample(path)

    def _save_last(self, reporter: Reporter) -> None:
        with contextlib.suppress(LintxError):  # keeping the previous save is only a precaution
            self.folder.hold_previous()
        self._save(self.folder.last, with_state=True)
        self.folder.keep(self.progress.step, self.config.train.keep_last)
        reporter.on_save(self.folder.last, self.progress)

    def _save(self, folder: Path, with_state: bool) -> None:
        state = None
        if with_state:
            state = collect_state(self.model, self.average, self.optimizer, self.progress, self.device)
        info = describe_run(self.config, self.progress, self.train_set, self.validation)
        save_checkpoint(folder, self.evaluated_model, info, state)
