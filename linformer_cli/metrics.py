"""Writes and reads `metrics.csv`, the log of a training run, and cuts it when a run is resumed."""

import csv
import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .documents import read_bytes
from .errors import DataError, LintxError, UsageError
from .files import write_file
from .units import parse_count, printable

METRICS_FILE = "metrics.csv"
_MOST_BYTES = 2**28  # millions of rows; a larger file was not written by lintx


@dataclass(frozen=True, kw_only=True)
class MetricsRow:
    """One row of the log: figures of training steps, or of a validation.

    A value that was not measured is None here and an empty cell in the file.
    `train_bits_per_dim` and `images_per_second` are means over the steps since the previous training row.
    """

    step: int
    images: int
    learning_rate: float | None = None
    train_bits_per_dim: float | None = None
    gradient_norm: float | None = None
    validation_bits_per_dim: float | None = None
    validation_standard_error: float | None = None
    elapsed_seconds: float
    images_per_second: float | None = None
    peak_memory_bytes: int | None = None


COLUMNS = tuple(field.name for field in dataclasses.fields(MetricsRow))


@dataclass(frozen=True)
class TrainingPoint:
    """Mean bits/dim over the steps since the previous point, and the learning rate of the last step."""

    step: int
    images: int
    elapsed_seconds: float
    bits_per_dim: float
    learning_rate: float


@dataclass(frozen=True)
class ValidationPoint:
    """Bits/dim of the validation images and their standard error, which is None for a single image."""

    step: int
    images: int
    elapsed_seconds: float
    bits_per_dim: float
    standard_error: float | None


@dataclass(frozen=True)
class RunSeries:
    """All points of a run in the order of logging. `label` distinguishes the run from other runs in the same plot."""

    label: str
    run: Path
    training: list[TrainingPoint]
    validation: list[ValidationPoint]


# Writing


def create_metrics(file: Path) -> None:
    _write(file, [])


def append_row(file: Path, row: MetricsRow) -> None:
    """Add one row. Raises `LintxError` if the file cannot be written."""
    try:
        with open(file, "a", newline="", encoding="utf-8") as opened:
            csv.DictWriter(opened, COLUMNS).writerow(dataclasses.asdict(row))
    except OSError as error:
        raise LintxError(f"cannot write '{file}': {error.strerror or error}") from None


def cut_metrics(file: Path, step: int, validated: bool = True) -> None:
    """Drop the rows after `step`, and its validation unless `validated`: a run resumed there writes them again."""
    _write(file, [row for row in _read_own(file) if _is_before(row, step, validated)])


def _write(file: Path, rows: Sequence[Mapping[str, str]]) -> None:
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    write_file(file, table.getvalue().encode())


def _is_before(row: Mapping[str, str], step: int, validated: bool) -> bool:
    found = parse_count(row["step"] or "")
    if found is None or row[COLUMNS[-1]] is None or len(row) > len(COLUMNS):
        return False
    return found < step or (found == step and (validated or not row["validation_bits_per_dim"]))


# Reading


def read_metrics(file: Path) -> list[dict[str, str]]:
    """Return the cells of every row, by column. If a crash cut a row short, its last cells are None."""
    try:
        # A spreadsheet program may have saved the file with a byte order mark.
        return list(csv.DictReader(io.StringIO(read_bytes(file, _MOST_BYTES).decode("utf-8-sig"), newline="")))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LintxError(f"cannot read '{file}': {error.strerror or error}") from None
    except (ValueError, csv.Error) as error:
        raise DataError(f"'{file}' is not a table of metrics: {error}") from None


def has_steps(file: Path) -> bool:
    return any(row["step"] != "0" for row in _read_own(file))


def _read_own(file: Path) -> list[dict[str, str]]:
    """Return the rows of a file. Raises `DataError` if a column is missing."""
    rows = read_metrics(file)
    if missing := [name for name in COLUMNS if any(name not in row for row in rows)]:
        raise DataError(f"'{file}' has no column '{missing[0]}'; restore its first line, or move the file away")
    return rows


def load_runs(runs: Sequence[Path]) -> list[RunSeries]:
    """Load each run's series, by label. Raises `UsageError` if one is not a run, and `DataError` for a damaged log."""
    return [_load_run(run, label) for run, label in zip(runs, label_runs(runs), strict=True)]


def label_runs(runs: Sequence[Path]) -> list[str]:
    """Name runs by their folders, with as many parents as tell them apart. Raises `UsageError` for equal runs."""
    paths = [run.resolve() for run in runs]
    for run, path in zip(runs, paths, strict=True):
        if paths.count(path) > 1:
            raise UsageError(f"the run '{run}' is named twice")
    for depth in range(1, max((len(path.parts) for path in paths), default=0)):
        labels = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(labels)) == len(labels):
            return [printable(label) for label in labels]
    return [printable(str(path)) for path in paths]


def _load_run(run: Path, label: str) -> RunSeries:
    file = run / METRICS_FILE
    if not file.is_file():
        raise UsageError(f"'{run}' is not a run: it has no {METRICS_FILE}; pass a folder created by lintx train")
    training, validation = [], []
    for number, row in enumerate(read_metrics(file), start=2):
        if None in row.values():  # cut short
            continue
        try:
            place = _count(row["step"]), _count(row["images"]), _number(row["elapsed_seconds"])
            if row["train_bits_per_dim"]:
                bits, rate = _number(row["train_bits_per_dim"]), _number(row["learning_rate"])
                training.append(TrainingPoint(*place, bits, rate))
            if row["validation_bits_per_dim"]:
                bits, text = _number(row["validation_bits_per_dim"]), row["validation_standard_error"]
                validation.append(ValidationPoint(*place, bits, _number(text) if text else None))
        except (KeyError, ValueError) as fault:
            what = f"it has no column {fault}" if isinstance(fault, KeyError) else str(fault)
            raise DataError(f"'{file}' is damaged in line {number}: {what}") from None
    if not training and not validation:
        raise DataError(f"'{file}' is empty: the run has not logged anything yet; wait for its first steps")
    return RunSeries(label, run, training, validation)


def _count(text: str) -> int:
    if (count := parse_count(text)) is None:
        raise ValueError(f"{text[:50]!r} is not a count")
    return count


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value
