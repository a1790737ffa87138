"""The training loop: evaluate, sample, save, stop?, train. It reads top to bottom and resumes exactly."""

import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module

from linformer_cli.checkpoint import (
    Checkpoint,
    TrainingState,
    load_training_state,
    load_weights,
    read_checkpoint,
    save_checkpoint,
)
from linformer_cli.config import RunConfig
from linformer_cli.data.batches import Batches, shift_images
from linformer_cli.data.images import ImageSet
from linformer_cli.data.sequence import images_to_values
from linformer_cli.errors import CheckpointError, DataError, Interrupted, LintxError, TrainingError
from linformer_cli.evaluation.bits import measure_bits
from linformer_cli.files import write_file
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.report.grids import encode_png, render_grid
from linformer_cli.sampling.decode import Sampler
from linformer_cli.system.device import synchronize
from linformer_cli.system.distributed import ALONE, Team, keep_own
from linformer_cli.system.memory import is_out_of_memory, measure_peak_memory
from linformer_cli.system.signals import StopRequest

from .optimizer import build_average, build_optimizer, load_optimizer_tensors, strip_prefix
from .progress import Progress, Reporter, Silence
from .run_folder import RunFolder
from .saving import AVERAGED, IN_TRAINING, collect_state, describe_run, restore_random_state
from .schedule import learning_rate_at, measure_progress
from .takeover import Takeover, take_over
from .together import seed_own_dropout, share_batch, share_model


def build_model(config: RunConfig) -> PixelModel:
    """The untrained model of a run: its weights depend on the seed alone."""
    torch.manual_seed(config.train.seed)
    return PixelModel(config.model)


