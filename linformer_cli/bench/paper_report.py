"""The report of `bench paper`, which is written to paper.json, and its page of tables and figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linformer_cli.config import ModelConfig
from linformer_cli.report.plots import PLOT_FORMATS
from linformer_cli.report.tables import Column, Record, render_records
from linformer_cli.system.environment import describe_machine
from linformer_cli.units import format_duration

from .columns import (
    EXPONENT_COLUMNS,
    QUALITY,
    REACH_COLUMNS,
    SAMPLING,
    SCALING_COLUMNS,
    TRAINING,
    choose_columns,
)
from .copy import COPY_COLUMNS, CopyReport, render_copy
from .figures import render_growth, render_quality, render_speed, trained_rows
from .growth import Exponents
from .measure.ceilings import CeilingsReport
from .published import Source
from .rows import AttentionRow, SamplingRow, TrainingRow


@dataclass(frozen=True)
class PaperConditions:
    """The settings that the rows depend on.

    `product_flops_per_position` lists the FLOPs of every model by network and method. Models of `runs` with other
    networks are under the key `runs`.
    """

    methods: Sequence[str]
    networks: Mapping[str, ModelConfig]
    product_flops_per_position: Mapping[str, Mapping[str, int]]
    batches: Sequence[int]
    rounds: int
    sampling_precision: str
    training_precision: str
    checked: str
    runs: Sequence[Path]
    published: Source


@dataclass(frozen=True)
class PaperReport:
    """Everything measured so far.

    `ceiling_networks` names the network of each of the products in `ceilings`. `reduced` lists sizes smaller than the
    paper's, and measurements left out for lack of time. `unfinished` lists the parts that were interrupted.
    """

    budget_seconds: float
    sampling: list[SamplingRow]
    training: list[TrainingRow]
    scaling: list[AttentionRow]
    exponents: list[Exponents]
    copy: CopyReport | None
    ceilings: CeilingsReport
    ceiling_networks: list[str]
    reduced: list[str]
    unfinished: list[str]
    elapsed_seconds: float
    settings: PaperConditions
    environment: Mapping[str, Any]

    @property
    def has_figures(self) -> bool:
        return bool(self.sampling or self.training or self.scaling or self.copy)


def describe_gaps(rows: Sequence[SamplingRow]) -> list[str]:
    """Return a line for each network with extrapolated rows, and one line about rows without a peak memory."""
    lines, timed = [], [row for row in rows if row.samples_seconds]
    for preset in dict.fromkeys(row.preset for row in timed):
        extrapolated = [row.extrapolated is not None for row in timed if row.preset == preset]
        if any(extrapolated):
            lines.append(
                f"sampling {preset or 'runs'}: {sum(extrapolated)} of {len(extrapolated)} rows are extrapolated from "
                "some of the positions"
            )
    if unmeasured := sum(row.peak_memory_bytes is None for row in timed):
        lines.append(f"peak memory of sampling: not measured for {unmeasured} rows")
    return lines


_CEILING_COLUMNS = (
    Column("network", "network"),
    Column("precision", "precision"),
    Column("rows", "rows at once", format=","),
    Column("products", "products"),
    Column("gigaflops", "GFLOP/s", format=".4g"),
)


def render_page(report: PaperReport) -> str:
    """Render `report` as Markdown."""
    published = report.settings.published
    lines = [
        "# The tables of Katharopoulos 2020 on this machine",
        "",
        f"{describe_machine(report.environment)}; measured in {format_duration(report.elapsed_seconds)} of a budget of "
        f"{format_duration(report.budget_seconds)}.",
    ]
    if report.unfinished:
        lines.append(f"Not finished: {', '.join(report.unfinished)}.")
    lines += _table("Sampling", report.sampling, SAMPLING.file)
    if report.sampling:
        lines += ["", f"Published figures: {published.source}. Their hardware: {_list(published.hardware)}."]
        lines += ["Published bits/dim leave out the first value of an image; ours count every value."]
    lines += _table("Training", report.training, TRAINING.file)
    lines += _table("Time and memory against T", report.scaling, SCALING_COLUMNS)
    lines += _table("Exponents", report.exponents, EXPONENT_COLUMNS)
    lines += _table("Reach", report.exponents, REACH_COLUMNS)
    if report.copy:
        title = report.copy.settings.task
        lines += _table(title[0].upper() + title[1:], report.copy.rows, COPY_COLUMNS)
    named = zip(report.ceilings.products, report.ceiling_networks, strict=True)
    ceilings = [{**vars(product), "network": network} for product, network in named]
    lines += _table("The ceilings of this machine", ceilings, _CEILING_COLUMNS)
    speed = report.ceilings.copy.gigabytes_per_second
    lines += ["", f"Memory copies reach {speed:.3g} GB/s. Each byte counts twice, as read and as written."]
    if report.reduced:
        lines += ["", "## Less than in the paper", "", *(f"- {line}" for line in report.reduced)]
    return "\n".join([*lines, ""])


def render_figures(report: PaperReport) -> dict[str, bytes]:
    """Render every figure that has rows. The keys of the result are file names."""
    figures: dict[str, bytes] = {}
    for kind in PLOT_FORMATS:
        if any(row.samples_seconds for row in report.sampling):
            figures[f"images-per-second.{kind}"] = render_speed(report.sampling, kind)
        if trained_rows(report.sampling):
            figures[f"bits-per-dim.{kind}"] = render_quality(report.sampling, kind)
        if any(row.samples_seconds for row in report.scaling):
            figures[f"attention.{kind}"] = render_growth(report.scaling, report.exponents, kind)
        if report.copy and any(row.points for row in report.copy.rows):
            figures[f"copy.{kind}"] = render_copy(report.copy.rows, report.copy.settings.task, kind)
    return figures


def _table(title: str, rows: Sequence[Record], columns: Sequence[Column]) -> list[str]:
    if not rows:
        return []
    keep = [column.key for column in columns if column.key in QUALITY]
    shown = choose_columns(rows, columns, keep) or list(columns)
    return ["", f"## {title}", "", render_records(rows, shown, "md").rstrip("\n")]


def _list(facts: Mapping[str, str]) -> str:
    return "; ".join(f"{name.replace('_', ' ')}: {text}" for name, text in facts.items())
