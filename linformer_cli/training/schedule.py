"""How far a run has come, and the learning rate there. Pure functions."""

import math

from linformer_cli.config import TrainConfig

# The share of a run, its last, in which the rate of a trapezoid falls.
FALL = 0.25


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
    """The learning rate of the step after `step` steps, of a run that is `progress` in [0, 1] on its way.

    After a linear warm-up it is a half `cosine`, a `trapezoid` (constant, then a straight fall over the last quarter)
    or `constant`. A run whose trapezoid has not yet begun to fall can be made longer as if it had always been so.
    """
    falling = {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "trapezoid": min(1.0, (1 - progress) / FALL),
        "constant": 1.0,
    }[config.schedule]
    floor = config.final_learning_rate_fraction
    warm = min(1.0, (step + 1) / (config.warmup_steps + 1))
    return config.learning_rate * warm * (floor + (1 - floor) * falling)
