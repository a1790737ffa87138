"""Sampling as work to time, or to measure the memory of. Only in whole images, creating the state is timed."""

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

# The midpoints of equal parts of T: the mean of their times is exact if the cost is linear in the position.
SHARES = (0.125, 0.375, 0.625, 0.875)

MIDDLE_WARM_UP_STEPS = 4
RERUN = "rerun"  # the engine name of rows that read the whole prefix again for every value and have no state
# The steps whose memory is measured.
LAST_STEPS = 4
MEMORY_METHOD = (
    f"growth of the peak resident memory of a fresh process that builds the state of the batch and takes its last "
    f"{LAST_STEPS} steps (in a re-run, it reads whole images once), but at least the size of the state. Weights are "
    "not counted. On a GPU, torch counts this memory"
)


@dataclass
class MiddleSteps:
    """Draw `steps` values around the middle of every image. The prefix is read in parallel, without look-ahead."""

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
    """Read the whole prefix again for every value, as softmax in Katharopoulos 2020; some lengths are timed."""

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
            tokens = torch.zeros(self.batch, length, dtype=torch.int64, device=self.model.device)
            parameters, _ = self.model.attend(tokens)
            self.model.head.draw(parameters[:, -1], streams.take().to(self.model.device))


# Samples draw `steps` of the T values of every image; `time_sample` returns their seconds after a warm-up.
SamplingWork = WholeImages | MiddleSteps | RerunPrefixes


def place_state(model: PixelModel, position: int) -> PixelState:
    return model.attend(torch.zeros(1, position, dtype=torch.int64, device=model.device), model.init_state(1))[1]


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
    """Return a function that builds a batch's state and takes the last steps of its images, after doing so for one."""
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
