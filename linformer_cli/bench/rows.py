"""The rows of the benchmarks. In JSON, the keys are the field names."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

from linformer_cli.config import OptionValue
from linformer_cli.model.mixers import SOFTMAX
from linformer_cli.report.tables import Shown
from linformer_cli.sampling.engines import REFERENCE
from linformer_cli.system.timing import compare_turns
from linformer_cli.units import IMAGES, format_bytes, format_microseconds, format_milliseconds, format_percent
from .measure.sampling_work import RERUN
from .published import Published

Quartiles = tuple[float, float]
QUARTILES = Shown("quartiles", "{0[0]:.3g}-{0[1]:.3g}".format)
_EXTRAPOLATED_TIME = Shown("extrapolated time per value", format_microseconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(ABC):
    """Timed work and all its samples, or the reason why there are none. `compare_turns` explains `times_softmax`."""

    name: Annotated[str, Shown("attention", names=True)]
    attention: str
    attention_options: Mapping[str, OptionValue]
    engine: Annotated[str, Shown("engine", names=True)]
    precision: Annotated[str, Shown("precision", names=True)]
    device: Annotated[str, Shown("device")]
    batch: Annotated[int, Shown("batch", names=True)]
    positions: Annotated[int, Shown("T", ",", names=True)]
    repeats: Annotated[int, Shown("repeats")]
    samples_seconds: Sequence[float]
    times_softmax: Annotated[float | None, Shown("x softmax", ".3g")] = None
    left_out: Annotated[str | None, Shown("left out")] = None

    @property
    @abstractmethod
    def speed(self) -> float | None:
        """Return images or sequences per second, extrapolated if necessary, or None without a sample."""


AnyRow = TypeVar("AnyRow", bound=Row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quality:
    """The validation bits/dim, given the class if `classes` is not 0, of a trained run with the row's model, if any."""

    run: Path | None = None
    data: str | None = None
    classes: int | None = None
    images_seen: Annotated[int | None, Shown("images seen", ",")] = None
    bits_per_dim: Annotated[float | None, Shown("bits/dim", ".4f")] = None
    bits_per_dim_standard_error: float | None = None
    validation_images: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelRow(Quality, Row):
    """A model, sampled or trained. `item` is `image` or `window`, and `reduced` says what ended the row early."""

    preset: Annotated[str | None, Shown("preset")]
    item: str = IMAGES.item
    images_per_second: Annotated[float | None, Shown("images/s", ".4g")] = None
    images_per_second_quartiles: Quartiles | None = None
    product_gigaflops: float | None = None
    product_share: Annotated[float | None, Shown("products", format_percent)] = None
    reduced: Annotated[str | None, Shown("reduced")] = None

    @property
    def speed(self) -> float | None:
        return self.images_per_second

    @property
    def speed_quartiles(self) -> Annotated[Quartiles | None, QUARTILES]:
        return self.images_per_second_quartiles

    @property
    def network(self) -> Annotated[str, Shown("network", names=True)]:
        """The preset without the size of the images, which follows a comma in the name of a resized preset."""
        return (self.preset or "").partition(",")[0]

    @property
    def method(self) -> str:
        return f"{self.engine}, {self.precision}"

    def describe(self) -> str:
        where = f"{self.preset}, " if self.preset else ""
        who = f"{where}{self.name} ({self.method}), batch {self.batch}"
        if self.speed is None:
            return f"{who}: left out, {self.left_out}"
        how = "" if self.images_per_second else " (extrapolated)"
        return f"{who}: {self.speed:.3g} {self.item}s/s{how}"


