"""The rows, settings and report of `lintx bench speech`."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from linformer_cli.report.tables import Shown
from linformer_cli.speech.ctc_task import CtcSettings
from linformer_cli.speech.encoder import EncoderSettings
from linformer_cli.system.timing import Timing
from linformer_cli.units import format_bytes

from .published import PublishedSpeech
from .rows import Quartiles, Row

# How tables show the name of a row.
ENCODER = Shown("encoder", names=True)


@dataclass(frozen=True)
class SpeechPoint:
    """A point of a learning curve after an epoch, counted from 1.

    `loss` is the mean over the epoch in nats per symbol. `error_rate` is that of the held-out speakers, decoded
    greedily. `training_seconds` are all epochs so far, without validation.
    """

    epoch: int
    loss: float
    error_rate: float
    training_seconds: float
    learning_rate: float


@dataclass(frozen=True)
class SeedResult:
    """The training with one seed. `beam_error_rate` is measured once, at the end."""

    seed: Annotated[int, Shown("seed", names=True)]
    held_out: Sequence[str]
    validation_symbols: Annotated[int, Shown("of symbols", ",")]
    error_rate: Annotated[float, Shown("PER", ".1%")]
    beam_error_rate: Annotated[float | None, Shown("PER, beam", ".1%")]
    substitutions: Annotated[int, Shown("substituted", ",")]
    deletions: Annotated[int, Shown("missed", ",")]
    insertions: Annotated[int, Shown("inserted", ",")]
    points: Sequence[SpeechPoint]

    @property
    def speakers(self) -> Annotated[str, Shown("held-out speakers")]:
        return ", ".join(self.held_out)


@dataclass(frozen=True, kw_only=True)
class SpeechRow:
    """One mechanism. Error rates are means over the seeds, and `error_rate_range` is the lowest and the highest.

    `seconds_per_epoch` is the median over all epochs of all seeds. `times_softmax` is how many epochs it trains in the
    time that softmax takes for one. `failed` says why the training of a seed ended early.
    """

    title: str
    name: Annotated[str, ENCODER]
    attention: str
    attention_options: Mapping[str, object]
    device: str
    parameters: int
    epochs: Annotated[int, Shown("epochs", ",")] = 0
    error_rate: Annotated[float | None, Shown("PER", ".1%")] = None
    error_rate_range: tuple[float, float] | None = None
    beam_error_rate: Annotated[float | None, Shown("PER, beam", ".1%")] = None
    seconds_per_epoch: Annotated[float | None, Shown("s/epoch", ".3g")] = None
    seconds_per_epoch_quartiles: Quartiles | None = None
    times_softmax: Annotated[float | None, Shown("x softmax", ".3g")]
    memory_bytes: Annotated[int | None, Shown("memory", format_bytes)]
    published: PublishedSpeech | None
    failed: Annotated[str | None, Shown("failed")]
    seeds: Sequence[SeedResult] = ()

    @property
    def error_rates(self) -> Annotated[str | None, Shown("range")]:
        return self.error_rate_range and "{:.1f}-{:.1f} %".format(*(100 * rate for rate in self.error_rate_range))

    @property
    def quartiles(self) -> Annotated[str | None, Shown("quartiles")]:
        return _format_quartiles(self.seconds_per_epoch_quartiles)

    @property
    def published_error_rate(self) -> Annotated[float | None, Shown("published PER, WSJ", ".2%")]:
        return self.published.error_rate if self.published else None

    @property
    def published_seconds_per_epoch(self) -> Annotated[float | None, Shown("published s/epoch", ",.0f")]:
        return self.published.seconds_per_epoch if self.published else None


@dataclass(frozen=True, kw_only=True)
class LengthRow(Row):
    """Training steps on `batch` utterances of `positions` frames. All lengths have about the same frames in all.

    `seconds_per_epoch` is the time for an epoch with as many frames as those of the table, in utterances of this
    length. `peak_memory_bytes` is the memory of one training step, without weights and optimizer.
    """

    seconds_per_epoch: Annotated[float | None, Shown("s/epoch", ".3g")] = None
    seconds_per_epoch_quartiles: Quartiles | None = None
    peak_memory_bytes: Annotated[int | None, Shown("memory", format_bytes)] = None

    @property
    def quartiles(self) -> Annotated[str | None, Shown("quartiles")]:
        return _format_quartiles(self.seconds_per_epoch_quartiles)

    @property
    def speed(self) -> float | None:
        return self.batch / statistics.median(self.samples_seconds) if self.samples_seconds else None


def _format_quartiles(quartiles: Quartiles | None) -> str | None:
    return quartiles and "{:.3g}-{:.3g}".format(*quartiles)


@dataclass(frozen=True)
class SpeechSettings:
    """The settings that a user may choose. Without `epochs`, training lasts as long as the budget."""

    budget_seconds: float
    preset: str = "small"
    seeds: int = 3
    epochs: int | None = None
    strings: int = 128
    validation_strings: int = 64
    lengths: Sequence[int] = (400, 800, 1_600, 3_200, 6_400)
    batch_frames: int = 1_200
    beam: int = 8
    device: str = "cpu"


@dataclass(frozen=True)
class SpeechConditions:
    """The conditions of the rows. `epoch_frames` is the mean number of frames (10 ms) of a training epoch."""

    title: str
    notes: Sequence[str]
    preset: str
    encoder: EncoderSettings
    training: CtcSettings
    optimizer: str
    seeds: int
    epochs_wanted: int | None
    batch_frames: int
    epoch_frames: int
    epoch_utterances: int
    beam: int
    precision: str = "fp32"


@dataclass(frozen=True)
class SpeechReport:
    """Everything measured so far. `findings` compare linear attention with softmax here and in the paper."""

    rows: list[SpeechRow]
    lengths: list[LengthRow]
    findings: list[str]
    reduced: list[str]
    budget_seconds: float
    elapsed_seconds: float
    ended: str
    settings: SpeechConditions
    environment: Mapping[str, Any]

    @property
    def has_figures(self) -> bool:
        return bool(self.rows)


def summarise(row: SpeechRow, seeds: Sequence[SeedResult], seconds: Sequence[float]) -> SpeechRow:
    """Fill in the error rates and times of `row` from its seeds and the seconds of its epochs."""
    if not seeds or not seconds:
        return row
    rates = [seed.error_rate for seed in seeds]
    beams = [seed.beam_error_rate for seed in seeds if seed.beam_error_rate is not None]
    timing = Timing(seconds)
    return dataclasses.replace(
        row,
        epochs=min(len(seed.points) for seed in seeds),
        error_rate=statistics.fmean(rates),
        error_rate_range=(min(rates), max(rates)),
        beam_error_rate=statistics.fmean(beams) if len(beams) == len(seeds) else None,
        seconds_per_epoch=timing.median,
        seconds_per_epoch_quartiles=timing.quartiles,
        seeds=seeds,
    )


def describe_findings(rows: Sequence[SpeechRow]) -> list[str]:
    """Say how the errors and the time of linear attention compare with those of softmax, here and in the paper."""
    named = {row.attention: row for row in rows if row.error_rate is not None and row.published is not None}
    linear, softmax = named.get("linear"), named.get("softmax")
    if linear is None or softmax is None or linear.published is None or softmax.published is None:
        return []
    assert linear.error_rate is not None and softmax.error_rate is not None
    theirs = {seed.seed: seed.error_rate for seed in softmax.seeds}
    pairs = [(seed.error_rate, theirs[seed.seed]) for seed in linear.seeds if seed.seed in theirs]
    more = sum(rate > other for rate, other in pairs)
    lines = [
        f"errors: linear {linear.error_rate:.1%}, softmax {softmax.error_rate:.1%}; linear makes more in {more} of "
        f"{len(pairs)} seeds. In the paper: {linear.published.error_rate:.2%} and {softmax.published.error_rate:.2%}"
    ]
    if linear.seconds_per_epoch is not None and softmax.seconds_per_epoch is not None:
        share = linear.seconds_per_epoch / softmax.seconds_per_epoch
        published = linear.published.seconds_per_epoch / softmax.published.seconds_per_epoch
        lines.append(f"time: an epoch of linear takes {share:.0%} of softmax's. In the paper: {published:.0%}")
    return lines
