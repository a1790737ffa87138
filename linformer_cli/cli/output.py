"""Where words go: results to stdout, talk to stderr."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from linformer_cli.report.tables import Column, TableStyle, render_records, to_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def talk(message: str) -> None:
    """A line for the user on stderr."""
    print(message, file=sys.stderr, flush=True)


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    print(to_json(value))


def print_records(records: Sequence[Mapping[str, object]], columns: Sequence[Column], style: TableStyle) -> None:
    """Records on stdout as a table, as Markdown or as CSV."""
    if style == "table":
        Console().print(render_records(records, columns, "table"))
    else:
        print(render_records(records, columns, style), end="")


def print_facts(facts: Mapping[str, object]) -> None:
    """Names and values, one pair a line, on stdout."""
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")


def show_preview(images: "NDArray[np.uint8]") -> None:
    """Images as half blocks on stderr, if that is a terminal."""
    from linformer_cli.report.terminal import render_preview

    console = Console(stderr=True)
    if console.is_terminal:
        colour = console.color_system is not None and not console.no_color
        console.print(render_preview(images, console.width, colour=colour))
