"""What `lintx compress` and `lintx decompress` share: progress, and data from stdin or for stdout."""

import shutil
import sys
import tempfile
import time
from types import TracebackType
from typing import BinaryIO, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from linformer_cli.errors import UsageError

from .output import info, is_quiet, safe_stderr

_PLAIN_INTERVAL_SECONDS = 10.0


def read_stdin() -> BinaryIO:
    """All data of stdin, as a temporary file that can seek. Closing the file removes it."""
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("'-' reads data from stdin, and stdin is a terminal; redirect it from a file or a pipe")
    file = tempfile.TemporaryFile()  # noqa: SIM115
    shutil.copyfileobj(sys.stdin.buffer, file)
    file.seek(0)
    return file


def require_binary_stdout(json: bool) -> None:
    """Raise `UsageError` if data cannot be written to stdout."""
    if json:
        raise UsageError("--json and '-o -' would both write to stdout; leave out one of them")
    if sys.stdout.isatty():
        raise UsageError("'-o -' writes binary data, and stdout is a terminal; redirect it to a file or a pipe")


def write_stdout(file: BinaryIO) -> None:
    """Copy a file to stdout from its start."""
    file.seek(0)
    shutil.copyfileobj(file, sys.stdout.buffer)
    sys.stdout.buffer.flush()


class Bar:
    """Progress on stderr: one live line in a terminal, otherwise a line every few seconds."""

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, done: int) -> None:
        """Show that `done` of the sequences are finished."""
        if self._live is not None:
            self._live.update(self._task, completed=done)
        elif time.monotonic() >= self._next and done < self._total:
            self._next = time.monotonic() + _PLAIN_INTERVAL_SECONDS
            info(f"{self._title}: {done:,} of {self._total:,} {self._words}")
