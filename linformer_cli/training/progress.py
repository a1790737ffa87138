"""The progress of a run, the trend of its loss, and the interface of its reporters."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from linformer_cli.config import LARGEST_STEP, CountOrZero, ImagesSeen
from linformer_cli.errors import shorten
from linformer_cli.metrics import MetricsRow

if TYPE_CHECKING:
    from linformer_cli.evaluation.bits import Bits

# The trend of the loss averages over these steps. Before, no loss counts as high.
_TREND_STEPS = 50
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
# A step, or -1 for "not yet".
_StepOrNone = Annotated[int, Field(ge=-1, le=LARGEST_STEP)]


@dataclass(frozen=True)
class LossTrend:
    """Running mean and mean deviation of the loss in nats, and whether the last loss was far above the mean."""

    __pydantic_config__ = _STRICT

    steps: CountOrZero = 0
    mean: float = 0.0
    deviation: float = 0.0
    high: bool = False

    def follow(self, nats: float) -> "LossTrend":
        """Return the next trend. A loss is high if it exceeds the mean by half the mean and by ten deviations."""
        excess = nats - self.mean
        # The first steps are too few for a reliable mean and deviation.
        high = self.steps >= _TREND_STEPS and excess > max(0.5 * self.mean, 10 * self.deviation)
        if high:
            # Clip the excess, so that an outlier moves the trend little, but a lasting new level becomes normal.
            excess = max(0.5 * self.mean, 10 * self.deviation)
        weight = 1 / min(self.steps + 1, _TREND_STEPS)
        mean, deviation = weight * excess, weight * (abs(excess) - self.deviation)
        return LossTrend(self.steps + 1, self.mean + mean, self.deviation + deviation, high)


@dataclass(frozen=True)
class Progress:
    """The state of a run except its tensors; saved with the run. `interval_*` cover the steps since the last log."""

    __pydantic_config__ = _STRICT

    step: CountOrZero = 0
    images_seen: ImagesSeen = 0
    elapsed_seconds: float = 0.0
    best_bits_per_dim: float | None = None
    validation_bits_per_dim: float | None = None
    validation_standard_error: float | None = None
    evaluated_at: _StepOrNone = 0
    sampled_at: _StepOrNone = 0
    interval_nats: float = 0.0
    interval_steps: CountOrZero = 0
    loss: LossTrend = LossTrend()
    # The time of the last check of a run that is checked at intervals of time.
    checked_seconds: float = 0.0
    # The number of validations since the best one.
    worse_validations: CountOrZero = 0

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Progress":
        """Read what `dataclasses.asdict` returned. Raises `KeyError` or `ValueError` for wrong keys and values."""
        counts = {key: values[key] for key in ("step", "images_seen")}
        try:
            # As JSON, because strict checks take only instances of a dataclass from Python.
            return TypeAdapter(cls).validate_json(json.dumps({**values, **counts}))
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(str(part) for part in fault["loc"])
            raise ValueError(f"{place}: {fault['msg']}, found {shorten(repr(fault['input']))}") from None

    @property
    def marks(self) -> tuple[int, int, int, bool]:
        return self.step, self.evaluated_at, self.sampled_at, self.is_validated

    @property
    def is_validated(self) -> bool:
        return self.validation_bits_per_dim is not None and self.evaluated_at == self.step


class Reporter:
    """Receives the events of the training loop, and ignores them. The command line's reporter shows a progress line."""

    def on_step(self, row: MetricsRow, finished_share: float) -> None: ...
    def on_evaluate(self, progress: Progress, bits: "Bits", is_best: bool) -> None: ...
    def on_sample(self, path: Path) -> None: ...
    def on_save(self, path: Path, progress: Progress) -> None: ...
    def on_spike(self, message: str) -> None: ...
    def on_busy(self, what: str) -> None: ...
