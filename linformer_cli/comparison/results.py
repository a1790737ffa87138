"""One row of figures for each run of a comparison, and their table and plot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from linformer_cli.checkpoint import load_weights
from linformer_cli.checkpoint_files import TrainingSummary
from linformer_cli.config import TrainConfig
from linformer_cli.errors import CheckpointError
from linformer_cli.evaluation.bits import measure_mean
from linformer_cli.report.plots import Curve, Panel, PlotFormat, render_plot, with_error
from linformer_cli.report.tables import Column, Output, RecordTable, Report, Shown, TableStyle, list_columns
from linformer_cli.sampling.engines import AUTO, choose_engine
from linformer_cli.system.timing import Timing
from linformer_cli.units import IMAGES, Words, format_bits, format_bytes, format_count, format_duration
from .entries import Conditions, Entry
from .figures import TIMED_STEPS, find_groups, read_figures, read_runs, sampling_speed, training_speed


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """The figures of one mechanism. Unknown figures are None, and `missing` gives the reason.

    `steps` and `images` are those of the last checkpoint. Samples are times of `TIMED_STEPS` steps, or of a batch that
    `engine` draws. `difference` is bits/dim minus those of the first row, on the same images. With several seeds,
    bits/dim are means over them, and the other figures are those of the first seed.
    """

    name: Annotated[str, Shown("attention")]
    attention: str
    attention_options: Mapping[str, object]
    run: Path
    steps: int
    images: int
    bits_per_dim: float | None = None
    standard_error: float | None = None
    validation_images: int | None = None
    difference: float | None = None
    difference_standard_error: float | None = None
    group: Annotated[int | None, Shown("group")] = None
    parameters: Annotated[int | None, Shown("parameters", format_count)] = None
    state_bytes_per_image: Annotated[int | None, Shown("state", format_bytes)] = None
    device: str
    training_batch: int
    training_precision: str
    training_images_per_second: float | None = None
    training_images_per_second_quartiles: list[float] | None = None
    training_samples_seconds: Sequence[float] = ()
    batch: int
    engine: Annotated[str | None, Shown("engine")] = None
    images_per_second: float | None = None
    images_per_second_quartiles: list[float] | None = None
    samples_seconds: Sequence[float] = ()
    samples: Path | None
    missing: Annotated[str | None, Shown("missing")] = None

    @property
    def bits(self) -> str | None:
        return None if self.bits_per_dim is None else format_bits(self.bits_per_dim, self.standard_error, digits=3)

    @property
    def paired(self) -> Annotated[str | None, Shown("difference")]:
        error = self.difference_standard_error
        return None if self.difference is None else format_bits(self.difference, error, sign="+")


@dataclass(frozen=True, kw_only=True)
class ComparisonReport(Report):
    rows: Sequence[ComparisonRow]
    settings: Mapping[str, Any]
    failures: Mapping[str, str]

    def show(self, style: TableStyle) -> Output:
        words, count = self.settings["data"].words, f"{len(self.failures)} of {len(self.rows)}"
        columns = _CSV_COLUMNS if style == "csv" else _list_table_columns(self.rows, words)
        finished = any(row.bits_per_dim is not None for row in self.rows)
        return Output(
            [RecordTable(self.rows, columns)],
            {"plot": partial(render_comparison, self.rows, words)} if finished else {},
            stopped="Stopped and saved; repeat the command to continue",
            failure=f"{count} failed: {', '.join(self.failures)}; the table says why" if self.failures else None,
        )


def describe_entries(entries: Sequence[Entry], conditions: Conditions, failures: dict[str, str]) -> list[ComparisonRow]:
    """Return the row of each mechanism, from its runs with all seeds; `describe_entry` explains `failures`."""
    rows: dict[str, ComparisonRow] = {}
    for entry in entries:
        row = describe_entry(entry, conditions, failures)
        first = rows.setdefault(entry.name, row)
        if first is not row and row.missing:
            reasons = filter(None, (first.missing, f"{row.name}: {row.missing}"))
            rows[entry.name] = replace(first, missing="; ".join(reasons))
    runs, reference = read_runs(entries), entries[0].name
    groups = find_groups(runs) if len(entries) > len(rows) else {}
    for name, bits in runs.items():
        mean, error = measure_mean(bits)
        row = replace(rows[name], bits_per_dim=mean, standard_error=error, group=groups.get(name))
        if name != reference and reference in runs:
            difference, error = measure_mean(bits - runs[reference])
            row = replace(row, difference=difference, difference_standard_error=error)
        rows[name] = row
    return list(rows.values())


def describe_entry(entry: Entry, conditions: Conditions, failures: dict[str, str]) -> ComparisonRow:
    """Return the row of `entry`. `failures` holds errors by label; the error of a damaged checkpoint is added to it."""
    row = ComparisonRow(
        name=entry.variant.label,
        attention=entry.variant.attention,
        attention_options=entry.config.model.attention_options,
        run=entry.folder.path,
        steps=0,
        images=0,
        device=conditions.device,
        training_batch=entry.step_images,
        training_precision=conditions.precision,
        batch=conditions.batch,
        samples=entry.samples_file if entry.samples_file.exists() else None,
    )
    try:
        saved, finished = entry.saved, entry.finished
        model = None if finished is None else load_weights(finished, conditions.device)
    except CheckpointError as error:
        return replace(row, missing=failures.setdefault(row.name, str(error)))
    failure = failures.get(row.name)
    if saved is not None:
        row = replace(row, steps=saved.info.training.step, images=saved.info.training.images_seen)
    if finished is None or model is None:
        place = "not begun" if saved is None else _describe_place(entry.config.train, saved.info.training)
        return replace(row, missing=f"{place}: {failure}" if failure else place)
    training = finished.info.training
    trained = read_figures(entry.training_file, training_speed(entry, conditions))
    drawn = read_figures(entry.sampling_file, sampling_speed(finished, conditions))
    untimed = " and ".join(name for name, samples in (("training", trained), ("sampling", drawn)) if not samples)
    return replace(
        row,
        bits_per_dim=training.validation_bits_per_dim,
        standard_error=training.validation_standard_error,
        validation_images=training.validation_images,
        parameters=model.parameter_count(),
        state_bytes_per_image=model.state_bytes(1),
        engine=choose_engine(AUTO, model).value if drawn else None,
        missing=failure or (f"{untimed} not timed" if untimed and entry.is_timed and conditions.repeats else None),
        **_describe_speed("training_", trained, TIMED_STEPS * entry.step_images),
        **_describe_speed("", drawn, conditions.batch),
    )


def _describe_place(train: TrainConfig, done: TrainingSummary) -> str:
    if train.max_time is not None:
        return f"{format_duration(done.elapsed_seconds)} of {format_duration(train.max_time)}"
    return f"step {done.step:,} of {train.steps:,}"


def _describe_speed(kind: str, samples: Sequence[float], images: int) -> dict[str, Any]:
    """Return images per second and their quartiles. Each of `samples` is the time for `images` images in seconds."""
    if not samples:
        return {}
    timing, key = Timing(samples), f"{kind}images_per_second"
    quartiles = list(timing.rate_quartiles(images))
    return {f"{kind}samples_seconds": samples, key: timing.rate(images), f"{key}_quartiles": quartiles}


def _list_table_columns(rows: Sequence[ComparisonRow], words: Words) -> tuple[Column, ...]:
    short = "img" if words is IMAGES else words.items
    rates = {
        "training_images_per_second": Shown(f"train {short}/s", format_count),
        "images_per_second": Shown(f"draw {short}/s", format_count),
    }
    keys = f"name bits paired group parameters state_bytes_per_image {' '.join(rates)} engine missing".split()
    if len({row.engine for row in rows if row.engine}) < 2:
        keys.remove("engine")
    known = [key for key in keys if any(getattr(row, key) is not None for row in rows)]
    return list_columns(ComparisonRow, " ".join(known), {"bits": Shown(words.bits), **rates})


_CSV_COLUMNS = list_columns(
    ComparisonRow,
    "name attention attention_options images bits_per_dim standard_error validation_images difference "
    "difference_standard_error group parameters state_bytes_per_image device training_batch training_precision "
    "training_images_per_second training_images_per_second_quartiles batch engine images_per_second "
    "images_per_second_quartiles missing",
)


def render_comparison(rows: Sequence[ComparisonRow], words: Words, kind: PlotFormat) -> bytes:
    """Plot bits/dim against images per second and against the bytes of state, with a point per finished run."""
    drawn = [row for row in rows if row.bits_per_dim is not None]

    def build_panel(label: str, key: str, unit: float) -> Panel:
        found = [(row, getattr(row, key), row.bits_per_dim or 0.0) for row in drawn]
        curves = [Curve(row.name, [with_error(x / unit, y, row.standard_error)]) for row, x, y in found if x]
        return Panel("", curves, x_label=label, y_scale="linear", ticks_at_points=False)

    panels = [
        build_panel(f"{words.items} per second (sampling)", "images_per_second", 1),
        build_panel(f"state per {words.item} (KiB)", "state_bytes_per_image", 1024),
    ]
    return render_plot(panels, "", words.bits, kind, title=f"validation {words.bits} with standard error")
