"""The report of `bench paper`. The same report is written to paper.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linformer_cli.config import ModelConfig

from .copy import CopyReport
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
