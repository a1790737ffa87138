"""How far a run has come, how its loss moves, and who is told."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from linformer_cli.evaluation.bits import Bits
from linformer_cli.metrics import MetricsRow

# How many steps the trend of the loss looks back, and how many it needs before it says anything.
_TREND_STEPS = 50


@dataclass(frozen=True)
class LossTrend:
    """Running mean and mean deviation of a step's loss in nats, and whether the loss stands far above them."""

    steps: int = 0
    mean: float = 0.0
    deviation: float = 0.0
    high: bool = False

    def follow(self, nats: float) -> "LossTrend":
        """After one more step. A loss counts as high from half the mean and ten mean deviations above the mean on."""
        excess = nats - self.mean
        # A young trend knows neither mean nor deviation.
        high = self.steps >= _TREND_STEPS and excess > max(0.5 * self.mean, 10 * self.deviation)
        if high:
            # What is far off moves the trend as far as what is just not: a lasting new level is normal in the end.
            excess = max(0.5 * self.mean, 10 * self.deviation)
        weight = 1 / min(self.steps + 1, _TREND_STEPS)
        return LossTrend(
            self.steps + 1,
            self.mean + weight * excess,
            self.deviation + weight * (abs(excess) - self.deviation),
            high,
        )


@dataclass(frozen=True)
class Progress:
    """Everything about a run that is not a tensor; saved with it. `interval_*` add up what was not logged yet."""

    step: int = 0
    images_seen: int = 0
    elapsed_seconds: float = 0.0
    best_bits_per_dim: float | None = None
    validation_bits_per_dim: float | None = None
    validation_standard_error: float | None = None
    evaluated_at: int = 0
    sampled_at: int = 0
    interval_nats: float = 0.0
    interval_steps: int = 0
    loss: LossTrend = LossTrend()

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Progress":
        """Back from `dataclasses.asdict`; raises `TypeError` for what is none."""
        return cls(**{**values, "loss": LossTrend(**values.get("loss", {}))})

    @property
    def marks(self) -> tuple[int, int, int]:
        """What tells one moment of a run from another."""
        return self.step, self.evaluated_at, self.sampled_at

    @property
    def is_validated(self) -> bool:
        """Whether the validation is that of this step's weights, and not of earlier ones."""
        return self.validation_bits_per_dim is not None and self.evaluated_at == self.step


class Reporter(Protocol):
    """Who is told what happens; the command line's is a progress line."""

    def on_step(self, row: MetricsRow, finished_share: float) -> None: ...
    def on_evaluate(self, progress: Progress, bits: Bits, is_best: bool) -> None: ...
    def on_sample(self, path: Path) -> None: ...
    def on_save(self, path: Path, progress: Progress) -> None: ...
    def on_spike(self, message: str) -> None: ...


class Silence:
    """A `Reporter` that tells no one."""

    def on_step(self, row: MetricsRow, finished_share: float) -> None:
        pass

    def on_evaluate(self, progress: Progress, bits: Bits, is_best: bool) -> None:
        pass

    def on_sample(self, path: Path) -> None:
        pass

    def on_save(self, path: Path, progress: Progress) -> None:
        pass

    def on_spike(self, message: str) -> None:
        pass
