"""What a training run has logged: `metrics.csv` as rows and as series."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linformer_cli.errors import DataError, LintxError, UsageError

METRICS_FILE = "metrics.csv"


@dataclass(frozen=True)
class TrainingPoint:
    """The mean over the steps since the point before, and the learning rate of the last of them."""

    step: int
    images: int
    elapsed_seconds: float
    bits_per_dim: float
    learning_rate: float


@dataclass(frozen=True)
class ValidationPoint:
    """Bits/dim of the validation images with their standard error, None of one image."""

    step: int
    images: int
    elapsed_seconds: float
    bits_per_dim: float
    standard_error: float | None


@dataclass(frozen=True)
class RunSeries:
    """All points of a run in the order in which they were logged. `label` tells it from the runs beside it."""

    label: str
    run: Path
    training: list[TrainingPoint]
    validation: list[ValidationPoint]


def read_metrics(file: Path) -> list[dict[str, str]]:
    """The rows of a `metrics.csv` as they are; a row that a crash cut short lacks its last values (None).

    Nothing for a file that is missing. Raises `LintxError` where it cannot be read.
    """
    try:
        # A spreadsheet may have saved it with a byte order mark.
        with open(file, newline="", encoding="utf-8-sig") as lines:
            return list(csv.DictReader(lines))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LintxError(f"cannot read '{file}': {error.strerror or error}") from None
    except (ValueError, csv.Error) as error:
        raise DataError(f"'{file}' is not a table of metrics: {error}") from None


def load_runs(runs: Sequence[Path]) -> list[RunSeries]:
    """The series of every run, labelled by the end of its path that makes it unique.

    Raises `UsageError` for a run that is named twice or is none, `DataError` where nothing is logged yet or the log is
    damaged.
    """
    return [_load_run(run, label) for run, label in zip(runs, label_runs(runs), strict=True)]


def label_runs(runs: Sequence[Path]) -> list[str]:
    """The names of the folders, with as many folders before them as it takes to tell them apart."""
    paths = [run.resolve() for run in runs]
    for run, path in zip(runs, paths, strict=True):
        if paths.count(path) > 1:
            raise UsageError(f"the run '{run}' is named twice")
    for depth in range(1, max((len(path.parts) for path in paths), default=0)):
        labels = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]


def _load_run(run: Path, label: str) -> RunSeries:
    file = run / METRICS_FILE
    if not file.is_file():
        raise UsageError(f"'{run}' is not a run: it has no {METRICS_FILE}; name the folder that lintx train made")
    training, validation = [], []
    for number, row in enumerate(read_metrics(file), start=2):
        if None in row.values():  # cut short
            continue
        try:
            place = int(row["step"]), int(row["images"]), _number(row["elapsed_seconds"])
            if row["train_bits_per_dim"]:
                bits, rate = _number(row["train_bits_per_dim"]), _number(row["learning_rate"])
                training.append(TrainingPoint(*place, bits, rate))
            if row["validation_bits_per_dim"]:
                bits, text = _number(row["validation_bits_per_dim"]), row["validation_standard_error"]
                error = _number(text) if text else None
                validation.append(ValidationPoint(*place, bits, error))
        except (KeyError, ValueError) as fault:
            what = f"it has no column {fault}" if isinstance(fault, KeyError) else str(fault)
            raise DataError(f"'{file}' is damaged in line {number}: {what}") from None
    if not training and not validation:
        raise DataError(f"'{file}' is empty: nothing of the run is logged yet; wait for its first steps")
    return RunSeries(label, run, training, validation)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value
