"""Logs of a run beside metrics.csv, whose columns name the figures, for TensorBoard and Weights & Biases."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from linformer_cli.config import RunConfig
from linformer_cli.errors import LintxError, describe_reason
from linformer_cli.metrics import MetricsRow
from linformer_cli.report.grids import read_png
from linformer_cli.system.environment import import_extra

_FLUSH_SECONDS = 10


class TensorBoardLog:
    """Event files in `tensorboard/` of the run. After a resume, TensorBoard shows only the new figures of a step."""

    def __init__(self, run: Path, config: RunConfig, step: int) -> None:
        writer = import_extra("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(str(run / "tensorboard"), purge_step=step + 1, flush_secs=_FLUSH_SECONDS)

    def append(self, row: MetricsRow) -> None:
        for name, value in _figures(row).items():
            self._writer.add_scalar(name, value, row.step)

    def append_samples(self, file: Path, step: int) -> None:
        if file.suffix == ".png":
            self._writer.add_image("samples", np.asarray(read_png(file).convert("RGB")), step, dataformats="HWC")
        else:
            self._writer.add_text("samples", file.read_text(encoding="utf-8"), step)

    def close(self) -> None:
        self._writer.close()


class WandbLog:
    """A run of Weights & Biases, whose files are in `wandb/` of the run. A resume continues the newest one there."""

    def __init__(self, run: Path, config: RunConfig, step: int) -> None:
        self._wandb = import_extra("wandb", "wandb")
        earlier = sorted(run.glob("wandb/*run-*-*"), key=lambda path: path.name.removeprefix("offline-"))
        try:
            self._run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", "lintx"),
                name=run.name,
                dir=run,
                id=earlier[-1].name.rpartition("-")[2] if earlier else None,
                resume="allow",
                config=config.model_dump(mode="json", exclude_none=True),
            )
        except self._wandb.Error as error:
            raise LintxError(f"--log wandb: {describe_reason(error)}") from None
        # The client's own count of steps only grows, so that it would drop the repeated steps of a resumed run.
        self._run.define_metric("*", step_metric="step")

    def append(self, row: MetricsRow) -> None:
        self._run.log({"step": row.step, **_figures(row)})

    def append_samples(self, file: Path, step: int) -> None:
        samples = self._wandb.Image(str(file)) if file.suffix == ".png" else file.read_text(encoding="utf-8")
        self._run.log({"step": step, "samples": samples})

    def close(self) -> None:
        self._run.finish()


# Receives the rows of metrics.csv and the samples of a run that continues after a step.
RunLog = TensorBoardLog | WandbLog
OpenLog = Callable[[Path, RunConfig, int], RunLog]
_LOGS: dict[str, tuple[str, OpenLog]] = {
    "tensorboard": ("torch.utils.tensorboard", TensorBoardLog),
    "wandb": ("wandb", WandbLog),
}
LOG_NAMES = tuple(_LOGS)


def find_logs(names: Sequence[str]) -> list[OpenLog]:
    """Find the kinds of log with these names, each once. Raises `LintxError` if a package is missing."""
    for name in names:
        import_extra(_LOGS[name][0], name)
    return [_LOGS[name][1] for name in dict.fromkeys(names)]


def _figures(row: MetricsRow) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if value is not None and name != "step"}
