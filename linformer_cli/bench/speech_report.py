"""The tables, figures and pages of `lintx bench speech`."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from linformer_cli.report.plots import (
    PLOT_FORMATS,
    Curve,
    Panel,
    PlotFormat,
    Span,
    number_styles,
    render_plot,
    render_spectrogram,
)
from linformer_cli.report.tables import Column, Record, Shown, list_columns, render_records
from linformer_cli.speech.saved import Transcript
from linformer_cli.system.environment import describe_machine
from linformer_cli.units import format_duration

from .columns import choose_columns
from .figures import render_costs
from .speech_rows import ENCODER, LengthRow, SeedResult, SpeechPoint, SpeechReport, SpeechRow

_CURVES, _LENGTHS = FIGURES = ("curves", "lengths")
SPEECH_COLUMNS = list_columns(
    SpeechRow,
    "name epochs error_rate error_rates beam_error_rate seconds_per_epoch quartiles times_softmax memory_bytes "
    "published_error_rate published_seconds_per_epoch failed",
)
LENGTH_COLUMNS = list_columns(
    LengthRow,
    "name positions batch seconds_per_epoch quartiles times_softmax peak_memory_bytes left_out",
    {"name": ENCODER, "positions": Shown("frames", ",", names=True)},
)
SEED_COLUMNS = (
    *list_columns(SpeechRow, "name"),
    *list_columns(
        SeedResult,
        "seed speakers error_rate beam_error_rate substitutions deletions insertions validation_symbols",
    ),
)
CSV_COLUMNS = (
    *(Column(key) for key in ("title", "name", "attention", "device", "seed", "speakers", "epoch", "loss")),
    *(Column(key) for key in ("error_rate", "training_seconds", "learning_rate")),
)
HEARD_COLUMNS = (
    Column("symbol", "symbol"),
    Column("start_seconds", "start", "s", format=".2f"),
    Column("end_seconds", "end", "s", format=".2f"),
    Column("probability", "probability", format=".2f"),
)


def list_seeds(rows: Sequence[SpeechRow]) -> list[dict[str, Any]]:
    """Return one record for each seed of each encoder."""
    return [{**vars(seed), "name": row.name, "speakers": seed.speakers} for row in rows for seed in row.seeds]


def list_points(rows: Sequence[SpeechRow]) -> list[dict[str, Any]]:
    """Return one record for each point of every curve, for CSV."""
    return [
        {**vars(row), "seed": seed.seed, "speakers": seed.speakers, **vars(point)}
        for row in rows
        for seed in row.seeds
        for point in seed.points
    ]


def describe_title(report: SpeechReport) -> str:
    """Return the title of all output, which says what the data are."""
    return f"Phoneme error rate (PER) with CTC: {report.settings.title}"


def list_tables(report: SpeechReport) -> list[tuple[Sequence[Record], list[Column]]]:
    """Return the records and the columns of all tables: the mechanisms, the seeds and the lengths. None is empty."""
    tables: tuple[tuple[Sequence[Record], Sequence[Column]], ...] = (
        (report.rows, SPEECH_COLUMNS),
        (list_seeds(report.rows), SEED_COLUMNS),
        (report.lengths, LENGTH_COLUMNS),
    )
    return [(records, choose_columns(records, columns)) for records, columns in tables if records]


def render_page(report: SpeechReport) -> str:
    """Render `report` as Markdown."""
    settings = report.settings
    lines = [
        f"# {describe_title(report)}",
        "",
        f"{describe_machine(report.environment)}; measured in {format_duration(report.elapsed_seconds)} of a budget of "
        f"{format_duration(report.budget_seconds)}.",
        f"{settings.seeds} seeds, each with other held-out speakers. An epoch is {settings.epoch_utterances:,} "
        f"utterances with {settings.epoch_frames:,} frames of 10 ms.",
    ]
    if sources := dict.fromkeys(row.published for row in report.rows if row.published):
        published = next(iter(sources))
        lines += ["", f"Published figures: {published.source}, on {published.data}, on {published.hardware}."]
    for line in report.findings:
        lines += ["", f"{line[0].upper()}{line[1:]}."]
    for records, columns in list_tables(report):
        lines += ["", render_records(records, columns, "md").rstrip("\n")]
    if remarks := [*settings.notes, *report.reduced]:
        lines += ["", "## Remarks", "", *(f"- {line}" for line in remarks)]
    return "\n".join([*lines, ""])


def render_figures(report: SpeechReport) -> dict[str, bytes]:
    """Render every figure that has points. The keys of the result are file names."""
    figures: dict[str, bytes] = {}
    for kind in PLOT_FORMATS:
        if any(row.seeds for row in report.rows):
            figures[f"{_CURVES}.{kind}"] = render_curves(report, kind)
        if any(row.samples_seconds for row in report.lengths):
            figures[f"{_LENGTHS}.{kind}"] = render_lengths(report, kind)
    return figures


def render_curves(report: SpeechReport, kind: PlotFormat) -> bytes:
    """Plot the error rate against epochs and against training time. Bands go from the lowest to the highest seed."""
    against_epochs, against_time = [], []
    for row, (colour, dash) in zip(report.rows, number_styles(len(report.rows)), strict=True):
        if not row.seeds:
            continue
        rounds: list[tuple[SpeechPoint, ...]] = list(zip(*(seed.points for seed in row.seeds), strict=False))
        rates = [[100 * point.error_rate for point in points] for points in rounds]
        means = [statistics.fmean(one) for one in rates]
        low, high = [min(one) for one in rates], [max(one) for one in rates]
        epochs = [points[0].epoch for points in rounds]
        minutes = [statistics.fmean(point.training_seconds for point in points) / 60 for points in rounds]
        against_epochs.append(Curve(row.name, epochs, means, low, high, colour, dash))
        against_time.append(Curve(row.name, minutes, means, low, high, colour, dash))
    label = "validation PER (%)"
    panels = [
        Panel("", against_epochs, "epochs", label, x_scale="linear", y_scale="linear"),
        Panel("", against_time, "training time (min)", label, x_scale="linear", y_scale="linear"),
    ]
    return render_plot(panels, "", "", kind, title=describe_title(report))


def render_lengths(report: SpeechReport, kind: PlotFormat) -> bytes:
    """Plot the time of an epoch and the memory of a step against the length of the utterances."""
    frames = max(row.batch * row.positions for row in report.lengths)
    title = f"training steps on {frames:,} frames in all: many short utterances, or one long one"
    time = "seconds_per_epoch", "time of an epoch (s)"
    memory = "peak_memory_bytes", "peak memory of a training step (MiB)"
    labels = {row.name: row.name for row in report.lengths}
    return render_costs(report.lengths, labels, time, memory, "length of the utterances (frames of 10 ms)", title, kind)


def render_transcript(transcript: Transcript, title: str, kind: PlotFormat) -> bytes:
    """Draw the features of a recording with the symbols, at their times, under them."""
    spans = [Span(one.symbol, one.start_seconds, one.end_seconds, one.probability) for one in transcript.symbols]
    features = transcript.features
    seconds = features.shape[0] * transcript.hop_seconds
    return render_spectrogram(features.T.tolist(), seconds, spans, kind, title)


def describe_progress(rows: Sequence[SpeechRow]) -> str:
    """Describe the newest epoch of every encoder in one line."""
    found: Mapping[str, float | None] = {row.name: row.error_rate for row in rows}
    epochs = max((row.epochs for row in rows), default=0)
    return f"epoch {epochs:,}: PER " + ", ".join(
        f"{name} {'failed' if rate is None else f'{rate:.1%}'}" for name, rate in found.items()
    )
