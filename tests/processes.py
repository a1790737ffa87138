"""The script that tests run in two processes: `python -m torch.distributed.run ... tests/processes.py WHAT ...`.

If WHAT is `train FOLDER`, the script trains in several ways and compares the results with those of one process. If
WHAT is `dying STEP`, it runs the command line and kills the second process before training step or image STEP.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from training_runs import Watcher

from linformer_cli.checkpoint_files import TRAINING, WEIGHTS
from linformer_cli.cli.app import main
from linformer_cli.config import DataConfig, ImageShape, ModelConfig, RunConfig, TrainConfig
from linformer_cli.data.glyphs import draw_glyphs
from linformer_cli.data.images import ImageSet
from linformer_cli.errors import Interrupted
from linformer_cli.sampling.numbered import NumberedImages
from linformer_cli.system.distributed import ALONE, Team, end_process, join_team, process_rank
from linformer_cli.system.signals import StopRequest
from linformer_cli.training.learner import Learner, Step
from linformer_cli.training.loop import Trainer
from linformer_cli.training.optimizer import build_average
from linformer_cli.training.pixel_task import PixelTask
from linformer_cli.training.run_folder import RunFolder

STEPS = 9
IMAGES = ImageSet("glyphs", "train", *draw_glyphs("train", 8, 0, 30))
SIZES = {"layers": 2, "heads": 2, "width": 16, "head_width": 8, "feed_forward": 32}
MODEL = ModelConfig(attention_options={"chunk": 16}, image=ImageShape(height=8, width=8, levels=16), **SIZES)
# A batch of five images is split into two and three.
LENGTHS = {"steps": STEPS, "warmup_steps": 2, "log_every": 2, "evaluate_every": 4, "save_every": 4}
TRAIN = TrainConfig(batch=5, accumulation=2, learning_rate=1e-2, ema=0.9, **LENGTHS)


def build(folder: Path, team: Team, precision: str = "fp32", **model: Any) -> Trainer[PixelTask]:
    config = RunConfig(model=MODEL.model_copy(update=model), data=DataConfig(name="glyphs"), train=TRAIN)
    run = RunFolder(folder)
    if team.leads and not run.config_file.exists():
        run.create(config)
    return Trainer(PixelTask(config, (IMAGES, IMAGES), "cpu", precision), run, team)


class StopAt(StopRequest):
    """A stop request that arrives as soon as `trainer` has taken `step` steps."""

    def __init__(self, trainer: Trainer[PixelTask], step: int | None) -> None:
        self.trainer, self.step = trainer, step

    @property
    def signal_number(self) -> int | None:  # type: ignore[override]
        return signal.SIGTERM if self.step is not None and self.trainer.progress.step >= self.step else None


def train_until(folder: Path, team: Team, step: int, **settings: Any) -> None:
    """Start or resume the run in `folder` and stop at step `step`; only the last process receives the stop signal."""
    trainer = build(folder, team, **settings)
    team.wait()
    if (folder / "last").exists():
        trainer.resume()
    team.wait()
    last = team.rank == team.count - 1
    try:
        trainer.run(Watcher(), StopAt(trainer, step if last and step < STEPS else None))
    except Interrupted:
        assert step < STEPS
    assert trainer.progress.step == step


def largest_difference(ours: Path, theirs: Path) -> float:
    """Return the largest difference between the last saves of two runs.

    Weights, averaged weights and optimizer states are compared.
    """
    found = 0.0
    for name in (WEIGHTS, TRAINING):
        left, right = (load_file(run / "last" / name) for run in (ours, theirs))
        assert left.keys() == right.keys()
        for key in left.keys() - {"random.cpu"}:
            found = max(found, float((left[key].double() - right[key].double()).abs().max()))
    return found


def check_one_large_batch(folder: Path, team: Team, **model: Any) -> None:
    """Check that gradients and weights equal those of one process.

    The check uses float64, where the order of sums matters little.
    """
    trainers = [
        build(folder / f"of-{each.count}", each, **model) for each in ((team, ALONE) if team.leads else (team,))
    ]
    for trainer in trainers:
        trainer.average = build_average(trainer.task.model.double(), trainer.task.settings)
    shared = trainers[0]
    steps = [shared.train_step()]
    gradients = [None if found.grad is None else found.grad.clone() for found in shared.task.model.parameters()]
    for _ in range(3):
        shared.train_step()
    if team.leads:
        alone = trainers[1]
        steps.append(alone.train_step())
        for ours, parameter in zip(gradients, alone.task.model.parameters(), strict=True):
            assert (ours is None) == (parameter.grad is None)
            if parameter.grad is not None:
                torch.testing.assert_close(ours, parameter.grad, rtol=1e-9, atol=1e-12)
        ours, theirs = (torch.tensor([step.nats, step.gradient_norm], dtype=torch.float64) for step in steps)
        assert min(*ours, *theirs) > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=0)
        for _ in range(3):
            alone.train_step()
        torch.testing.assert_close(shared.task.model.state_dict(), alone.task.model.state_dict(), rtol=0, atol=1e-8)


def check_training(folder: Path) -> None:
    with join_team() as team:
        assert team.count == 2
        check_one_large_batch(folder / "batch", team)
        # With chunks longer than the image, some parameters get no gradient.
        check_one_large_batch(folder / "idle", team, attention="flash", attention_options={})
        # The run uses two processes, then one, then two again.
        train_until(folder / "whole", team, STEPS)
        train_until(folder / "moved", team, 3)
        if team.leads:
            train_until(folder / "moved", ALONE, 6)
        team.wait()
        train_until(folder / "moved", team, STEPS)
        # With the same number of processes, a resumed run has the same dropout and the same sums in any precision.
        for name, steps in (("dropout", [STEPS]), ("dropout-stopped", [4, 5, STEPS])):
            for step in steps:
                train_until(folder / name, team, step, dropout=0.2, precision="bf16")
        drawn = team.gather(float(torch.rand(())))
        assert drawn[0] != drawn[1], "both processes use the same dropout mask"
        if team.leads:
            train_until(folder / "alone", ALONE, STEPS)
            pairs = {"whole": "alone", "moved": "whole", "dropout-stopped": "dropout"}
            found = {name: largest_difference(folder / name, folder / other) for name, other in pairs.items()}
            (folder / "differences.json").write_text(json.dumps(found))


def die_at(number: int) -> None:
    """Kill this process before it takes step `number` or writes image `number`."""
    step, write = Learner.train_step, NumberedImages.write

    def dying_step(learner: Learner[PixelTask], share: float) -> Step:
        if learner.progress.step == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(learner, share)

    def dying_write(folder: NumberedImages, index: int, image: Any) -> None:
        if index >= number:
            os.kill(os.getpid(), signal.SIGKILL)
        write(folder, index, image)

    Learner.train_step = dying_step  # type: ignore[method-assign]
    NumberedImages.write = dying_write  # type: ignore[method-assign]


if __name__ == "__main__":
    what, argument, *rest = sys.argv[1:]
    if what == "train":
        check_training(Path(argument))
        end_process(0)
    else:
        if process_rank() == 1:
            die_at(int(argument))
        sys.argv = ["lintx", *rest]
        main()
