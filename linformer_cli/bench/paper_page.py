"""Renders the report of `lintx bench paper` as a page of tables and a set of figures."""

from collections.abc import Mapping, Sequence

from linformer_cli.report.plots import PLOT_FORMATS
from linformer_cli.report.tables import Column, Record, render_records
from linformer_cli.system.environment import describe_machine
from linformer_cli.units import format_duration

from .copy_report import COPY_COLUMNS, render_copy
from .paper_report import PaperReport
from .plots import render_growth, render_quality, render_speed, trained_rows
from .tables import (
    EXPONENT_COLUMNS,
    QUALITY,
    REACH_COLUMNS,
    SAMPLING,
    SCALING_COLUMNS,
    TRAINING,
    choose_columns,
    flatten_growth,
    flatten_speed,
)

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
    lines += _table("Sampling", [flatten_speed(row) for row in report.sampling], SAMPLING.file)
    if report.sampling:
        lines += ["", f"Published figures: {published.source}. Their hardware: {_list(published.hardware)}."]
        lines += ["Published bits/dim leave out the first value of an image; ours count every value."]
    lines += _table("Training", [flatten_speed(row) for row in report.training], TRAINING.file)
    scaling = flatten_growth(report.scaling, report.exponents)
    lines += _table("Time and memory against T", scaling, SCALING_COLUMNS)
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
