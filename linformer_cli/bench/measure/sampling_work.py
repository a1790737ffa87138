"""Ways of sampling a batch of images, as work that can be timed repeatedly or whose peak memory is measured.

A sample creates its state or key-value cache outside the timed section and drops it afterwards. A cache of 64 CIFAR-10
images takes gigabytes, so only one cache is in memory at a time. When whole images are drawn, however, creating the
state is timed, because it is part of drawing an image.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from linformer_cli.config import ModelConfig
from linformer_cli.model.pixel_model import PixelModel, PixelState
from linformer_cli.sampling.choose import Filters, UniformStreams
from linformer_cli.sampling.decode import WholeImages, warm_up
from linformer_cli.sampling.engines import build_engine
from linformer_cli.system.device import product_dtype, seeded, torch_dtype
from linformer_cli.system.signals import Check, never_stop
from linformer_cli.system.timing import time_work

# A re-run is timed at these shares of T. They are the midpoints of equal parts, so the mean of their times approximates
# the mean over all positions. If the cost is linear in the position, the mean is exact.
SHARES = (0.125, 0.375, 0.625, 0.875)

MIDDLE_WARM_UP_STEPS = 4
# The engine name of rows that read the whole prefix again for every value and have no state.
RERUN = "rerun"
# The steps whose memory is measured.
LAST_STEPS = 4
MEMORY_METHOD = (
    f"growth of the peak resident memory of a fresh process that builds the state of the batch and takes its last "
    f"{LAST_STEPS} steps (in a re-run, it reads whole images once), but at least the size of the state. Weights are "
    "not counted. On a GPU, torch counts this memory"
)


@dataclass
class MiddleSteps:
    """Draw `steps` values around the middle of every image, if whole images take too long.

    If the cost is linear in the position, as with a key-value cache, it is the mean over the image. The state is
    created by reading a prefix in parallel, which the model did not draw, so the engine does not look ahead.
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
    """Sample without a state, as softmax in Katharopoulos 2020: every value reads the whole prefix again.

    Only prefixes of the lengths `shares` of the positions are timed.
    """

    model: PixelModel
    batch: int
    check: Check = never_stop
    shares: Sequence[float] = SHARES

    @property
    def steps(self) -> int:
        return len(self.shares)

    def time_sample(self) -> float:
        self.read(1)
        return time_work(lambda: self.read(self.steps), str(self.model.device))

    @torch.no_grad()
    def read(self, count: int) -> None:
        """Draw one value after each of the `count` shortest prefixes."""
        streams = UniformStreams(0, range(self.batch))
        for share in self.shares[:count]:
            self.check()
            length = math.ceil(share * self.model.config.image.positions)
            parameters, _ = self.model.attend(
                torch.zeros(self.batch, length, dtype=torch.int64, device=self.model.device)
            )
            self.model.head.draw(parameters[:, -1], streams.take().to(self.model.device))


# Work whose samples draw `steps` of the T values of every image. If `steps` < T, the rest is extrapolated.
# `time_sample` returns the seconds of one sample, after an untimed warm-up.
SamplingWork = WholeImages | MiddleSteps | RerunPrefixes


def place_state(model: PixelModel, position: int) -> PixelState:
    tokens = torch.zeros(1, position, dtype=torch.int64, device=model.device)
    return model.attend(tokens, model.init_state(1))[1]


@dataclass(frozen=True)
class SamplingSetup:
    """The last steps of untrained images. `engine` is one of `ENGINES`, or `RERUN`."""

    model: ModelConfig
    batch: int
    engine: str
    precision: str
    device: str = "cpu"
    look_ahead: bool = False


def build_last_steps(setup: SamplingSetup) -> Callable[[], None]:
    """A function that builds a batch's state and takes the last steps of its images, after doing so for one."""
    with seeded(0):
        model = PixelModel(setup.model)
    model = model.to(device=setup.device, dtype=torch_dtype(setup.precision)).eval()
    if setup.engine == RERUN:
        RerunPrefixes(model, 1, shares=(1.0,)).read(1)
        return partial(RerunPrefixes(model, setup.batch, shares=(1.0,)).read, 1)
    products, positions = product_dtype(setup.precision), model.config.image.positions
    placed = place_state(model, max(1, positions - LAST_STEPS - 1))

    @torch.no_grad()
    def step(batch: int) -> None:
        stepper = build_engine(setup.engine, model, batch, placed, setup.look_ahead, products)
        first = stepper.step(torch.zeros(batch, dtype=torch.int64, device=setup.device))
        stepper.draw_values(first, UniformStreams(0, range(batch)), Filters(), min(LAST_STEPS, positions - 1))

    step(1)
    return partial(step, setup.batch)
