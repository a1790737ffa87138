"""Ways of sampling a batch of images, as work that can be timed repeatedly.

A sample creates its state or key-value cache outside the timed section and drops it afterwards. A cache of 64 CIFAR-10
images takes gigabytes, so only one cache is in memory at a time. When whole images are drawn, however, creating the
state is timed, because it is part of drawing an image.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from linformer_cli.model.pixel_model import PixelModel, PixelState
from linformer_cli.sampling.choose import Filters, UniformStreams
from linformer_cli.sampling.engines import build_engine
from linformer_cli.sampling.whole_images import warm_up
from linformer_cli.system.signals import Check, never_stop
from linformer_cli.system.timing import time_work

# A re-run is timed at these shares of T. They are the midpoints of equal parts, so the mean of their times approximates
# the mean over all positions. If the cost is linear in the position, the mean is exact.
SHARES = (0.125, 0.375, 0.625, 0.875)

MIDDLE_WARM_UP_STEPS = 4
# The engine name of rows that read the whole prefix again for every value and have no state.
RERUN = "rerun"


class SamplingWork(Protocol):
    """Work whose samples draw `steps` of the T values of every image. If `steps` < T, the rest is extrapolated."""

    @property
    def steps(self) -> int: ...

    def time_sample(self) -> float:
        """Return the seconds of one sample, after an untimed warm-up."""
        ...


@dataclass
class MiddleSteps:
    """Draw `steps` values around the middle of every image. `MiddleSteps` is used if whole images take too long.

    If the cost is linear in the position, as with a key-value cache, the cost in the middle is the mean over the image.
    The state is created by reading a prefix in parallel. The model did not draw this prefix, so the engine does not
    look ahead.
    """

    model: PixelModel
    batch: int
    engine: str
    steps: int
    check: Check = never_stop
    products: torch.dtype | None = None

    @torch.no_grad()
    def time_sample(self) -> float:
        model, streams = self.model, UniformStreams(0, range(self.batch))
        start = max(1, (model.config.image.positions - self.steps) // 2 - MIDDLE_WARM_UP_STEPS)
        stepper = build_engine(self.engine, model, self.batch, place_state(model, start), False, self.products)

        def draw(steps: int) -> None:
            parameters = stepper.step(torch.zeros(self.batch, dtype=torch.int64, device=model.device))
            stepper.draw_values(parameters, streams, Filters(), steps, self.check)

        warm_up(draw, MIDDLE_WARM_UP_STEPS)
        return time_work(lambda: draw(self.steps), str(model.device))


@dataclass
class RerunPrefixes:
    """Sample without a state: the whole prefix is read again for every value. Only a few prefix lengths are timed.

    Katharopoulos 2020 calls this method softmax.
    """

    model: PixelModel
    batch: int
    check: Check = never_stop

    @property
    def steps(self) -> int:
        return len(SHARES)

    def time_sample(self) -> float:
        self.read(1)
        return time_work(lambda: self.read(self.steps), str(self.model.device))

    @torch.no_grad()
    def read(self, count: int) -> None:
        """Draw one value after each of the `count` shortest prefixes."""
        streams = UniformStreams(0, range(self.batch))
        for share in SHARES[:count]:
            self.check()
            length = math.ceil(share * self.model.config.image.positions)
            parameters, _ = self.model.attend(
                torch.zeros(self.batch, length, dtype=torch.int64, device=self.model.device)
            )
            self.model.head.draw(parameters[:, -1], streams.take().to(self.model.device))


def place_state(model: PixelModel, position: int) -> PixelState:
    """Return the state of one image after `position` tokens, with room for a whole image."""
    tokens = torch.zeros(1, position, dtype=torch.int64, device=model.device)
    return model.attend(tokens, model.init_state(1))[1]
