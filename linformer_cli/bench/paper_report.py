"""The report of `bench paper`: its tables, figures and remarks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from linformer_cli.report.plots import PlotFormat
from linformer_cli.report.tables import Column, Output, RecordTable, TableStyle, list_columns
from . import columns as shown
from .budget import BudgetReport
from .columns import render_growth, render_quality, render_speed, trained_rows
from .copy import CopyReport
from .growth import Exponents
from .measure.ceilings import CeilingsReport, ProductCeiling
from .published import Source
from .rows import AttentionRow, SamplingRow, TrainingRow

_CEILING_COLUMNS = (Column("network", "network"), *list_columns(ProductCeiling, "precision rows products gigaflops"))


@dataclass(frozen=True, kw_only=True)
class PaperReport(BudgetReport):
    """The rows of all parts. `ceiling_networks` names the network of each of the products in `ceilings`."""

    sampling: list[SamplingRow]
    training: list[TrainingRow]
    scaling: list[AttentionRow]
    exponents: list[Exponents]
    copy: CopyReport | None
    ceilings: CeilingsReport
    ceiling_networks: list[str]
    unfinished: list[str]
    settings: Mapping[str, object]

    def show(self, style: TableStyle) -> Output:
        """Show all parts. CSV has the table of sampling; the other tables are in the JSON document."""
        sampling, copy = self.sampling, None if self.copy is None else self.copy.show(style)
        named = zip(self.ceilings.products, self.ceiling_networks, strict=True)
        ceilings = [{**vars(product), "network": network} for product, network in named]
        tables = [
            *shown.list_speed_tables(sampling, shown.SAMPLING, style, "Sampling"),
            *shown.list_speed_tables(self.training, shown.TRAINING, style, "Training"),
            *shown.list_growth_tables(self.scaling, self.exponents, style),
            *([copy.tables[0]._replace(title=copy.title)] if copy else []),
            RecordTable(ceilings, _CEILING_COLUMNS, "The ceilings of this machine"),
        ]
        plots: dict[str, Callable[[PlotFormat], bytes]] = {}
        if any(row.samples_seconds for row in sampling):
            plots["images-per-second"] = partial(render_speed, sampling)
        if trained_rows(sampling):
            plots["bits-per-dim"] = partial(render_quality, sampling)
        if any(row.samples_seconds for row in self.scaling):
            plots["attention"] = partial(render_growth, self.scaling, self.exponents)
        if copy is not None and "plot" in copy.plots:
            plots["copy"] = copy.plots["plot"]
        return Output(
            [table for table in tables if table.records or style == "csv"],
            plots,
            "The tables of Katharopoulos 2020 on this machine",
            self._list_findings(),
            [*(f"reduced: {line}" for line in self.reduced), str(self.ceilings)],
        )

    def _list_findings(self) -> list[str]:
        findings = [f"not finished: {', '.join(self.unfinished)}"] if self.unfinished else []
        if self.sampling:
            published = Source()
            hardware = "; ".join(f"{name.replace('_', ' ')}: {text}" for name, text in published.hardware.items())
            findings.append(f"published figures: {published.source}. Their hardware: {hardware}")
            findings.append("published bits/dim leave out the first value of an image; ours count every value")
        speed = self.ceilings.copy.gigabytes_per_second
        findings.append(f"memory copies reach {speed:.3g} GB/s. Each byte counts twice, as read and as written")
        return findings


def describe_gaps(rows: Sequence[SamplingRow]) -> list[str]:
    """Return a line for each network with extrapolated rows, and one about rows without a peak memory."""
    lines, timed = [], [row for row in rows if row.samples_seconds]
    for preset in dict.fromkeys(row.preset for row in timed):
        extrapolated = [row.extrapolated is not None for row in timed if row.preset == preset]
        if any(extrapolated):
            why = f"{sum(extrapolated)} of {len(extrapolated)} rows are extrapolated from some of the positions"
            lines.append(f"sampling {preset or 'runs'}: {why}")
    if unmeasured := sum(row.peak_memory_bytes is None for row in timed):
        lines.append(f"peak memory of sampling: not measured for {unmeasured} rows")
    return lines