class Trainer:
    """A run under way: model, optimizer, place in the data, and progress. `config` has the precision it is trained in.

    Each process of a `team` trains on its share of every batch, and all have the same weights after it. Rank 0 alone
    validates, samples, writes and reports. Raises `UsageError` for a batch with fewer images than processes, and for
    images of another size than the model's.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        train: ImageSet,
        validation: ImageSet,
        device: str,
        precision: str,
        team: Team = ALONE,
    ) -> None:
        # What "auto" became belongs to the run, which goes on so on any machine.
        settings = config.train.model_copy(update={"precision": precision})
        self.config, self.folder, self.device = config.model_copy(update={"train": settings}), folder, device
        self.team, self.own_batch = team.on(device), share_batch(team, config.train.batch)
        train.require_shape(config.model.image)
        self.train_set, self.validation = train, validation
        classes = config.model.classes
        self.labels = train.require_labels(classes) if classes else None
        self.validation_labels = validation.require_labels(classes) if classes else None
        self.autocast = precision == "bf16"
        self.batches = Batches(len(train), config.train.seed)
        self.model = build_model(config).to(device).train()
        self.optimizer = build_optimizer(self.model, config.train)
        self.average = build_average(self.model, config.train)
        self.progress = Progress()
        self._likelihood: Module | None = None
        # What last/ holds; a new run has none, and saves before its first step.
        self._saved: tuple[int, int, int] | None = None

    def take_over(self, source: PixelModel) -> Takeover:
        """Begin with every tensor of `source` that fits; what that gives is validated before the first step."""
        moved = take_over(self.model, source)
        self.average = build_average(self.model, self.config.train)
        self.progress = replace(self.progress, evaluated_at=-1)
        return moved

    def resume(self) -> None:
        """Go back to where `last/` was saved: weights, optimizer, place in the data, random state, metrics.

        A run that was killed before its first save begins anew. Raises `DataError` where the training images are not as
        many as they were.
        """
        if self.folder.is_untouched:
            if self.config.init_from is not None:
                raise CheckpointError(f"'{self.folder.path}' was killed before its first save; begin it again")
            if self.team.leads:
                self.folder.cut_metrics(-1)
            return
        checkpoint = read_checkpoint(self.folder.last)
        images, now = checkpoint.info.data.train_images, len(self.train_set)
        if now != images:
            raise DataError(
                f"'{self.folder.path}' has {images:,} training images, '{self.train_set.name}' holds {now:,} now; give "
                "it the same images, or start a new run"
            )
        state = load_training_state(checkpoint)
        try:
            self._restore(checkpoint, state)
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            reason = " ".join(f"{type(error).__name__} {error}".split())[:200]
            raise CheckpointError(
                f"the training state in '{checkpoint.path}' does not belong to its weights or to this lintx: {reason}"
            ) from None
        self._saved = self.progress.marks
        if self.team.leads:
            self.folder.cut_metrics(self.progress.step, validated=self.progress.is_validated)

    def _restore(self, checkpoint: Checkpoint, state: TrainingState) -> None:
        self.model, self._likelihood = load_weights(checkpoint, self.device).train(), None
        self.average = build_average(self.model, self.config.train)
        if self.average is not None:
            # The checkpoint's weights are the average; those in training lie beside the optimizer's state.
            self.average.n_averaged.fill_(state.values.pop(AVERAGED))
            self.model.load_state_dict(strip_prefix(state.tensors, IN_TRAINING))
        self.optimizer = build_optimizer(self.model, self.config.train)
        load_optimizer_tensors(self.optimizer, state.tensors)
        restore_random_state(state.tensors, self.device)
        self.progress = Progress.from_values(state.values)

    def run(self, reporter: Reporter, stop: StopRequest) -> Progress:
        """Train to the end of the schedule. Raises `Interrupted` after saving, when `stop` is set."""
        settings = self.config.train
        reporter = reporter if self.team.leads else Silence()
        started = time.monotonic() - self.progress.elapsed_seconds
        timed_steps, timed_seconds = 0, 0.0
        while True:
            step = self.progress.step
            # One clock for all, so that all end after the same step.
            elapsed_seconds = self.team.from_leader(lambda: time.monotonic() - started)
            self.progress = replace(self.progress, elapsed_seconds=elapsed_seconds)
            share = measure_progress(settings, step, self.progress.elapsed_seconds, len(self.train_set))
            finished = share >= 1
            try:
                if step != self.progress.evaluated_at and (finished or step % settings.evaluate_every == 0):
                    self._evaluate(reporter, stop)
                if self._sample_is_due(finished):
                    self._sample(reporter, stop)
            except Interrupted:
                pass  # an evaluation or a grid that was given up is made anew after --resume
            stopped = self.team.most(stop.signal_number or 0)
            if self.progress.marks != self._saved and (finished or stopped or step % settings.save_every == 0):
                self._saved = self.progress.marks
                if self.team.leads:
                    with contextlib.suppress(LintxError):  # it is to be safer with it, and no reason to end
                        self.folder.hold_previous()
                    self._save(self.folder.last, with_state=True)
                    self.folder.keep(step, settings.keep_last)
                    reporter.on_save(self.folder.last, self.progress)
            if stopped:
                self.team.wait()  # a process that ends sooner has the one that saves ended, too
                raise Interrupted(
                    f"Stopped at step {step}, saved; continue with: lintx train --resume '{self.folder.path}'", stopped
                )
            if finished:
                if self.team.leads:
                    self.folder.drop_previous()
                return self.progress

            began = time.perf_counter()
            rate = learning_rate_at(settings, step, share)
            nats, gradient_norm = self._train_step(rate)
            # Training alone: validation, samples and saving would make the speed jump.
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

    def _sample_is_due(self, finished: bool) -> bool:
        every, step = self.config.train.sample_every, self.progress.step
        return every > 0 and step != self.progress.sampled_at and (finished or step % every == 0)

    @property
    def evaluated_model(self) -> PixelModel:
        """What is evaluated, sampled from and saved: the average of the weights, where there is one."""
        if self.average is None:
            return self.model
        return cast(PixelModel, self.average.module)

    @property
    def likelihood(self) -> Module:
        """The model, called for the nats of values; its backward pass adds up over all processes."""
        if self._likelihood is None:
            self._likelihood = share_model(self.team, self.model)
        return self._likelihood

    def take_step(self) -> None:
        """One training step as `run` takes it, at the full learning rate and always of the first batch: for timing."""
        self._train_step(self.config.train.learning_rate)
        # What a mechanism does every so many steps is done as often as in a run.
        self.progress = replace(self.progress, step=self.progress.step + 1)

    def time_one_step(self) -> float:
        """Seconds of one training step, after a first one to warm up. Changes the weights: for a dry run."""
        self.take_step()
        synchronize(self.device)
        began = time.perf_counter()
        self.take_step()
        synchronize(self.device)
        return time.perf_counter() - began

    def _train_step(self, rate: float) -> tuple[float, float]:
        """One optimizer step; returns the mean nats of a value and the norm of the gradient before clipping."""
        settings = self.config.train
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.on_training_step(self.progress.step, settings.seed)
        seed_own_dropout(self.team, settings.seed, self.progress.step)
        self.optimizer.zero_grad(set_to_none=True)
        # The gradients of several processes end as their mean, but it is the sum of all shares that makes the batch.
        share = len(self.own_batch) / settings.batch
        total = 0.0
        for part in range(settings.accumulation):
            start = self.progress.images_seen + part * settings.batch + self.own_batch.start
            with keep_own(self.likelihood) if part + 1 < settings.accumulation else contextlib.nullcontext():
                nats = self._mean_nats(start) / settings.accumulation
                (nats * (share * self.team.count)).backward()
            total += float(nats.detach()) * share
        total = self.team.total(total)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip or math.inf))
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise TrainingError(
                f"the loss or its gradient is not a finite number at step {self.progress.step} (loss {total}, gradient "
                f"norm {norm}), {self._describe_batch()}; the last good checkpoint stays in '{self.folder.last}'; "
                "try a lower --learning-rate"
            )
        self.optimizer.step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        return total, norm

    def _watch_loss(self, nats: float, reporter: Reporter) -> None:
        """When the loss has jumped: say so, and keep the last save where the next one does not reach it."""
        trend = self.progress.loss
        self.progress = replace(self.progress, loss=trend.follow(nats))
        if not self.team.leads:
            return
        if self.progress.loss.high and not trend.high:
            try:
                kept = f"stays in '{self.folder.keep_before_spike(self.progress.step)}'"
            except LintxError as error:
                kept = f"could not be kept: {error}"
            reporter.on_spike(
                f"the loss jumped from {trend.mean / math.log(2):.3f} to {nats / math.log(2):.3f} bits/dim at step "
                f"{self.progress.step}, {self._describe_batch()}; what was saved before it {kept}"
            )
        if self._saved is not None and self._saved[0] == self.progress.step:
            self.folder.drop_previous()  # the loss of what `last/` holds is known now

    def _describe_batch(self) -> str:
        """Which images this step is trained on, as the user can find them."""
        settings, start = self.config.train, self.progress.images_seen
        size = settings.batch * settings.accumulation
        epoch, place = divmod(start, len(self.train_set))
        first = ", ".join(str(index) for index in self.batches.batch(start, min(size, 3)))
        return f"batch {place // size + 1} of epoch {epoch + 1} (training images {first}{', ...' if size > 3 else ''})"

    def _mean_nats(self, start: int) -> Tensor:
        settings = self.config.train
        indices = self.batches.batch(start, len(self.own_batch))
        images = self.train_set.images[indices]
        if settings.shift:
            images = shift_images(images, self.batches.shifts(start, len(self.own_batch), settings.shift))
        values = images_to_values(images, self.config.model.image.levels).to(self.device)
        labels = None if self.labels is None else torch.from_numpy(self.labels[indices]).to(self.device)
        with torch.autocast(self.device.partition(":")[0], torch.bfloat16, enabled=self.autocast):
            mean: Tensor = self.likelihood(values, labels).mean()
            return mean

    def _log(self, reporter: Reporter, rate: float, norm: float, steps_per_second: float, share: float) -> None:
        settings, progress = self.config.train, self.progress
        row = {
            "step": progress.step,
            "images": progress.images_seen,
            "learning_rate": rate,
            "train_bits_per_dim": progress.interval_nats / progress.interval_steps / math.log(2),
            "gradient_norm": norm,
            "elapsed_seconds": round(progress.elapsed_seconds, 3),
            "images_per_second": round(steps_per_second * settings.batch * settings.accumulation, 3),
            "peak_memory_bytes": measure_peak_memory(self.device),
        }
        self._append_metrics(row)
        self.progress = replace(progress, interval_nats=0.0, interval_steps=0)
        reporter.on_step(row, share)

    def _evaluate(self, reporter: Reporter, stop: StopRequest) -> None:
        """Bits/dim on the first validation images; a new best is saved at once. Raises `Interrupted` on a stop."""
        images, labels = self.validation.images[: self.config.train.evaluate_images], self.validation_labels
        model = self.evaluated_model
        bits = self.team.from_leader(lambda: measure_bits(model, images, before_batch=stop.raise_if_set, labels=labels))
        if not math.isfinite(bits.bits_per_dim):
            raise TrainingError(
                f"the validation bits/dim are not a finite number at step {self.progress.step}; the last good "
                f"checkpoint stays in '{self.folder.last}'; try a lower --learning-rate"
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
        self._append_metrics(
            {
                "step": self.progress.step,
                "images": self.progress.images_seen,
                "validation_bits_per_dim": bits.bits_per_dim,
                "validation_standard_error": bits.standard_error,
                "elapsed_seconds": round(self.progress.elapsed_seconds, 3),
            }
        )
        if is_best and self.team.leads:
            self._save(self.folder.best, with_state=False)
        reporter.on_evaluate(self.progress, bits, is_best)

    def _sample(self, reporter: Reporter, stop: StopRequest) -> None:
        """A grid of samples, always of the same random streams, so that grids can be compared over time.

        Raises `Interrupted` on a stop.
        """
        self.team.from_leader(lambda: self._write_grid(reporter, stop))
        self.progress = replace(self.progress, sampled_at=self.progress.step)

    def _write_grid(self, reporter: Reporter, stop: StopRequest) -> None:
        model, count = self.evaluated_model, self.config.train.sample_images
        model.eval()
        try:
            images = Sampler(model, self.config.train.seed).sample_images(count, before_step=stop.raise_if_set)
        finally:
            model.train()
        path = self.folder.samples / f"step-{self.progress.step:07d}.png"
        facts = {"step": self.progress.step, "images_seen": self.progress.images_seen}
        write_file(path, encode_png(render_grid(images), facts))
        reporter.on_sample(path)

    def _append_metrics(self, row: Mapping[str, Any]) -> None:
        if self.team.leads:
            self.folder.append_metrics(row)

    def _save(self, folder: Path, with_state: bool) -> None:
        state = None
        if with_state:
            state = collect_state(self.model, self.average, self.optimizer, self.progress, self.device)
        info = describe_run(self.config, self.progress, self.train_set, self.validation)
        save_checkpoint(folder, self.evaluated_model, info, state)