@dataclasses.dataclass(frozen=True)
class Extrapolated:
    """Figures of whole images, extrapolated from `timed_positions` of their `of_positions` positions."""

    images_per_second: Annotated[float, Shown("extrapolated images/s", ".3g")]
    images_per_second_quartiles: Quartiles
    seconds_per_image: float
    timed_positions: int
    of_positions: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingRow(ModelRow):
    """A row of sampling. Either the figures of whole images or `extrapolated` is set.

    `look_ahead`: some values were computed from guesses of preceding values. `times_softmax` compares with softmax in
    the same engine, and without that `times_softmax_of_other_engine` in another one. `copy_share` is the rate of
    reading and writing the state, as a share of the rate of memory copies.
    """

    look_ahead: Annotated[bool, Shown("look-ahead")] = False
    times_softmax_of_other_engine: Annotated[float | None, Shown("x softmax in another engine", ".3g")] = None
    seconds_per_image: float | None = None
    extrapolated: Extrapolated | None = None
    state_bytes: int
    state_bytes_per_image: Annotated[int, Shown("state", format_bytes)]
    peak_memory_bytes: Annotated[int | None, Shown("memory", format_bytes)] = None
    published: Published | None = None
    state_gigabytes: float | None = None
    copy_share: Annotated[float | None, Shown("copying", format_percent)] = None

    @property
    def speed(self) -> float | None:
        return self.extrapolated.images_per_second if self.extrapolated else self.images_per_second

    @property
    def speed_quartiles(self) -> Annotated[Quartiles | None, QUARTILES]:
        return (self.extrapolated or self).images_per_second_quartiles

    @property
    def looked_ahead(self) -> Annotated[bool | None, Shown("look-ahead")]:
        return self.look_ahead or None

    @property
    def latency_seconds(self) -> Annotated[float | None, Shown("s/image", ".3g")]:
        return self.seconds_per_image if self.batch == 1 else None

    @property
    def latency_seconds_extrapolated(self) -> Annotated[float | None, Shown("extrapolated s/image", ".3g")]:
        return self.extrapolated.seconds_per_image if self.extrapolated and self.batch == 1 else None

    @property
    def seconds_per_position(self) -> Annotated[float | None, Shown("time per value", format_microseconds)]:
        return self.seconds_per_image and self.seconds_per_image / self.positions

    @property
    def seconds_per_position_extrapolated(self) -> Annotated[float | None, _EXTRAPOLATED_TIME]:
        return self.extrapolated.seconds_per_image / self.positions if self.extrapolated else None

    @property
    def method(self) -> str:
        cached = self.attention == SOFTMAX and self.engine != RERUN
        return super().method + ", cached" * cached + ", looking ahead" * self.look_ahead


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRow(ModelRow):
    seconds_per_step: Annotated[float | None, Shown("step", format_milliseconds)] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionRow(Row):
    """A row of one mechanism alone. Samples and `peak_memory_bytes` are for a whole forward and backward pass."""

    engine: str = "parallel"
    precision: str = "fp32"
    heads: int
    head_width: int
    seconds_per_sequence: Annotated[float | None, Shown("time", format_milliseconds)] = None
    seconds_per_sequence_quartiles: Annotated[
        Quartiles | None, Shown("quartiles", lambda ends: " - ".join(map(format_milliseconds, ends)))
    ] = None
    peak_memory_bytes: int | None = None
    memory_bytes_per_sequence: Annotated[float | None, Shown("memory", format_bytes)] = None
    copy_share: Annotated[float | None, Shown("copying", format_percent)] = None

    @property
    def speed(self) -> float | None:
        return 1 / self.seconds_per_sequence if self.seconds_per_sequence else None

    def describe(self) -> str:
        seconds, memory = self.seconds_per_sequence, self.memory_bytes_per_sequence
        found = f"left out, {self.left_out}" if seconds is None else format_milliseconds(seconds)
        found += f", {format_bytes(memory)}" if memory else ""
        return f"{self.name}, T = {self.positions:,}, batch {self.batch}: {found}"


def compare_with_softmax(rows: Sequence[AnyRow], networks: Sequence[object]) -> list[AnyRow]:
    """Return the interleaved `rows`, each with its speed relative to softmax, if both have samples.

    That is a softmax row of an equal one of `networks`, not a re-run: of the same engine and precision, or else of
    plain torch for plain torch, and of another engine for others.
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
        both_plain = (other.engine == REFERENCE) == (row.engine == REFERENCE)
        return other.engine != row.engine, not both_plain, other.precision != row.precision

    softmax = min(candidates, key=distance, default=None)
    if softmax is None or not softmax.speed or not row.speed:
        return row
    times = compare_turns(row.speed, row.samples_seconds, softmax.speed, softmax.samples_seconds)
    if isinstance(row, SamplingRow) and softmax.engine != row.engine:
        return dataclasses.replace(row, times_softmax_of_other_engine=times)
    return dataclasses.replace(row, times_softmax=times)
