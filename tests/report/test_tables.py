"""Tests of records as tables, Markdown, CSV and JSON."""

import csv
import enum
import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import pytest
from rich.console import Console

from linformer_cli.config import DataConfig
from linformer_cli.errors import LintxError
from linformer_cli.report.tables import Column, FittedTable, Shown, list_columns, render_records, to_json
from linformer_cli.units import format_bytes

COLUMNS = (
    Column("attention", "attention"),
    Column("images_per_second", "speed", unit="images/s", format=".2f"),
    Column("state_bytes", "state", format=format_bytes),
    Column("agrees", "agrees"),
)
RECORDS = (
    {"attention": "linear", "images_per_second": 123.456, "state_bytes": 270336, "agrees": True},
    {"attention": "a|b [red]", "images_per_second": np.float32(0.5), "agrees": np.bool(False)},
    {"attention": "softmax", "images_per_second": None, "state_bytes": np.int64(512), "notes": "no column"},
)


def printed(renderable, width=60):
    output = io.StringIO()
    console = Console(file=output, width=width, color_system=None, force_terminal=False, _environ={})
    console.print(renderable)
    return [line.rstrip() for line in output.getvalue().splitlines()]


def test_a_table_has_headings_units_and_formatted_values():
    assert printed(FittedTable(RECORDS, COLUMNS)) == [
        "attention   speed (images/s)     state   agrees",
        "───────────────────────────────────────────────",
        "linear                123.46   264 KiB   yes",
        "a|b [red]               0.50             no",
        "softmax                          512 B",
    ]


