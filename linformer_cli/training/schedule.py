"""How far a run has come, and the learning rate there. Pure functions."""

import math

from linformer_cli.config import TrainConfig


def measure_progress(config: TrainConfig, step: int, elapsed_seconds: float, train_images: int) -> float:
    """The finished share of the run in [0, 1]: of its steps, of its epochs' images, or of its time."""
    if config.max_time is not None:
        done = elapsed_seconds / config.max_time
    elif config.steps is not None:
        done = step / config.steps
    else:
        assert config.epochs is not None
        done = step * config.batch * config.accumulation / (config.epochs * train_images)
    return min(done, 1.0)


def learning_rate_at(config: TrainConfig, step: int, progress: float) -> float:
    """The learning rate of the step after `step` steps: linear warm-up, then a half cosine over `progress`."""
    rate = config.learning_rate
    if config.schedule == "cosine":
        floor = config.final_learning_rate_fraction
        rate *= floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
    return rate * min(1.0, (step + 1) / (config.warmup_steps + 1))
