"""What is timed: ways of sampling, each as work that can be repeated."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.sampling.choose import Filters, UniformStreams
from linformer_cli.sampling.decode import iter_values
from linformer_cli.sampling.engines import TextbookEngine

# Where along the image a case whose cost grows with the position is timed, as shares of T. The midpoints of equal
# parts: their mean stands for the mean over all positions, exactly for a cost that is linear in the position.
SHARES = (0.125, 0.375, 0.625, 0.875)

WARM_UP_STEPS = 32


@dataclass(frozen=True)
class Case:
    """One row of a benchmark: `work(steps)` draws so many of the T values of `batch` images.

    `steps` says how many are timed; where they are fewer than T, the rest is extrapolated.
    """

    attention: str
    engine: str
    batch: int
    work: Callable[[int], object]
    steps: int
    state_bytes: int

    def warm_up(self) -> None:
        """A few steps: enough for buffers, caches and clocks, where a whole image would double the time."""
        self.work(min(self.steps, WARM_UP_STEPS))

    def is_whole(self, positions: int) -> bool:
        return self.steps == positions


def build_step_case(model: PixelModel, batch: int) -> Case:
    """Whole images by stepping: what `lintx sample` does."""
    positions = model.config.image.positions

    @torch.no_grad()
    def work(steps: int) -> None:
        engine = TextbookEngine(model, batch)
        drawn = iter_values(engine, engine.step(model.start_tokens(batch)), UniformStreams(0, range(batch)), Filters())
        for values in itertools.islice(drawn, steps):
            del values

    engine = "step" if model.config.attention != "softmax" else "cached"
    return Case(model.config.attention, engine, batch, work, positions, model.state_bytes(batch))


def build_rerun_case(model: PixelModel, batch: int) -> Case:
    """Sampling without a state: the whole prefix is read again for every value, at a few prefix lengths only.

    What Katharopoulos 2020 calls softmax. There is no state, so `state_bytes` is 0.
    """
    positions = model.config.image.positions
    prefixes = [
        torch.zeros(batch, math.ceil(share * positions), dtype=torch.int64, device=model.device) for share in SHARES
    ]
    streams = UniformStreams(0, range(batch))

    @torch.no_grad()
    def work(steps: int) -> None:
        for prefix in prefixes[:steps]:
            parameters, _ = model.attend(prefix)
            model.head.draw(parameters[:, -1], streams.take().to(model.device))

    return Case(model.config.attention, "rerun", batch, work, len(prefixes), 0)
