"""The same records as a table for people, as Markdown, as CSV and as JSON."""

import csv
import dataclasses
import enum
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeGuard, overload

import numpy as np
from pydantic import BaseModel
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from linformer_cli.errors import LintxError

# Between two columns of a table, and what text is folded down to before a table is parted.
_GAP, _FOLDED = 3, 16

Record = Mapping[str, object]
TableStyle = Literal["table", "md", "csv", "json"]


@dataclasses.dataclass(frozen=True)
class Column:
    """One column: where its values stand in a record, and how people read them.

    `key` is the name in the record and in the CSV header, so a unit belongs into it (`state_bytes`). `title` and
    `unit` head the column for people. `format` is a format specification such as `.2f`, or a function such as
    `format_bytes`; it is applied to numbers only, and CSV and JSON keep every digit. `names` says that it tells what a
    record is of: it stands in every part of a table that is too wide. Where none says so the first does.
    """

    key: str
    title: str
    unit: str = ""
    format: str | Callable[[float], str] = ""
    names: bool = False

    @property
    def heading(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title


@dataclasses.dataclass(frozen=True)
class FittedTable:
    """A table for a rich console: as several below each other where it is wider than the terminal.

    Numbers are never cut or broken while one of them fits beside the columns that name records. Other text is folded
    first, down to a few words. All parts but the first leave out the records of which they would say nothing.
    """

    cells: Sequence[Sequence[str]]
    columns: Sequence[Column]
    numeric: Sequence[bool]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, part in enumerate(self._split(options.max_width)):
            if number:
                yield Text()
            yield self._render(part, options.max_width, complete=number == 0)

    def _split(self, room: int) -> list[list[int]]:
        """The places of the columns of each part."""
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
        """Without any that says so it is the first column that names records."""
        return self.columns[place].names or (place == 0 and not any(column.names for column in self.columns))

    def _narrowest(self, place: int) -> int:
        heading = max(map(cell_len, self.columns[place].heading.split()), default=0)
        widest = max((cell_len(row[place]) for row in self.cells), default=0)
        return max(heading, widest if self.numeric[place] else min(widest, _FOLDED))

    def _widest(self, place: int) -> int:
        return max(map(cell_len, (self.columns[place].heading, *(row[place] for row in self.cells))))

    def _choose_widths(self, part: Sequence[int], room: int) -> dict[int, int]:
        """As narrow as columns can be, and what is left to those that want it, numbers first."""
        widths = {place: self._narrowest(place) for place in part}
        spare = room - sum(widths.values()) - _GAP * (len(part) - 1)
        while spare < 0 and max(widths.values()) > 1:
            widths[max(part, key=lambda place: widths[place])] -= 1
            spare += 1
        for numeric in (True, False):
            # To each in the same ratio to what it would like.
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
            # Text, not str: a name in square brackets is not markup. Folding never hides the end of a value.
            heading, right = Text(self.columns[place].heading), self.numeric[place]
            table.add_column(heading, justify="right" if right else "left", overflow="fold", width=widths[place])
        for row in self.cells:
            if complete or any(row[place] for place in part if not self._is_name(place)):
                table.add_row(*(Text(row[place]) for place in part))
        return table


@overload
def render_records(records: Sequence[Record], columns: Sequence[Column], style: Literal["table"]) -> FittedTable: ...
@overload
def render_records(
    records: Sequence[Record], columns: Sequence[Column], style: Literal["md", "csv", "json"]
) -> str: ...
@overload
def render_records(records: Sequence[Record], columns: Sequence[Column], style: TableStyle) -> FittedTable | str: ...
def render_records(records: Sequence[Record], columns: Sequence[Column], style: TableStyle) -> FittedTable | str:
    """`records` in one of four styles, one line each.

    `table` is for a rich console, `md` a Markdown table, `csv` comma separated values with the keys as the header, and
    `json` a list of the records with everything in them, also what no column names. A key that a record lacks, or
    whose value is None, is an empty cell. The strings end in a newline and are final: write them as they are, since
    a rich console would wrap them and read square brackets as markup.

    Raises `LintxError` where JSON cannot hold a number.
    """
    if style == "json":
        return to_json(records) + "\n"
    if style == "csv":
        return _render_csv(records, columns)
    cells = [[_cell(record.get(column.key), column) for column in columns] for record in records]
    numeric = [_is_numeric(record.get(column.key) for record in records) for column in columns]
    return _render_markdown(cells, columns, numeric) if style == "md" else FittedTable(cells, columns, numeric)


def to_json(value: object, *, compact: bool = False) -> str:
    """`value` as a JSON document: dataclasses and pydantic models as objects, paths as text, enums by their value.

    Numpy scalars and arrays become numbers and lists. Indented and in the given order for people; `compact` has no
    spaces and sorts the keys. Pure ASCII, so that every terminal and file takes it.

    Raises `LintxError` where a number is NaN or infinite, which JSON does not know, and TypeError where the type of
    something has no JSON form.
    """
    plain = _to_plain(value, "")
    if compact:
        return json.dumps(plain, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return json.dumps(plain, allow_nan=False, indent=2)


def _to_plain(value: object, where: str) -> object:
    """`value` made of dict, list, str, int, float, bool and None only; `where` is its path, for the error."""
    match value:
        case enum.Enum():
            return _to_plain(value.value, where)
        case None | bool() | str():
            return value
        case np.generic() | np.ndarray():
            return _to_plain(value.tolist(), where)
        case int():
            return int(value)
        case float():
            if not math.isfinite(value):
                raise LintxError(f"JSON cannot hold {value}{f', found at {where}' if where else ''}")
            return float(value)
        case os.PathLike():
            return os.fspath(value)
        case BaseModel():
            return _to_plain(value.model_dump(), where)
        case Mapping():
            return {_to_key(key): _to_plain(item, _join(where, _to_key(key))) for key, item in value.items()}
        case list() | tuple():
            return [_to_plain(item, _join(where, str(index))) for index, item in enumerate(value)]
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            return {name: _to_plain(getattr(value, name), _join(where, name)) for name in names}
    raise TypeError(f"{type(value).__name__} has no JSON form{f', found at {where}' if where else ''}")


def _to_key(key: object) -> str:
    plain = key.value if isinstance(key, enum.Enum) else key
    return plain if isinstance(plain, str) else str(plain)


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _is_number(value: object) -> TypeGuard[int | float | np.integer | np.floating]:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _is_numeric(values: Iterable[object]) -> bool:
    """Whether a column holds numbers and is set to the right; empty cells do not count."""
    present = [value for value in values if value is not None]
    return bool(present) and all(map(_is_number, present))


def _cell(value: object, column: Column) -> str:
    """What people read: formatted numbers, yes and no, and nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool | np.bool):
        return "yes" if value else "no"
    if _is_number(value):
        number: int | float = value.item() if isinstance(value, np.generic) else value
        return column.format(number) if callable(column.format) else format(number, column.format)
    return str(value.value) if isinstance(value, enum.Enum) else str(value)


def _render_markdown(cells: Sequence[Sequence[str]], columns: Sequence[Column], numeric: Sequence[bool]) -> str:
    rows = [[_escape_markdown(text) for text in row] for row in ([column.heading for column in columns], *cells)]
    widths = [max(3, *(cell_len(row[index]) for row in rows)) for index in range(len(columns))]
    rule = ["-" * (width - 1) + (":" if right else "-") for width, right in zip(widths, numeric, strict=True)]
    lines = [[_pad(*parts) for parts in zip(row, widths, numeric, strict=True)] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], rule, *lines[1:]))


def _pad(text: str, width: int, right: bool) -> str:
    padding = " " * (width - cell_len(text))
    return padding + text if right else text + padding


def _escape_markdown(text: str) -> str:
    """Text that stays in its cell: no bare `|`, no backslash that would escape the one after it, no line end."""
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").splitlines())


def _render_csv(records: Sequence[Record], columns: Sequence[Column]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([column.key for column in columns])
    writer.writerows([[_csv_cell(record.get(column.key)) for column in columns] for record in records])
    return buffer.getvalue()


def _csv_cell(value: object) -> object:
    """Every digit, `true` and `false`, and compact JSON where a cell holds several values."""
    if isinstance(value, float | np.floating):  # NaN and infinity are fine in CSV
        return repr(float(value))
    plain = _to_plain(value, "")
    return json.dumps(plain, separators=(",", ":")) if isinstance(plain, bool | list | dict) else plain
