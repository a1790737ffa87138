"""Records as a table in the terminal, as Markdown, as CSV and as JSON; and reports, which consist of such tables."""

import csv
import dataclasses
import enum
import functools
import io
import json
import numbers
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeGuard, get_args, get_type_hints

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from linformer_cli.errors import LintxError
from linformer_cli.system.environment import describe_environment
from linformer_cli.units import printable
from .plots import PlotFormat

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# The gap between two columns, and the width down to which text is folded before a table is split, in characters.
_GAP, _FOLDED = 3, len("-0.0306 +- 0.0001")

Record: TypeAlias = "Mapping[str, object] | DataclassInstance"
TableStyle = Literal["table", "md", "csv"]


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table. CSV needs only the key.

    `key` is the key of a mapping or the field or property of a dataclass; `published.source` is a field of a field. It
    is also the CSV header (`published_source`), so it should name the unit (`state_bytes`). `title` and `unit` form the
    heading in tables. `format` is a format specification of numbers or a function; CSV and JSON keep every digit.
    `names` marks a column that identifies the record, which every part of a wide table repeats (default: the first).
    """

    key: str
    title: str = ""
    format: str | Callable[[Any], str] = ""
    unit: str = ""
    names: bool = False

    @property
    def heading(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title


# How tables show a field or property of a record: a mark in its type, as in `Annotated[int, Shown("bytes", ",")]`.
Shown = functools.partial(Column, "")


def list_columns(
    record: type, keys: str | None = None, other: Mapping[str, Column] | None = None
) -> tuple[Column, ...]:
    """List the columns of the fields and properties `keys`, or of all marked fields. `other` replaces their marks."""
    chosen = [key for key in get_type_hints(record) if _find_mark(record, key)] if keys is None else keys.split()
    marks = {key: (other or {}).get(key) or _find_mark(record, key) or Shown() for key in chosen}
    return tuple(dataclasses.replace(mark, key=key) for key, mark in marks.items())


def _find_mark(record: Any, key: str) -> Column | None:
    name, _, rest = key.partition(".")
    found = getattr(record, name, None)
    holder, name = (found.fget, "return") if isinstance(found, property) else (record, name)
    hint = get_type_hints(holder, include_extras=True)[name]
    if rest:
        return _find_mark(next(part for part in get_args(hint) if dataclasses.is_dataclass(part)), rest)
    return next((mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Column)), None)


class RecordTable(NamedTuple):
    records: Sequence[Record]
    columns: Sequence[Column]
    title: str = ""


class FittedTable:
    """Records for a rich console. A table that is too wide, even if text is folded, is split into several parts."""

    def __init__(self, records: Sequence[Record], columns: Sequence[Column]) -> None:
        self.columns = columns
        self.cells, self.numeric = _format_cells(records, columns)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, part in enumerate(self._split(options.max_width)):
            if number:
                yield Text()
            yield self._render(part, options.max_width, complete=number == 0)

    def _split(self, room: int) -> list[list[int]]:
        places = range(len(self.columns))
        widths = [self._narrowest(place) + _GAP for place in places]
        naming = [place for place in places if self._is_name(place)]
        parts = [naming.copy()]
        for place in places:
            if place in naming:
                continue
            if parts[-1] != naming and sum(widths[other] for other in (*parts[-1], place)) - _GAP > room:
                parts.append(naming.copy())
            parts[-1].append(place)
        return [sorted(part) for part in parts]

    def _is_name(self, place: int) -> bool:
        return self.columns[place].names or (place == 0 and not any(column.names for column in self.columns))

    def _narrowest(self, place: int) -> int:
        heading = max(map(cell_len, self.columns[place].heading.split()), default=0)
        widest = max((cell_len(row[place]) for row in self.cells), default=0)
        return max(heading, widest if self.numeric[place] else min(widest, _FOLDED))

    def _widest(self, place: int) -> int:
        return max(map(cell_len, (self.columns[place].heading, *(row[place] for row in self.cells))))

    def _choose_widths(self, part: Sequence[int], room: int) -> dict[int, int]:
        """Start with the narrowest widths. Share the spare room first among numbers, then among text."""
        widths = {place: self._narrowest(place) for place in part}
        spare = room - sum(widths.values()) - _GAP * (len(part) - 1)
        while spare < 0 and max(widths.values()) > 1:
            widths[max(part, key=lambda place: widths[place])] -= 1
            spare += 1
        for numeric in (True, False):
            # Every column gets the same share of the additional width that it needs.
            wanted = {place: self._widest(place) - widths[place] for place in part if self.numeric[place] == numeric}
            share = min(1.0, max(0, spare) / max(1, sum(wanted.values())))
            for place, more in wanted.items():
                widths[place] += int(share * more)
                spare -= int(share * more)
        return widths

    def _render(self, part: Sequence[int], room: int, complete: bool) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        widths = self._choose_widths(part, room)
        for place in part:
            # rich reads square brackets in a str as markup. Folding never hides the end of a value.
            heading, right = Text(self.columns[place].heading), self.numeric[place]
            table.add_column(heading, justify="right" if right else "left", overflow="fold", width=widths[place])
        for row in self.cells:
            if complete or any(row[place] for place in part if not self._is_name(place)):
                table.add_row(*(Text(row[place]) for place in part))
        return table


def render_records(records: Sequence[Record], columns: Sequence[Column], style: Literal["md", "csv"]) -> str:
    """Render `records`, with one line for each: as a Markdown table, or as CSV with the keys as its header.

    A missing key or a value of None is an empty cell. The text ends in a newline. Do not print it with a rich console,
    which would wrap lines and read square brackets as markup.
    """
    return _render_csv(records, columns) if style == "csv" else _render_markdown(records, columns)


def find_value(record: Record, key: str) -> Any:
    """Return `key` of a record: the item of a mapping, or the field or property of a dataclass. None if missing."""
    if isinstance(record, Mapping):
        return record.get(key)
    found: Any = record
    for name in key.split("."):
        found = getattr(found, name, None)
    return found


def to_json(value: object, *, compact: bool = False) -> str:
    """Write `value` as JSON: dataclasses and pydantic models as objects, paths as text, enums by their value.

    The text is pure ASCII, indented, in the order of keys, or `compact` without spaces and with sorted keys. Raises
    `LintxError` for NaN and infinity, which JSON cannot express, and TypeError for a type without a JSON form.
    """
    style: dict[str, Any] = {"sort_keys": True, "separators": (",", ":")} if compact else {"indent": 2}
    try:
        return json.dumps(value, default=_to_plain, allow_nan=False, **style)
    except ValueError as error:
        raise LintxError(f"JSON cannot hold NaN and infinity: {error}") from None


def _to_plain(value: Any) -> object:
    """Return what JSON has in place of `value`, whose parts may need the same."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, enum.Enum):
        return value.value
    # Asked by name, so that a command need not wait for numpy or pydantic.
    for method in ("tolist", "model_dump"):
        if hasattr(value, method) and not isinstance(value, type):
            return getattr(value, method)()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _is_number(value: object) -> TypeGuard[numbers.Real]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)  # NumPy's numbers are `Real`, too


