"""Where words go: results to stdout, talk to stderr."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from linformer_cli.report.tables import Column, Record, TableStyle, render_records, to_json
from linformer_cli.system.distributed import process_rank

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from linformer_cli.report.plots import PlotFormat


_quiet = False


def set_quiet(quiet: bool) -> None:
    """Whether `talk` and all progress are left out; every command sets it anew."""
    global _quiet
    _quiet = quiet


def is_quiet() -> bool:
    """Whether `talk` and all progress are left out: with --quiet, and of several processes in all but the first."""
    return _quiet or process_rank() > 0


def talk(message: str) -> None:
    """A line for the user on stderr, unless `is_quiet`."""
    if not is_quiet():
        complain(message)


def complain(message: str) -> None:
    """A line on stderr about something that went wrong, also with --quiet. A process that is not the first says so."""
    rank = process_rank()
    print(f"{f'process {rank}: ' if rank else ''}{one_line(message)}", file=sys.stderr, flush=True)


def one_line(message: str) -> str:
    """`message` without line ends and without what a file's name or content could do to a terminal."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in message).split())


def say_halved(batch: int) -> None:
    """For `on_halve` of the sampling functions."""
    complain(f"out of memory; going on with {batch} at once, the images stay the same")


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    print(to_json(value))


def print_records(records: Sequence[Record], columns: Sequence[Column], style: TableStyle) -> None:
    """Records on stdout as a table, as Markdown or as CSV."""
    if style == "table":
        Console().print(render_records(records, columns, "table"))
    else:
        print(render_records(records, columns, style), end="")


def write_plot(path: Path | None, render: Callable[["PlotFormat"], bytes]) -> None:
    """The plot that `render` makes in the format of `path`, where one is wanted; says so."""
    from linformer_cli.files import write_file
    from linformer_cli.report.plots import parse_plot_format

    if path is not None:
        write_file(path, render(parse_plot_format(path)))
        talk(f"wrote {path}")


def print_facts(facts: Mapping[str, object]) -> None:
    """Names and values, one pair a line, on stdout."""
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")


def show_preview(images: "NDArray[np.uint8]") -> None:
    """Images as half blocks on stderr, if that is a terminal."""
    from linformer_cli.report.terminal import render_preview

    console = Console(stderr=True)
    if console.is_terminal and not is_quiet():
        colour = console.color_system is not None and not console.no_color
        console.print(render_preview(images, console.width, colour=colour))
