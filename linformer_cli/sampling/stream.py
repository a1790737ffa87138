"""Draws a single sequence a few values at a time, without end if the model allows it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from linformer_cli.errors import UsageError
from .choose import UniformStreams
from .decode import Sampler

# The number of values in a part.
_VALUES = 32


@dataclass(frozen=True)
class Stream:
    """A sequence that begins with `prompt` int64 [P] and goes on with `count` drawn values (None: without end).

    Raises `UsageError` if the model cannot draw so many values.
    """

    sampler: Sampler
    prompt: Tensor
    count: int | None = None

    def __post_init__(self) -> None:
        model, known = self.sampler.model, len(self.prompt)
        positions, bound = model.config.image.positions, model.find_bound()
        if bound is None:
            return
        if self.count is None or known + self.count > positions:
            wanted = "a sequence without end" if self.count is None else f"{known + self.count:,} values"
            raise UsageError(f"this model draws at most {positions:,} values, prompt included, found {wanted}: {bound}")

    @torch.no_grad()
    def draw(self, index: int = 0) -> Iterator[bytes]:
        """Yield the values after the prompt in parts of up to 32. They depend only on the seed, `index` and the prompt.

        Raises `LintxError` if the model predicts NaN or infinity.
        """
        model, left = self.sampler.model, self.count
        if left == 0:
            return
        streams = UniformStreams(self.sampler.seed, [index])
        tokens = torch.cat([model.start_tokens(1), self.prompt.to(model.device)]).unsqueeze(0)
        with self.sampler.engines.start(1) as engine:
            parameters = engine.read(tokens)
            while left is None or left > 0:
                count = _VALUES if left is None else min(_VALUES, left)
                values = engine.draw_values(parameters, streams, self.sampler.filters, count)
                yield values.numpy().tobytes()
                left = None if left is None else left - count
                if left != 0:
                    parameters = engine.step(values[:, -1].to(model.device, torch.int64))