def test_a_narrow_table_shows_every_letter():
    lines = printed(FittedTable([*RECORDS, {"attention": "x" * 30}], COLUMNS), width=44)
    assert "".join(line[:17].strip() for line in lines).count("x") == 31, lines  # the 31st is the x of softmax
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize("width", [100, 80, 60, 45, 36])
def test_a_table_that_is_too_wide_is_split_between_columns(width):
    columns = (
        Column("name", "attention", names=True),
        Column("positions", "T", format=",", names=True),
        Column("seconds", "time in seconds", format=",.3f"),
        Column("bytes", "memory", format=format_bytes),
        Column("share", "share of all copying", format=".1f"),
        Column("left_out", "left out"),
    )
    reason = "would take about three minutes; the limit is one"
    records = [
        {"name": "softmax", "positions": 16384, "seconds": 1234.5678, "bytes": 123456789, "share": 12.34},
        {"name": "longformer", "positions": 65536, "left_out": reason},
    ]
    lines = printed(FittedTable(records, columns), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for number in ("1,234.568", "118 MiB", "12.3"):
        assert text.count(number) == 1, text
    parts = text.split("\n\n")
    assert (len(parts) == 1) == (width >= 80)
    assert all(("attention" in part and "16,384" in part) or "65,536" in part for part in parts)
    # Each part of the table leaves out the records that would be empty there.
    assert all(("longformer" in part) == (part in (parts[0], parts[-1])) for part in parts)
    assert ("softmax" in parts[-1]) == ("12.3" in parts[-1])
    words = parts[-1].replace("longformer", "").replace("65,536", "").split()
    assert "".join(words).endswith(reason.replace(" ", ""))


def test_markdown_escapes_bars_and_aligns_columns():
    assert render_records(RECORDS, COLUMNS, "md") == (
        "| attention  | speed (images/s) |   state | agrees |\n"
        "| ---------- | ---------------: | ------: | ------ |\n"
        "| linear     |           123.46 | 264 KiB | yes    |\n"
        "| a\\|b [red] |             0.50 |         | no     |\n"
        "| softmax    |                  |   512 B |        |\n"
    )


def test_columns_may_have_no_format_and_may_mix_words_with_numbers():
    columns = [Column("k", "kkkk", format=".1f"), Column("n", "n")]
    assert render_records([{"k": 1, "n": np.int64(3)}, {"k": "n/a", "n": 4}], columns, "md") == (
        "| kkkk |   n |\n| ---- | --: |\n| 1.0  |   3 |\n| n/a  |   4 |\n"
    )
    # Cells never span lines, and without records only the heading is left.
    rendered = render_records([{"k": "a\\|b\nc"}], [Column("k", "|")], "md")
    assert rendered == "| \\|       |\n| -------- |\n| a\\\\\\|b c |\n"
    for style, expected in (("md", "| K (s) |\n| ----- |\n"), ("csv", "k\n")):
        assert render_records([], [Column("k", "K", unit="s")], style) == expected


def test_csv_has_keys_as_headings_and_every_digit():
    assert render_records(RECORDS, COLUMNS, "csv") == (
        "attention,images_per_second,state_bytes,agrees\n"
        "linear,123.456,270336,true\n"
        "a|b [red],0.5,,false\n"
        "softmax,,512,\n"
    )


def test_awkward_values_can_be_read_back_from_csv():
    record = {"text": 'a,"b"\nc', "list": [1, 2], "third": 1 / 3, "nan": math.nan, "path": Path("a")}
    columns = [Column(key, key, format=".1f") for key in record]
    rows = list(csv.reader(io.StringIO(render_records([record], columns, "csv"))))
    assert rows == [list(record), ['a,"b"\nc', "[1,2]", repr(1 / 3), "nan", "a"]]


class Colour(enum.Enum):
    RED = "red"


class Point(NamedTuple):
    x: int
    y: float


@dataclass(frozen=True)
class Result:
    bits_per_dim: float
    data: DataConfig
    path: Path
    points: tuple[Point, ...]


def test_json_supports_every_type_that_results_contain():
    value = {
        "result": Result(np.float64(0.5), DataConfig(name="glyphs"), Path("runs/a"), (Point(1, 2.5),)),
        "red": Colour.RED,
        3: [np.int64(4), np.float32(0.25), np.bool(True), None, False],
        "array": np.arange(4).reshape(2, 2),
        "text": "é",
    }
    assert to_json({"b": 1, "a": [True]}) == '{\n  "b": 1,\n  "a": [\n    true\n  ]\n}'
    assert to_json({"b": 1, "a": [True]}, compact=True) == '{"a":[true],"b":1}'
    rendered = to_json(value)
    assert json.loads(rendered) == {
        "result": {
            "bits_per_dim": 0.5,
            "data": DataConfig(name="glyphs").model_dump(),
            "path": str(Path("runs/a")),
            "points": [[1, 2.5]],
        },
        "red": "red",
        "3": [4, 0.25, True, None, False],
        "array": [[0, 1], [2, 3]],
        "text": "é",
    }
    assert rendered.isascii()


@pytest.mark.parametrize("value", [math.nan, -math.inf, np.float32("nan"), np.array(math.inf)])
def test_json_refuses_nan_and_infinity(value):
    with pytest.raises(LintxError, match=r"^JSON cannot hold NaN and infinity"):
        to_json({"epochs": [{"loss": 1.0}, {"loss": value}]})


@pytest.mark.parametrize("value", [object(), {1, 2}, Result, 1j, b"bytes"])
def test_json_refuses_unsupported_types(value):
    with pytest.raises(TypeError, match="has no JSON form"):
        to_json({"key": value})


@dataclass(frozen=True)
class Timed:
    name: Annotated[str, Shown("model", names=True)]
    samples: tuple[float, ...]
    seconds: Annotated[float | None, Shown("time", ".1f", "s")] = None

    @property
    def rate(self) -> Annotated[float, Shown("rate")]:
        return 2.0


def test_rows_declare_how_tables_show_their_fields_and_properties() -> None:
    name = Column("name", "model", names=True)
    seconds = Column("seconds", "time", ".1f", "s")
    assert list_columns(Timed) == (name, seconds)
    assert list_columns(Timed, "rate name samples") == (Column("rate", "rate"), name, Column("samples"))
    assert list_columns(Timed, "seconds", {"seconds": Shown("s")}) == (Column("seconds", "s"),)
    with pytest.raises(KeyError):
        list_columns(Timed, "minutes")
    columns = [Column(key, key) for key in ("seconds", "rate", "missing")]
    assert render_records([Timed("a", (), 1.5)], columns, "csv") == "seconds,rate,missing\n1.5,2.0,\n"
    # By default, the first column names the record in every part of a wide table.
    wide = [Column("name", "name"), *(Column(f"c{place}", "x" * 12) for place in range(4))]
    lines = printed(FittedTable([{"name": "softmax", "c0": 1, "c1": 2, "c2": 3, "c3": 4}], wide), width=40)
    found = [line.split() for line in lines if line.startswith("softmax")]
    assert found == [["softmax", "1", "2"], ["softmax", "3", "4"]]
