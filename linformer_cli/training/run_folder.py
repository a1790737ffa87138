"""The folder of a training run: config.toml, metrics.csv, sample grids, and the checkpoints last/ and best/."""

import contextlib
import csv
import os
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from filelock import FileLock, Timeout

from linformer_cli.config import RunConfig, parse_config
from linformer_cli.errors import CheckpointError, LintxError, UsageError

METRICS = (
    "step",
    "images",
    "learning_rate",
    "train_bits_per_dim",
    "gradient_norm",
    "validation_bits_per_dim",
    "validation_standard_error",
    "elapsed_seconds",
    "images_per_second",
    "peak_memory_bytes",
)
# What depends on the machine's speed, not on the training: left out when two runs are compared.
TIMING_METRICS = ("elapsed_seconds", "images_per_second", "peak_memory_bytes")


class RunFolder:
    """Paths and files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.toml"
        self.metrics_file = path / "metrics.csv"
        self.last = path / "last"
        self.best = path / "best"
        self.samples = path / "samples"
        self.kept = path / "kept"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Refuse a second process on this run. The system lifts the lock when a process ends, however it ends."""
        lock = FileLock(self.path / ".lock", blocking=False)
        with _one_line(self.path):
            try:
                lock.acquire()
            except Timeout:
                raise LintxError(
                    f"another process is training in '{self.path}'; stop it or start another run"
                ) from None
        try:
            yield
        finally:
            lock.release()

    def keep(self, step: int, keep_last: int) -> None:
        """Add what `last/` holds to `kept/`, as links that take no space, and leave the `keep_last` newest there."""
        if keep_last == 1:
            return
        folder = self.kept / f"step-{step:07d}"
        with _one_line(folder):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(self.last, folder, copy_function=_link_or_copy)
            for old in sorted(self.kept.glob("step-*"))[:-keep_last]:
                shutil.rmtree(old)

    def create(self, config: RunConfig) -> None:
        """Make the folder; raises `UsageError` where there is one with something in it already."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UsageError(
                f"'{self.path}' exists already; continue it with --resume '{self.path}', or name another with --out"
            )
        with _one_line(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        self.write_config(config)
        self._write_metrics([])

    def write_config(self, config: RunConfig) -> None:
        """`config.toml`: everything that was decided, defaults included. What is None is left out."""
        document = config.model_dump(exclude_none=True)
        with _one_line(self.config_file):
            self.config_file.write_text(tomli_w.dumps(document), encoding="utf-8")

    def read_config(self) -> RunConfig:
        try:
            document = tomllib.loads(self.config_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"'{self.path}' is not a run folder: it has no config.toml") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"'{self.config_file}' cannot be read: {error}") from None
        return parse_config(RunConfig, document, str(self.config_file))

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add one row; a value that was not measured is an empty cell."""
        with _one_line(self.metrics_file), open(self.metrics_file, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, METRICS).writerow(row)

    def cut_metrics(self, step: int, validated: bool = True) -> None:
        """Drop the rows after `step`, which a resumed run writes again; `validated` keeps the validation of `step`."""
        with _one_line(self.metrics_file), open(self.metrics_file, newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if _is_kept(row, step, validated)]
        self._write_metrics(rows)

    def _write_metrics(self, rows: Sequence[Mapping[str, Any]]) -> None:
        # Beside and renamed: these rows are the only record of a run, and a disk can be full.
        writing = self.metrics_file.with_suffix(".csv.writing")
        with _one_line(self.metrics_file):
            with open(writing, "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, METRICS)
                writer.writeheader()
                writer.writerows(rows)
            os.replace(writing, self.metrics_file)


def _is_kept(row: Mapping[str, str], step: int, validated: bool) -> bool:
    """Whether a row of metrics.csv was written before a checkpoint of `step`; a row cut short by a crash was not."""
    if not (row["step"] or "").isdigit() or row["peak_memory_bytes"] is None:
        return False
    return int(row["step"]) < step or (int(row["step"]) == step and (validated or not row["validation_bits_per_dim"]))


def _link_or_copy(source: str, target: str) -> None:
    """A checkpoint's files are never changed, only replaced, so two names may share one file."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


@contextlib.contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Turn what the system refuses into one line that names the file."""
    try:
        yield
    except OSError as error:
        raise LintxError(f"cannot read or write '{path}': {error.strerror or error}") from None
