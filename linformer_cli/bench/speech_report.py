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
from linformer_cli.report.tables import Column, render_records
from linformer_cli.speech.saved import Transcript
from linformer_cli.system.environment import describe_machine
from linformer_cli.units import format_bytes, format_duration

from .speech_rows import LengthRow, SpeechPoint, SpeechReport, SpeechRow
from .tables import choose_columns

_CURVES, _LENGTHS = FIGURES = ("curves", "lengths")
_NAME = Column("name", "encoder", names=True)
SPEECH_COLUMNS = (
    _NAME,
    Column("epochs", "epochs", format=","),
    Column("error_rate", "PER", format=".1%"),
    Column("range", "range"),
    Column("beam_error_rate", "PER, beam", format=".1%"),
    Column("seconds_per_epoch", "s/epoch", format=".3g"),
    Column("quartiles", "quartiles"),
    Column("times_softmax", "x softmax", format=".3g"),
    Column("memory_bytes", "memory", format=format_bytes),
    Column("published_error_rate", "published PER, WSJ", format=".2%"),
    Column("published_seconds_per_epoch", "published s/epoch", format=",.0f"),
    Column("failed", "failed"),
)
LENGTH_COLUMNS = (
    _NAME,
    Column("positions", "frames", format=",", names=True),
    Column("batch", "batch"),
    Column("seconds_per_epoch", "s/epoch", format=".3g"),
    Column("quartiles", "quartiles"),
    Column("times_softmax", "x softmax", format=".3g"),
    Column("peak_memory_bytes", "memory", format=format_bytes),
    Column("left_out", "left out"),
)
SEED_COLUMNS = (
    _NAME,
    Column("seed", "seed", names=True),
    Column("speakers", "held-out speakers"),
    Column("error_rate", "PER", format=".1%"),
    Column("beam_error_rate", "PER, beam", format=".1%"),
    Column("substitutions", "substituted", format=","),
    Column("deletions", "missed", format=","),
    Column("insertions", "inserted", format=","),
    Column("validation_symbols", "of symbols", format=","),
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


def flatten_row(row: SpeechRow | LengthRow) -> dict[str, Any]:
    """Flatten a row of either table."""
    low, high = row.seconds_per_epoch_quartiles or (None, None)
    flat = {**vars(row), "quartiles": None if low is None else f"{low:.3g}-{high:.3g}"}
    if rates := flat.get("error_rate_range"):
        flat["range"] = f"{100 * rates[0]:.1f}-{100 * rates[1]:.1f} %"
    if published := flat.get("published"):
        flat["published_error_rate"] = published.error_rate
        flat["published_seconds_per_epoch"] = published.seconds_per_epoch
    return flat


def list_seeds(rows: Sequence[SpeechRow]) -> list[dict[str, Any]]:
    """Return one record for each seed of each encoder."""
    return [
        {**vars(seed), "name": row.name, "speakers": ", ".join(seed.held_out)} for row in rows for seed in row.seeds
    ]


def list_points(rows: Sequence[SpeechRow]) -> list[dict[str, Any]]:
    """Return one record for each point of every curve, for CSV."""
    return [
        {**vars(row), "seed": seed.seed, "speakers": ", ".join(seed.held_out), **vars(point)}
        for row in rows
        for seed in row.seeds
        for point in seed.points
    ]


def describe_title(report: SpeechReport) -> str:
    """Return the title of all output, which says what the data are."""
    return f"Phoneme error rate (PER) with CTC: {report.settings.title}"


def list_tables(report: SpeechReport) -> list[tuple[list[dict[str, Any]], list[Column]]]:
    """Return the records and the columns of all tables: the mechanisms, the seeds and the lengths. None is empty."""
    tables = (
        ([flatten_row(row) for row in report.rows], SPEECH_COLUMNS),
        (list_seeds(report.rows), SEED_COLUMNS),
        ([flatten_row(row) for row in report.lengths], LENGTH_COLUMNS),
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
    times, memories = [], []
    names = list(dict.fromkeys(row.name for row in report.lengths))
    for name, style in zip(names, number_styles(len(names)), strict=True):
        mine = [row for row in report.lengths if row.name == name]
        timed = [
            (row.positions, row.seconds_per_epoch, *row.seconds_per_epoch_quartiles)
            for row in mine
            if row.seconds_per_epoch is not None and row.seconds_per_epoch_quartiles is not None
        ]
        counted = [(row.positions, row.peak_memory_bytes / 2**20) for row in mine if row.peak_memory_bytes]
        times.append(Curve.through(name, timed, style))
        memories.append(Curve.through(name, counted, style))
    panels = [
        Panel("time", times, y_label="time of an epoch (s)"),
        Panel("memory", memories, y_label="peak memory of a training step (MiB)"),
    ]
    frames = max(row.batch * row.positions for row in report.lengths)
    steps = f"training steps on {frames:,} frames in all: many short utterances, or one long one"
    return render_plot(panels, "length of the utterances (frames of 10 ms)", "", kind, title=steps)


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
