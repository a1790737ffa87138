"""Drawing whole images as work that can be timed repeatedly."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.system.signals import Check, never_stop
from linformer_cli.system.timing import time_work
from .choose import Filters, UniformStreams
from .engines import AUTO, Engine, build_engine

WARM_UP_STEPS = 32


@dataclass
class WholeImages:
    """Draw whole images, as `lintx sample` does. `check` is called before every step.

    Every sample draws different images, because the success of look-ahead depends on the image. `looked_ahead` says
    whether a sample computed some values from guesses of preceding values.
    """

    model: PixelModel
    batch: int
    engine: str = AUTO
    look_ahead: bool = True
    check: Check = never_stop
    products: torch.dtype | None = None
    drawn: int = 0
    looked_ahead: bool = False

    @property
    def steps(self) -> int:
        return self.model.config.image.positions

    @torch.no_grad()
    def time_sample(self) -> float:
        # Each sample builds a new engine, so the engine takes no memory while other rows are timed.
        engine = build_engine(self.engine, self.model, self.batch, None, self.look_ahead, self.products)
        warm_up(partial(self._draw, engine), min(WARM_UP_STEPS, self.steps))
        seconds = time_work(lambda: self._draw(engine, self.steps), str(self.model.device))
        self.looked_ahead |= engine.look_aheads > 0
        self.drawn += self.batch
        return seconds

    def _draw(self, engine: Engine, steps: int) -> None:
        """Draw the first `steps` values of the next images."""
        engine.start()
        first = engine.step(self.model.start_tokens(self.batch))
        streams = UniformStreams(0, range(self.drawn, self.drawn + self.batch))
        engine.draw_values(first, streams, Filters(), steps, self.check)


@torch.no_grad()
def warm_up(draw: Callable[[int], None], steps: int) -> None:
    """Draw `steps` values in two parts, because the engine `cuda` records each graph in its second run."""
    for _ in range(2):
        draw(steps // 2)
