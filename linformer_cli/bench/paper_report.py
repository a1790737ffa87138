"""The report of `bench paper`, which is written to paper.json, and its page of tables and figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from linformer_cli.config import ModelConfig
from linformer_cli.report.plots import PlotFormat
from linformer_cli.report.tables import Column, Record, render_records

from . import columns as shown
from .budget import BudgetReport
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


@dataclass(frozen=True, kw_only=True)
class PaperReport(BudgetReport):
    """The rows of all parts.

    `ceiling_networks` names the network of each of the products in `ceilings`. `unfinished` lists the parts that were
    interrupted.
    """

    sampling: list[SamplingRow]
    training: list[TrainingRow]
    scaling: list[AttentionRow]
    exponents: list[Exponents]
    copy: CopyReport | None
    ceilings: CeilingsReport
    ceiling_networks: list[str]
    unfinished: list[str]
    settings: PaperConditions

    @property
    def has_figures(self) -> bool:
        return bool(self.sampling or self.training or self.scaling or self.copy)

    def render_page(self) -> str:
        published = self.settings.published
        lines = ["# The tables of Katharopoulos 2020 on this machine", "", self.origin]
        if self.unfinished:
            lines.append(f"Not finished: {', '.join(self.unfinished)}.")
        lines += _table("Sampling", self.sampling, shown.SAMPLING.file)
        if self.sampling:
            hardware = "; ".join(f"{name.replace('_', ' ')}: {text}" for name, text in published.hardware.items())
            lines += ["", f"Published figures: {published.source}. Their hardware: {hardware}."]
            lines += ["Published bits/dim leave out the first value of an image; ours count every value."]
        lines += _table("Training", self.training, shown.TRAINING.file)
        lines += _table("Time and memory against T", self.scaling, shown.SCALING_COLUMNS)
        lines += _table("Exponents", self.exponents, shown.EXPONENT_COLUMNS)
        lines += _table("Reach", self.exponents, shown.REACH_COLUMNS)
        if self.copy:
            title = self.copy.settings.task
            lines += _table(title[0].upper() + title[1:], self.copy.rows, COPY_COLUMNS)
        named = zip(self.ceilings.products, self.ceiling_networks, strict=True)
        ceilings = [{**vars(product), "network": network} for product, network in named]
        lines += _table("The ceilings of this machine", ceilings, _CEILING_COLUMNS)
        speed = self.ceilings.copy.gigabytes_per_second
        lines += ["", f"Memory copies reach {speed:.3g} GB/s. Each byte counts twice, as read and as written."]
        if self.reduced:
            lines += ["", "## Less than in the paper", "", *(f"- {line}" for line in self.reduced)]
        return "\n".join([*lines, ""])

    def list_figures(self) -> dict[str, Callable[[PlotFormat], bytes]]:
        figures: dict[str, Callable[[PlotFormat], bytes]] = {}
        if any(row.samples_seconds for row in self.sampling):
            figures["images-per-second"] = partial(render_speed, self.sampling)
        if trained_rows(self.sampling):
            figures["bits-per-dim"] = partial(render_quality, self.sampling)
        if any(row.samples_seconds for row in self.scaling):
            figures["attention"] = partial(render_growth, self.scaling, self.exponents)
        if self.copy and any(row.points for row in self.copy.rows):
            figures["copy"] = partial(render_copy, self.copy.rows, self.copy.settings.task)
        return figures


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


def _table(title: str, rows: Sequence[Record], columns: Sequence[Column]) -> list[str]:
    if not rows:
        return []
    keep = [column.key for column in columns if column.key in shown.QUALITY]
    chosen = shown.choose_columns(rows, columns, keep) or columns
    return ["", f"## {title}", "", render_records(rows, chosen, "md").rstrip("\n")]
