"""The report of `lintx bench speech`: its rows and conditions, tables, figures and page."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from linformer_cli.report import plots
from linformer_cli.report.plots import Curve, Panel, PlotFormat
from linformer_cli.report.tables import Column, Output, Record, RecordTable, Shown, TableStyle, list_columns
from linformer_cli.units import format_bytes
from .budget import BudgetReport
from .columns import choose_columns, render_costs
from .published import PublishedSpeech
from .rows import QUARTILES, Quartiles, Row

# How tables show the name of a row.
_ENCODER = Shown("encoder", names=True)
_RATES = Shown("range", lambda ends: "{:.1f}-{:.1f} %".format(*(100 * rate for rate in ends)))


@dataclass(frozen=True)
class SpeechPoint:
    """Figures after an epoch, from 1: `loss` in nats per symbol, `training_seconds` without validation."""

    epoch: int
    loss: float
    error_rate: float
    training_seconds: float
    learning_rate: float


@dataclass(frozen=True)
class SeedResult:
    """The training with one seed. `beam_error_rate` is measured once, at the end."""

    seed: Annotated[int, Shown("seed", names=True)]
    held_out: Annotated[Sequence[str], Shown("held-out speakers", ", ".join)]
    validation_symbols: Annotated[int, Shown("of symbols", ",")]
    error_rate: Annotated[float, Shown("PER", ".1%")]
    beam_error_rate: Annotated[float | None, Shown("PER, beam", ".1%")]
    substitutions: Annotated[int, Shown("substituted", ",")]
    deletions: Annotated[int, Shown("missed", ",")]
    insertions: Annotated[int, Shown("inserted", ",")]
    points: Sequence[SpeechPoint]


@dataclass(frozen=True, kw_only=True)
class SpeechRow:
    """One mechanism. Error rates are means over the seeds. `times_softmax` is how many epochs it trains in one."""

    title: str
    name: Annotated[str, _ENCODER]
    attention: str
    attention_options: Mapping[str, object]
    device: str
    parameters: int
    epochs: Annotated[int, Shown("epochs", ",")] = 0
    error_rate: Annotated[float | None, Shown("PER", ".1%")] = None
    error_rate_range: Annotated[tuple[float, float] | None, _RATES] = None
    beam_error_rate: Annotated[float | None, Shown("PER, beam", ".1%")] = None
    seconds_per_epoch: Annotated[float | None, Shown("s/epoch", ".3g")] = None
    seconds_per_epoch_quartiles: Annotated[Quartiles | None, QUARTILES] = None
    times_softmax: Annotated[float | None, Shown("x softmax", ".3g")]
    memory_bytes: Annotated[int | None, Shown("memory", format_bytes)]
    published: PublishedSpeech | None
    failed: Annotated[str | None, Shown("failed")]
    seeds: Sequence[SeedResult] = ()


@dataclass(frozen=True, kw_only=True)
class LengthRow(Row):
    """Training steps on `batch` utterances of `positions` frames. Memory is without weights and optimizer."""

    engine: str = "parallel"
    precision: str = "fp32"
    seconds_per_epoch: Annotated[float | None, Shown("s/epoch", ".3g")] = None
    seconds_per_epoch_quartiles: Annotated[Quartiles | None, QUARTILES] = None
    peak_memory_bytes: Annotated[int | None, Shown("memory", format_bytes)] = None

    @property
    def speed(self) -> float | None:
        return self.batch / statistics.median(self.samples_seconds) if self.samples_seconds else None


@dataclass(frozen=True, kw_only=True)
class SpeechReport(BudgetReport):
    rows: list[SpeechRow]
    lengths: list[LengthRow]
    findings: list[str]
    ended: str
    settings: Mapping[str, Any]

    def show(self, style: TableStyle) -> Output:
        title = f"Phoneme error rate (PER) with CTC: {self.settings['title']}"
        failed = self.rows and all(row.failed for row in self.rows)
        plots: dict[str, Callable[[PlotFormat], bytes]] = {}
        if any(row.seeds for row in self.rows):
            plots["curves"] = partial(render_curves, self.rows, title)
        if any(row.samples_seconds for row in self.lengths):
            plots["lengths"] = partial(render_lengths, self.lengths)
        return Output(
            [RecordTable(_list_points(self.rows), _CSV_COLUMNS)] if style == "csv" else self._list_tables(),
            plots,
            title,
            self._list_findings(),
            [*self.settings["notes"], *(f"reduced: {line}" for line in self.reduced)],
            failure="every encoder failed; the table says why" if failed else None,
        )

    def _list_tables(self) -> list[RecordTable]:
        seeds = [{**vars(seed), "name": row.name} for row in self.rows for seed in row.seeds]
        tables: tuple[tuple[Sequence[Record], Sequence[Column]], ...] = (
            (self.rows, _SPEECH_COLUMNS),
            (seeds, (*_NAME, *_SEED_COLUMNS)),
            (self.lengths, _LENGTH_COLUMNS),
        )
        return [RecordTable(records, choose_columns(records, columns)) for records, columns in tables if records]

    def _list_findings(self) -> list[str]:
        about = (
            f"{self.settings['seeds']} seeds, each of which holds out other speakers. An epoch is "
            f"{self.settings['epoch_utterances']:,} utterances with {self.settings['epoch_frames']:,} frames of 10 ms"
        )
        published = [row.published for row in self.rows if row.published][:1]
        return [
            *self.findings,
            about,
            *(f"published figures: {one.source}, on {one.data}, on {one.hardware}" for one in published),
        ]


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
    errors = f"errors: linear {linear.error_rate:.1%}, softmax {softmax.error_rate:.1%}"
    paper = f"In the paper: {linear.published.error_rate:.2%} and {softmax.published.error_rate:.2%}"
    lines = [f"{errors}; linear makes more in {more} of {len(pairs)} seeds. {paper}"]
    if linear.seconds_per_epoch is not None and softmax.seconds_per_epoch is not None:
        share = linear.seconds_per_epoch / softmax.seconds_per_epoch
        published = linear.published.seconds_per_epoch / softmax.published.seconds_per_epoch
        lines.append(f"time: an epoch of linear takes {share:.0%} of softmax's. In the paper: {published:.0%}")
    return lines


_NAME = list_columns(SpeechRow, "name")
_SPEECH_COLUMNS = list_columns(
    SpeechRow,
    "name epochs error_rate error_rate_range beam_error_rate seconds_per_epoch seconds_per_epoch_quartiles "
    "times_softmax memory_bytes published.error_rate published.seconds_per_epoch failed",
)
_LENGTH_COLUMNS = list_columns(
    LengthRow,
    "name positions batch seconds_per_epoch seconds_per_epoch_quartiles times_softmax peak_memory_bytes left_out",
    {"name": _ENCODER, "positions": Shown("frames", ",", names=True)},
)
_COUNTS = "substitutions deletions insertions validation_symbols"
_SEED_COLUMNS = list_columns(SeedResult, f"seed held_out error_rate beam_error_rate {_COUNTS}")
_CSV_COLUMNS = (
    *list_columns(SpeechRow, "title name attention device"),
    *(Column("seed"), Column("speakers")),
    *list_columns(SpeechPoint, "epoch loss error_rate training_seconds learning_rate"),
)


def _list_points(rows: Sequence[SpeechRow]) -> list[dict[str, Any]]:
    return [
        {**vars(row), "seed": seed.seed, "speakers": ", ".join(seed.held_out), **vars(point)}
        for row in rows
        for seed in row.seeds
        for point in seed.points
    ]


def render_curves(rows: Sequence[SpeechRow], title: str, kind: PlotFormat) -> bytes:
    """Plot the error rate against epochs and against training time. Bands go from the lowest to the highest seed."""
    against_epochs, against_time = [], []
    for row in rows:
        by_epoch, by_time = [], []
        for points in zip(*(seed.points for seed in row.seeds), strict=False):
            rates = [100 * point.error_rate for point in points]
            band = statistics.fmean(rates), min(rates), max(rates)
            by_epoch.append((points[0].epoch, *band))
            by_time.append((statistics.fmean(point.training_seconds for point in points) / 60, *band))
        against_epochs.append(Curve(row.name, by_epoch))
        against_time.append(Curve(row.name, by_time))
    label = "validation PER (%)"
    panels = [
        Panel("", against_epochs, "epochs", label, x_scale="linear", y_scale="linear"),
        Panel("", against_time, "training time (min)", label, x_scale="linear", y_scale="linear"),
    ]
    return plots.render_plot(panels, "", "", kind, title=title)


def render_lengths(rows: Sequence[LengthRow], kind: PlotFormat) -> bytes:
    frames = max(row.batch * row.positions for row in rows)
    title = f"training steps on {frames:,} frames in all: many short utterances, or one long one"
    time = "seconds_per_epoch", "time of an epoch (s)"
    memory = "peak_memory_bytes", "peak memory of a training step (MiB)"
    labels = {row.name: row.name for row in rows}
    return render_costs(rows, labels, time, memory, "length of the utterances (frames of 10 ms)", title, kind)


def describe_progress(rows: Sequence[SpeechRow]) -> str:
    rates = ", ".join(f"{row.name} {'failed' if row.error_rate is None else f'{row.error_rate:.1%}'}" for row in rows)
    return f"epoch {max((row.epochs for row in rows), default=0):,}: PER {rates}"
