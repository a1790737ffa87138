"""The folder of a training run: config.toml, metrics.csv, sample grids, and the checkpoints last/ and best/."""

import csv
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

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

    def create(self, config: RunConfig) -> None:
        """Make the folder; raises `UsageError` where there is one with something in it already."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UsageError(
                f"'{self.path}' exists already; continue it with --resume '{self.path}', or name another with --out"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.write_config(config)
            with open(self.metrics_file, "w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow(METRICS)
        except OSError as error:
            raise LintxError(f"cannot make the run folder '{self.path}': {error.strerror or error}") from None

    def write_config(self, config: RunConfig) -> None:
        """`config.toml`: everything that was decided, defaults included. What is None is left out."""
        document = config.model_dump(exclude_none=True)
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
        try:
            with open(self.metrics_file, "a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, METRICS).writerow(row)
        except OSError as error:
            raise LintxError(f"cannot write '{self.metrics_file}': {error.strerror or error}") from None

    def cut_metrics(self, step: int) -> None:
        """Drop the rows after `step`, which a resumed run writes again."""
        with open(self.metrics_file, newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["step"] and int(row["step"]) <= step]
        with open(self.metrics_file, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, METRICS)
            writer.writeheader()
            writer.writerows(rows)
