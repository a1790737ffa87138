"""Training, as seen in a terminal: one live line, or plain lines where there is no terminal."""

import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from linformer_cli.report.terminal import format_bytes, format_duration

from .output import is_quiet

if TYPE_CHECKING:
    from linformer_cli.evaluation.bits import Bits
    from linformer_cli.training.progress import Progress as RunProgress

_PLAIN_INTERVAL_SECONDS = 10.0


class TrainingDisplay:
    """A `Reporter` of the training loop that writes to stderr."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live: Progress | None = None
        self._bar = TaskID(0)
        self._began = time.monotonic()
        self._first_share: float | None = None
        self._next_plain = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal and not is_quiet():
            columns = (BarColumn(bar_width=20), TextColumn("{task.percentage:.0f}%"), TextColumn("{task.description}"))
            self._live = Progress(*columns, console=self._console)
            self._bar = self._live.add_task("starting", total=1.0)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def on_step(self, row: dict[str, Any], finished_share: float) -> None:
        line = (
            f"step {row['step']}  {row['train_bits_per_dim']:.3f} bits/dim  {row['images_per_second']:.1f} images/s  "
            f"{self._remaining(finished_share)} left  {format_bytes(row['peak_memory_bytes'])}"
        )
        if self._live is not None:
            self._live.update(self._bar, completed=finished_share, description=line)
        elif time.monotonic() >= self._next_plain and not is_quiet():
            self._next_plain = time.monotonic() + _PLAIN_INTERVAL_SECONDS
            self._say(f"{finished_share:4.0%}  {line}")

    def on_evaluate(self, progress: "RunProgress", bits: "Bits", is_best: bool) -> None:
        best = ", the best so far" if is_best else ""
        self._say(
            f"step {progress.step}: validation {bits.bits_per_dim:.4f} +- {bits.standard_error:.4f} bits/dim over "
            f"{bits.images} images{best}"
        )

    def on_sample(self, path: Path) -> None:
        self._say(f"wrote {path}")

    def on_save(self, path: Path, progress: "RunProgress") -> None:
        """Saving is not news; the progress line goes on."""

    def on_spike(self, message: str) -> None:
        self._print(f"warning: {message}")

    def _remaining(self, share: float) -> str:
        """The time left, from the speed since this process began (a resumed run starts in the middle)."""
        if self._first_share is None:
            self._first_share, self._began = share, time.monotonic()
        done = share - self._first_share
        if done <= 0:
            return "?"
        return format_duration((time.monotonic() - self._began) / done * (1 - share))

    def _say(self, line: str) -> None:
        if not is_quiet():
            self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
