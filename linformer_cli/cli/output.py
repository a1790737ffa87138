"""The standard streams: results go to stdout, messages to stderr, and some commands read data from stdin."""

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO, cast

from rich.console import Console

from linformer_cli.errors import UsageError
from linformer_cli.files import STREAM, write_file
from linformer_cli.report.tables import Column, FittedTable, Record, RecordTable, TableStyle, render_records, to_json
from linformer_cli.system.distributed import process_rank
from linformer_cli.units import printable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

    from linformer_cli.report.plots import PlotFormat

_quiet = False


def set_quiet(quiet: bool) -> bool:
    """Set whether to drop messages and progress. Every command with the option --quiet calls this function first."""
    global _quiet
    _quiet = quiet
    return quiet


def is_quiet() -> bool:
    """Return whether messages and progress are dropped: with --quiet, and in all processes but a job's first."""
    return _quiet or process_rank() > 0


def info(message: str) -> None:
    """Print a message on stderr, unless `is_quiet`."""
    if not is_quiet():
        warn(message)


def warn(message: str) -> None:
    """Print a warning or an error on stderr, even with --quiet. Processes other than the first add their number."""
    rank = process_rank()
    if (stream := safe_stderr()) is not None:
        print(f"{f'process {rank}: ' if rank else ''}{one_line(message)}", file=stream, flush=True)


class SafeStream:
    """A stream that drops what it cannot write (pipe closed, disk full): a lost message must not end hours of work."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # a closed file raises ValueError
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def safe_stderr() -> TextIO | None:
    """Return stderr as a stream that never fails, or None if stderr was closed before the start."""
    return None if sys.stderr is None else cast(TextIO, SafeStream(sys.stderr))


def one_line(message: str) -> str:
    """Return `message` without line ends and control characters, which file names may contain."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in message).split())


def warn_smaller_batch(batch: int) -> None:
    """Warn about a smaller batch. The sampling functions take this function as `on_halve`."""
    warn(f"out of memory; continuing with a batch of {batch}")


def print_json(value: object) -> None:
    print(to_json(value))


def print_records(records: Sequence[Record], columns: Sequence[Column], style: TableStyle) -> None:
    if style == "table":
        Console().print(FittedTable(records, columns))
    else:
        print(render_records(records, columns, style), end="")


def print_tables(style: TableStyle, *tables: RecordTable) -> None:
    """Print tables on stdout, one below another. CSV has only the first. The others are left out if they are empty."""
    for number, (records, columns, title) in enumerate(tables[:1] if style == "csv" else tables):
        if number and records:
            print()
        if title and style != "csv":
            print(title)
        if records or not number:
            print_records(records, columns, style)


def write_png(path: str | Path, picture: "Image.Image", record: Mapping[str, object]) -> None:
    """Write a picture with the metadata `record` to a file, and say so, or to stdout if `path` is `-`."""
    from linformer_cli.report.grids import encode_png

    data = encode_png(picture, record)
    if str(path) == STREAM:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        write_file(path, data)
        info(f"wrote {path}")


def write_gif(
    path: Path | None, render: Callable[[int], "Image.Image"], rows: Sequence[int], record: Mapping[str, object]
) -> None:
    """Write an animation of the pictures that `render` draws for each number of `rows`, unless `path` is None."""
    from linformer_cli.report.grids import encode_gif

    if path is not None:
        write_file(path, encode_gif([render(shown) for shown in rows], record))
        info(f"wrote {path}")


def write_plot(path: Path | None, render: Callable[["PlotFormat"], bytes]) -> None:
    """Write the plot that `render` makes in the format of `path`, whose ending was checked. None means no plot."""
    if path is not None:
        write_file(path, render("svg" if path.suffix.lower() == ".svg" else "png"))
        info(f"wrote {path}")


def print_facts(facts: Mapping[str, object]) -> None:
    """Print names and values on stdout, one pair per line. Values may come from foreign files."""
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(f"{name:<{width}}  {printable(str(value))}")


def show_preview(images: "NDArray[np.uint8]") -> None:
    """Print images as half-block characters on stderr, if stderr is a terminal."""
    from linformer_cli.report.terminal import render_preview

    console = Console(stderr=True)
    if console.is_terminal and not is_quiet():
        colour = console.color_system is not None and not console.no_color
        console.print(render_preview(images, console.width, colour=colour))


def read_stdin() -> BinaryIO:
    """Return all data of stdin, as a temporary file that can seek. Closing the file removes it."""
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
    file.seek(0)
    shutil.copyfileobj(file, sys.stdout.buffer)
    sys.stdout.buffer.flush()
