"""What is timed: ways of sampling, each as work that can be repeated."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from linformer_cli.attention.base import fork_state
from linformer_cli.errors import Interrupted
from linformer_cli.model.pixel_model import PixelModel, PixelState
from linformer_cli.sampling.choose import Filters, UniformStreams
from linformer_cli.sampling.engines import AUTO, NATIVE, build_engine, choose_engine

# Where along the image a case whose cost grows with the position is timed, as shares of T. The midpoints of equal
# parts: their mean stands for the mean over all positions, exactly for a cost that is linear in the position.
SHARES = (0.125, 0.375, 0.625, 0.875)

WARM_UP_STEPS = 32
# What rows of `build_rerun_case` have for an engine.
RERUN = "rerun"

# Called between steps, and may raise to give up.
Check = Callable[[], None] | None


def is_interrupted(check: Check) -> bool:
    """Whether the user has had enough; what else `check` raises is raised."""
    try:
        if check is not None:
            check()
    except Interrupted:
        return True
    return False


@dataclass(frozen=True)
class Case:
    """One row of a benchmark: `work(steps)` draws so many of the T values of `batch` images.

    `steps` says how many are timed; where they are fewer than T, the rest is extrapolated.
    """

    engine: str
    work: Callable[[int], object]
    steps: int
    warm_up_steps: int = WARM_UP_STEPS

    def warm_up(self) -> None:
        """A few steps: enough for buffers, caches and clocks, where a whole image would double the time."""
        self.work(min(self.steps, self.warm_up_steps))

    def is_whole(self, positions: int) -> bool:
        return self.steps == positions


# The native engine without looking ahead, in a row of its own.
STEPWISE = "stepwise"


def find_engine(name: str) -> str:
    """The engine that a row named `name` is timed with."""
    return NATIVE if name == STEPWISE else name


def build_step_case(
    model: PixelModel, batch: int, check: Check = None, engine: str = AUTO, first_image: int = 0
) -> Case:
    """Whole images by stepping: what `lintx sample` does. `check` is called before every step, and may raise.

    Every time they are other images, from `first_image` on: how far one can look ahead depends on the image.
    """
    positions, chosen = (
        model.config.image.positions,
        engine if engine == STEPWISE else choose_engine(engine, model).value,
    )
    starts = itertools.count(first_image, batch)

    @torch.no_grad()
    def work(steps: int) -> None:
        start = next(starts)
        stepper = build_engine(find_engine(chosen), model, batch, look_ahead=chosen != STEPWISE)
        first = stepper.step(model.start_tokens(batch))
        stepper.draw_values(first, UniformStreams(0, range(start, start + batch)), Filters(), steps, check)

    return Case(name_method(model, chosen), work, positions)


def build_middle_case(
    model: PixelModel, batch: int, steps: int, repeats: int, check: Check = None, engine: str = AUTO
) -> Case:
    """`steps` steps of stepping, `repeats` times on from where the last ended, all around the middle of the image.

    For images that take too long. A cost that is linear in the position, as that of a key-value cache, has its mean
    over the image in the middle. The state is made by reading a prefix in parallel.
    """
    positions = model.config.image.positions
    start = max(1, (positions - steps * repeats) // 2)
    chosen = engine if engine == STEPWISE else choose_engine(engine, model).value
    placed = place_state(model, batch, start)
    stepper = build_engine(find_engine(chosen), model, batch, placed, look_ahead=chosen != STEPWISE)
    streams = UniformStreams(0, range(batch))

    @torch.no_grad()
    def work(steps: int) -> None:
        parameters = stepper.step(torch.zeros(batch, dtype=torch.int64, device=model.device))
        stepper.draw_values(parameters, streams, Filters(), steps, check)

    return Case(name_method(model, chosen), work, steps, warm_up_steps=1)


@torch.no_grad()
def place_state(model: PixelModel, batch: int, position: int) -> PixelState:
    """The state of `batch` images behind `position` tokens, with room for whole images; all of them are alike."""
    tokens = torch.zeros(1, position, dtype=torch.int64, device=model.device)
    _, state = model.attend(tokens, model.init_state(1))
    return fork_state(state, batch)


def name_method(model: PixelModel, engine: str) -> str:
    """What a row of stepping by `engine` is called: softmax has a cache then, unlike the re-run."""
    return "cached" if model.config.attention == "softmax" else engine


def build_rerun_case(model: PixelModel, batch: int, check: Check = None) -> Case:
    """Sampling without a state: the whole prefix is read again for every value, at a few prefix lengths only.

    What Katharopoulos 2020 calls softmax. There is no state.
    """
    positions = model.config.image.positions
    prefixes = [
        torch.zeros(batch, math.ceil(share * positions), dtype=torch.int64, device=model.device) for share in SHARES
    ]
    streams = UniformStreams(0, range(batch))

    @torch.no_grad()
    def work(steps: int) -> None:
        for prefix in prefixes[:steps]:
            if check is not None:
                check()
            parameters, _ = model.attend(prefix)
            model.head.draw(parameters[:, -1], streams.take().to(model.device))

    return Case(RERUN, work, len(prefixes), warm_up_steps=1)
