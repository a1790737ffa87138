"""Images that keep given values anywhere, by sequential Monte Carlo; `native/particles.h` explains it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linformer_cli.errors import LintxError
from linformer_cli.system.signals import Check
from .choose import Filters, UniformStreams, filter_log_probabilities

if TYPE_CHECKING:
    from .engines import Engine

DAMAGED = "the model's prediction is not a finite number: its weights are damaged"


@dataclass(frozen=True)
class KeptImage:
    """An image with given values: all values int64 [T], and how well they were kept.

    `bits` estimates those of all given values together. `effective` is the last effective size, `fewest` the least.
    """

    values: Tensor
    bits: float
    effective: float
    fewest: float


@dataclass
class _Groups:
    """Particles with the same values: the `rows` of the engine, the number of particles, and their log weights, [G]."""

    rows: NDArray[np.int64]
    copies: NDArray[np.int64]
    weights: NDArray[np.float64]
    evidence: float
    fewest: float

    @property
    def count(self) -> int:
        return int(self.copies.sum())

    def add_up(self) -> NDArray[np.float64]:
        return np.cumsum(self.copies * np.exp(self.weights - self.weights.max()))

    def measure_size(self) -> float:
        squares = self.copies * np.exp(2 * (self.weights - self.weights.max()))
        return float(self.add_up()[-1] ** 2 / squares.sum())

    def find_evidence(self) -> float:
        return float(self.evidence + self.weights.max() + np.log(self.add_up()[-1] / self.count))

    def resample(self, uniform: float) -> None:
        count, sums = self.count, self.add_up()
        self.fewest, self.evidence = min(self.fewest, self.measure_size()), self.find_evidence()
        ends = np.searchsorted(np.arange(count) + uniform, sums / sums[-1] * count)
        ends[-1] = count
        copies = np.diff(ends, prepend=0)
        self.rows, self.copies = self.rows[copies > 0], copies[copies > 0]
        self.weights = np.zeros(len(self.rows))

    def part(self, drawn: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Let a group become one for each value that its particles drew; returns the engine's row and value of each."""
        owners = np.repeat(np.arange(len(self.rows)), self.copies)
        pairs, first, copies = np.unique(np.stack([owners, drawn]), axis=1, return_index=True, return_counts=True)
        order = first.argsort()
        owners, values = pairs[:, order]
        rows = self.rows[owners]
        self.rows, self.copies, self.weights = np.arange(len(rows)), copies[order], self.weights[owners]
        return rows, values


@torch.no_grad()
def draw_particles(
    engine: "Engine", starts: Tensor, given: Tensor, streams: UniformStreams, filters: Filters, before_step: Check
) -> KeptImage:
    """Do what `Engine.keep_values` explains."""
    each, cpu = filters.rows_per_image, torch.device("cpu")
    count = engine.batch // each
    engine.fork(torch.zeros(each, dtype=torch.int64))
    parameters = engine.step(starts)
    groups = _Groups(np.zeros(1, np.int64), np.array([count]), np.zeros(1), 0.0, float(count))
    values = torch.empty(1, len(given), dtype=torch.int64)
    for number, value in enumerate(given.tolist()):
        before_step()
        if not bool(torch.isfinite(parameters).all()):
            raise LintxError(DAMAGED)
        if value >= 0:
            logs = engine.model.head.log_probabilities(parameters)
            logs = filter_log_probabilities(logs, Filters(guidance=filters.guidance))
            groups.weights = groups.weights + logs[:, value].double().cpu().numpy()[groups.rows]
            values[:, number] = value
        else:
            uniforms = streams.take_many(count + 1, cpu)[:, 0]
            if groups.measure_size() < count / 2:
                groups.resample(float(uniforms[count]))
            places = _spread(uniforms.numpy(), groups.copies)
            rows = torch.from_numpy(np.repeat(groups.rows, groups.copies))
            rows = torch.cat([rows + n * len(values) for n in range(each)])
            chosen = engine.draw(parameters[rows.to(parameters.device)], torch.from_numpy(places), filters).cpu()
            parents, own = map(torch.from_numpy, groups.part(chosen.numpy()))
            engine.fork(torch.cat([parents + n * len(values) for n in range(each)]))
            values = values[parents]
            values[:, number] = own
        if number < len(given) - 1:
            parameters = engine.step(values[:, number].repeat(each).to(starts.device))
    last = float(streams.take_many(count + 1, cpu)[count])
    sums, size = groups.add_up(), groups.measure_size()
    chosen_group = int(np.searchsorted(sums[:-1], last * sums[-1], side="right"))
    bits = -groups.find_evidence() / float(np.log(2))
    return KeptImage(values[groups.rows[chosen_group]], bits, size, min(size, groups.fewest))


def _spread(uniforms: NDArray[np.float64], copies: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return all particles' random numbers [particles]: evenly spaced within a group, from that of its first."""
    first = np.repeat(np.cumsum(copies) - copies, copies)
    return np.asarray((np.arange(len(first)) - first + uniforms[first]) / np.repeat(copies, copies))