def _cell(value: Any, column: Column) -> str:
    """Return a table cell: empty for None, `yes` or `no`, a formatted number, or what a function as format returns."""
    if value is None:
        return ""
    if type(value).__module__ == "numpy":
        value = value.tolist()
    if isinstance(value, bool):
        return "yes" if value else "no"
    if _is_number(value):
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
    if callable(column.format):
        if not isinstance(value, str):
            return column.format(value)
    elif _is_number(value):
        return format(value, column.format)
    text = str(value.value) if isinstance(value, enum.Enum) else str(value)
    return "\n".join(printable(line) for line in text.splitlines())  # it may come from a foreign file


def _format_cells(records: Sequence[Record], columns: Sequence[Column]) -> tuple[list[list[str]], list[bool]]:
    """Return the text of each cell, and for each column whether it has only numbers, which are aligned right."""
    values = [[find_value(record, column.key) for column in columns] for record in records]
    cells = [[_cell(value, column) for value, column in zip(row, columns, strict=True)] for row in values]
    present = [[row[place] for row in values if row[place] is not None] for place in range(len(columns))]
    return cells, [bool(found) and all(map(_is_number, found)) for found in present]


def _render_markdown(records: Sequence[Record], columns: Sequence[Column]) -> str:
    cells, numeric = _format_cells(records, columns)
    rows = [[_escape_markdown(text) for text in row] for row in ([column.heading for column in columns], *cells)]
    widths = [max(3, *(cell_len(row[index]) for row in rows)) for index in range(len(columns))]
    rule = ["-" * (width - 1) + (":" if right else "-") for width, right in zip(widths, numeric, strict=True)]
    lines = [[_pad(*parts) for parts in zip(row, widths, numeric, strict=True)] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], rule, *lines[1:]))


def _pad(text: str, width: int, right: bool) -> str:
    padding = " " * (width - cell_len(text))
    return padding + text if right else text + padding


def _escape_markdown(text: str) -> str:
    """Escape characters that would end a Markdown cell: `|`, a backslash before `|`, and line ends."""
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").splitlines())


def _render_csv(records: Sequence[Record], columns: Sequence[Column]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([column.key.replace(".", "_") for column in columns])
    writer.writerows([[_csv_cell(find_value(record, column.key)) for column in columns] for record in records])
    return buffer.getvalue()


def _csv_cell(value: object) -> object:
    """Return a number with every digit, `true` or `false`, or compact JSON for a list or mapping."""
    if _is_number(value) and not isinstance(value, numbers.Integral):  # CSV may hold NaN and infinity
        return repr(float(value))
    plain = json.loads(to_json(value))
    return json.dumps(plain, separators=(",", ":")) if isinstance(plain, bool | list | dict) else plain


Ending = Literal["finished", "interrupted"]
# Functions that draw plots, by the option that names the file.
Plots = Mapping[str, Callable[[PlotFormat], bytes]]


@dataclass(frozen=True)
class Output:
    """The visible parts of a report. CSV has only the first table. Plots without points are missing.

    `findings` follow the tables, `remarks` go to stderr, `stopped` is said after Ctrl-C, `failure` is an error.
    """

    tables: Sequence[RecordTable]
    plots: Plots = field(default_factory=dict)
    title: str = ""
    findings: Sequence[str] = ()
    remarks: Sequence[str] = ()
    stopped: str = "Stopped; the results so far are shown"
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class Report(ABC):
    """A result to show. In JSON, the keys are the field names."""

    environment: Mapping[str, Any] = field(default_factory=describe_environment)

    @abstractmethod
    def show(self, style: TableStyle) -> Output:
        """Return what a command shows in this style."""
