"""The finished share of a run, and the learning rate at that share. These are pure functions."""

import math

from linformer_cli.config import TrainConfig

# With the `trapezoid` schedule, the learning rate falls over this last share of a run.
FALL = 0.25


def measure_progress(config: TrainConfig, step: int, elapsed_seconds: float, train_images: int) -> float:
    """Return the finished share of the run in [0, 1], measured in steps, images or time."""
    if config.max_time is not None:
        done = elapsed_seconds / config.max_time
    elif config.steps is not None:
        done = step / config.steps
    else:
        assert config.epochs is not None
        done = step * config.batch * config.accumulation / (config.epochs * train_images)
    return min(done, 1.0)


def learning_rate_at(config: TrainConfig, step: int, progress: float) -> float:
    """Return the learning rate after `step` steps, when the finished share of the run is `progress` in [0, 1].

    After a linear warm-up, the rate follows half a `cosine`, or a `trapezoid` (constant, then linear over the last
    quarter), or is `constant`. Before the last quarter, the rate of a trapezoid does not depend on the length of the
    run, so the run can be extended.
    """
    falling = {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "trapezoid": min(1.0, (1 - progress) / FALL),
        "constant": 1.0,
    }[config.schedule]
    floor = config.final_learning_rate_fraction
    warm = min(1.0, (step + 1) / (config.warmup_steps + 1))
    return config.learning_rate * warm * (floor + (1 - floor) * falling)
