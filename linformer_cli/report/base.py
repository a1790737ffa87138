"""What benchmarks and comparisons return, and what a command shows of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from linformer_cli.system.environment import describe_environment
from .plots import PlotFormat
from .tables import RecordTable, TableStyle

Ending = Literal["finished", "interrupted"]
# Functions that draw plots, by the option that names the file.
Plots = Mapping[str, Callable[[PlotFormat], bytes]]


@dataclass(frozen=True)
class Output:
    """What is shown of a report. CSV has only the first table. Plots without points are missing.

    `title` is printed above the tables, `findings` below them, and `remarks` on stderr. `stopped` is said at the end
    after Ctrl-C. `failure` is the error of the command if everything failed.
    """

    tables: Sequence[RecordTable]
    plots: Plots = field(default_factory=dict)
    title: str = ""
    findings: Sequence[str] = ()
    remarks: Sequence[str] = ()
    stopped: str = "Stopped; the results so far are shown"
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class Report(ABC):
    """What was found. In JSON, the keys are the field names."""

    environment: Mapping[str, Any] = field(default_factory=describe_environment)

    @abstractmethod
    def show(self, style: TableStyle) -> Output:
        """Return what a command shows in this style."""
