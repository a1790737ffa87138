"""The rows of the benchmarks. In JSON, the keys are the field names."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from linformer_cli.config import OptionValue
from linformer_cli.model.variants import SOFTMAX
from linformer_cli.sampling.engines import TEXTBOOK
from linformer_cli.system.timing import compare_turns
from linformer_cli.units import IMAGES, format_bytes, format_milliseconds

from .measure.sampling_work import RERUN
from .published import Published

Quartiles = tuple[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(ABC):
    """Timed work and all its samples. If there are no samples, `left_out` gives the reason.

    `times_softmax` is the speed relative to softmax: the median over all rounds of the ratio of speeds.
    """

    name: str
    attention: str
    attention_options: Mapping[str, OptionValue]
    engine: str
    precision: str
    device: str
    batch: int
    positions: int
    repeats: int
    samples_seconds: Sequence[float]
    times_softmax: float | None = None
    left_out: str | None = None

    @property
    @abstractmethod
    def speed(self) -> float | None:
        """Return images or sequences per second, extrapolated if necessary, or None without a sample."""


AnyRow = TypeVar("AnyRow", bound=Row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quality:
    """The validation bits/dim of a trained run with the row's model. Without such a run, all fields are None.

    Bits/dim are given the class if `classes` is not 0.
    """

    run: Path | None = None
    data: str | None = None
    classes: int | None = None
    images_seen: int | None = None
    bits_per_dim: float | None = None
    bits_per_dim_standard_error: float | None = None
    validation_images: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelRow(Quality, Row):
    """A whole model, sampled or trained. `item` is what its sequences are called, `image` or `window`.

    `product_share` is the rate of its matrix products, as a share of the machine's highest rate. `reduced` is set if
    memory, time or the user ended the row before its last repeat.
    """

    preset: str | None
    item: str = IMAGES.item
    images_per_second: float | None = None
    images_per_second_quartiles: Quartiles | None = None
    product_gigaflops: float | None = None
    product_share: float | None = None
    reduced: str | None = None

    @property
    def speed(self) -> float | None:
        return self.images_per_second

    @property
    def speed_quartiles(self) -> Quartiles | None:
        """Return the quartiles of `speed`."""
        return self.images_per_second_quartiles

    @property
    def method(self) -> str:
        """Describe in a few words how the row was measured."""
        return self.engine

    def describe(self) -> str:
        """Describe the row in one line."""
        where = f"{self.preset}, " if self.preset else ""
        who = f"{where}{self.name} ({self.method}), batch {self.batch}"
        if self.speed is None:
            return f"{who}: left out, {self.left_out}"
        how = "" if self.images_per_second else " (extrapolated)"
        return f"{who}: {self.speed:.3g} {self.item}s/s{how}"


@dataclasses.dataclass(frozen=True)
class Extrapolated:
    """Figures of whole images, extrapolated from `timed_positions` of their `of_positions` positions."""

    images_per_second: float
    images_per_second_quartiles: Quartiles
    seconds_per_image: float
    timed_positions: int
    of_positions: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingRow(ModelRow):
    """A row of sampling. Either the figures of whole images or `extrapolated` is set.

    `look_ahead` says whether some values were computed from guesses of preceding values. `times_softmax` compares the
    row with softmax in the same engine. If softmax was not timed in this engine, `times_softmax_of_other_engine`
    compares the row with softmax in another one. `copy_share` is the rate of reading and writing the state, as a share
    of the machine's rate of memory copies.
    """

    look_ahead: bool = False
    times_softmax_of_other_engine: float | None = None
    seconds_per_image: float | None = None
    extrapolated: Extrapolated | None = None
    state_bytes: int
    state_bytes_per_image: int
    peak_memory_bytes: int | None = None
    published: Published | None = None
    state_gigabytes: float | None = None
    copy_share: float | None = None

    @property
    def speed(self) -> float | None:
        return self.extrapolated.images_per_second if self.extrapolated else self.images_per_second

    @property
    def speed_quartiles(self) -> Quartiles | None:
        found = self.extrapolated or self
        return found.images_per_second_quartiles

    @property
    def method(self) -> str:
        cached = self.attention == SOFTMAX and self.engine != RERUN
        return self.engine + ", cached" * cached + ", looking ahead" * self.look_ahead


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRow(ModelRow):
    """A row that reports the time of whole training steps."""

    seconds_per_step: float | None = None

    @property
    def method(self) -> str:
        return f"{self.engine}, {self.precision}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionRow(Row):
    """A row of one mechanism alone. Samples and `peak_memory_bytes` are for a whole forward and backward pass."""

    engine: str = "parallel"
    precision: str = "fp32"
    heads: int
    head_width: int
    seconds_per_sequence: float | None = None
    seconds_per_sequence_quartiles: Quartiles | None = None
    peak_memory_bytes: int | None = None
    memory_bytes_per_sequence: float | None = None
    copy_share: float | None = None

    @property
    def speed(self) -> float | None:
        return 1 / self.seconds_per_sequence if self.seconds_per_sequence else None

    def describe(self) -> str:
        """Describe the row in one line."""
        seconds, memory = self.seconds_per_sequence, self.memory_bytes_per_sequence
        found = f"left out, {self.left_out}" if seconds is None else format_milliseconds(seconds)
        return f"{self.name}, T = {self.positions:,}, batch {self.batch}: {found}" + (
            f", {format_bytes(memory)}" if memory else ""
        )


def compare_with_softmax(rows: Sequence[AnyRow], networks: Sequence[object]) -> list[AnyRow]:
    """Return the interleaved `rows`, each with its speed relative to softmax.

    A row is compared with a softmax row of the same network that is not a re-run. A softmax row of the same engine and
    precision is preferred. If there is none, a row in plain torch prefers softmax in plain torch, and any other
    row prefers softmax in one of the other engines, each in the row's own precision if there is such a row.
    `times_softmax` is None if there is no row to compare with, or if one of the two rows has no sample. `networks` has
    one entry per row, and equal entries mean the same network.
    """
    return [_compare(row, network, rows, networks) for row, network in zip(rows, networks, strict=True)]


def _compare(row: AnyRow, network: object, rows: Sequence[AnyRow], networks: Sequence[object]) -> AnyRow:
    candidates = (
        other
        for other, other_network in zip(rows, networks, strict=True)
        if other.attention == SOFTMAX
        and other.engine != RERUN
        and (other.precision == row.precision or other.engine != row.engine)
        and other_network == network
        and other.speed
    )

    def distance(other: AnyRow) -> tuple[bool, bool, bool]:
        both_plain = (other.engine == TEXTBOOK) == (row.engine == TEXTBOOK)
        return other.engine != row.engine, not both_plain, other.precision != row.precision

    softmax = min(candidates, key=distance, default=None)
    if softmax is None or not softmax.speed or not row.speed:
        return row
    times = compare_turns(row.speed, row.samples_seconds, softmax.speed, softmax.samples_seconds)
    if isinstance(row, SamplingRow) and softmax.engine != row.engine:
        return dataclasses.replace(row, times_softmax_of_other_engine=times)
    return dataclasses.replace(row, times_softmax=times)
