"""Progress on stderr: one live line in a terminal, otherwise a plain line every few seconds."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from linformer_cli.training.progress import Progress as RunProgress
from linformer_cli.training.progress import Reporter
from linformer_cli.units import IMAGES, Words, format_bits, format_bytes, format_duration
from .output import info, is_quiet, safe_stderr

if TYPE_CHECKING:
    from linformer_cli.evaluation.bits import Bits
    from linformer_cli.metrics import MetricsRow

_PLAIN_INTERVAL_SECONDS = 10.0
_BAR_COLUMNS, _PERCENT_COLUMNS = 20, 5


class TrainingDisplay(Reporter):
    """A `Reporter` of the training loop that writes to `console`, by default stderr."""

    def __init__(self, console: Console | None = None, words: Words = IMAGES) -> None:
        self._words = words
        self._console = Console(stderr=True, file=safe_stderr()) if console is None else console
        self._live: Progress | None = None
        self._bar = TaskID(0)
        self._began = time.monotonic()
        self._first_share: float | None = None
        self._next_plain = 0.0
        self._line = "starting"

    def __enter__(self) -> Self:
        if self._console.is_terminal and not is_quiet():
            percent, line = TextColumn("{task.percentage:3.0f}%"), TextColumn("{task.description}")
            columns = (BarColumn(_BAR_COLUMNS), percent, line) if self._has_bar else (percent, line)
            self._live = Progress(*columns, console=self._console)
            self._bar = self._live.add_task(self._line, total=1.0)
            self._live.start()
            self._console.show_cursor(True)  # a second Ctrl-C would end the process without restoring the cursor
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._live is not None:
            if kind is None:  # the last step is rarely logged, so the bar is completed here
                self._live.update(self._bar, completed=1.0)
            self._live.stop()

    def on_step(self, row: "MetricsRow", finished_share: float) -> None:
        facts = [
            f"step {row.step}",
            f"{row.train_bits_per_dim:.3f} {self._words.bits}",
            f"{self._remaining(finished_share)} left",
            f"{row.images_per_second:.1f} {self._words.items}/s",
            format_bytes(row.peak_memory_bytes or 0),
        ]
        if self._live is not None:
            self._line = self._fit(facts)
            self._live.update(self._bar, completed=finished_share, description=self._line)
        elif time.monotonic() >= self._next_plain:
            self._next_plain = time.monotonic() + _PLAIN_INTERVAL_SECONDS
            self._say(f"{finished_share:4.0%}  {'  '.join(facts)}")

    def on_evaluate(self, progress: RunProgress, bits: "Bits", is_best: bool) -> None:
        best = ", the best so far" if is_best else ""
        found = f"{format_bits(bits.bits_per_dim, bits.standard_error)} {self._words.bits}"
        self._say(f"step {progress.step}: validation {found} over {bits.images} {self._words.items}{best}")

    def on_sample(self, path: Path) -> None:
        self._say(f"wrote {path}")

    def on_busy(self, what: str) -> None:
        """Show what takes a while, or with an empty text the last step again."""
        if self._live is not None:
            self._live.update(self._bar, description=what or self._line, refresh=True)

    def on_spike(self, message: str) -> None:
        self._print(f"warning: {message}")

    def _remaining(self, share: float) -> str:
        """Return the time left. A resumed run starts in the middle, so only the speed of this process counts."""
        if self._first_share is None:
            self._first_share, self._began = share, time.monotonic()
        done = share - self._first_share
        return "?" if done <= 0 else format_duration((time.monotonic() - self._began) / done * (1 - share))

    @property
    def _has_bar(self) -> bool:
        return self._console.width >= 100

    def _fit(self, facts: list[str]) -> str:
        """Join as many of the first `facts` as fit in one line of the terminal."""
        room = self._console.width - _PERCENT_COLUMNS - (_BAR_COLUMNS + 1) * self._has_bar
        line = facts[0]
        for fact in facts[1:]:
            if len(line) + 2 + len(fact) > room:
                break
            line += f"  {fact}"
        return line

    def _say(self, line: str) -> None:
        if not is_quiet():
            self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class Bar:
    def __init__(self, title: str, total: int, words: str) -> None:
        self._title, self._total, self._words = title, total, words
        self._next = time.monotonic() + _PLAIN_INTERVAL_SECONDS
        self._live: Progress | None = None

    def __enter__(self) -> Self:
        console = Console(stderr=True, file=safe_stderr())
        if console.is_terminal and not is_quiet():
            columns = (TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.percentage:3.0f}%"))
            self._live = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
            self._task = self._live.add_task(self._title, total=self._total)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, done: int) -> None:
        if self._live is not None:
            self._live.update(self._task, completed=done)
        elif time.monotonic() >= self._next and done < self._total:
            self._next = time.monotonic() + _PLAIN_INTERVAL_SECONDS
            info(f"{self._title}: {done:,} of {self._total:,} {self._words}")
