"""The columns of benchmark tables, and the records that fill them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from linformer_cli.report.tables import Column, Record, find_value
from linformer_cli.units import (
    IMAGES,
    WINDOWS,
    Words,
    format_bytes,
    format_microseconds,
    format_milliseconds,
    format_percent,
)

from .growth import Exponents
from .rows import AttentionRow, ModelRow

_METHOD = (
    Column("name", "attention", names=True),
    Column("engine", "engine", names=True),
    Column("batch", "batch", names=True),
)
_WHO = (Column("preset", "preset"), *_METHOD)
_TRAINING_METHOD = (*_METHOD[:2], Column("precision", "precision", names=True), _METHOD[2])
_SPEED = (Column("images_per_second", "images/s", format=".4g"), Column("quartiles", "quartiles"))
_EXTRAPOLATED = "extrapolated"
_BITS = (Column("bits_per_dim", "bits/dim", format=".4f"), Column("images_seen", "images seen", format=","))
_TIMES_SOFTMAX = Column("times_softmax", "x softmax", format=".3g")
_TIMES_OTHER_SOFTMAX = Column("times_softmax_of_other_engine", "x softmax in another engine", format=".3g")
_REDUCED = Column("reduced", "reduced")
_LEFT_OUT = Column("left_out", "left out")
_SHARES = (
    Column("product_share", "products", format=format_percent),
    Column("copy_share", "copying", format=format_percent),
)
_FILE_SPEED = (
    Column("precision", "precision"),
    Column("device", "device"),
    Column("images_per_second", "images/s", format=".4g"),
    Column("images_per_second_quartile_1", "quartile 1", format=".4g"),
    Column("images_per_second_quartile_3", "quartile 3", format=".4g"),
)
_STATE = (
    Column("state_bytes_per_image", "state", format=format_bytes),
    Column("peak_memory_bytes", "memory", format=format_bytes),
)
_PUBLISHED = tuple(
    Column(f"published_{key}", f"published {title}", format="g")
    for key, title in (
        ("images_per_second", "images/s"),
        ("seconds_per_image_cpu", "s per image"),
        ("bits_per_dim", "bits/dim"),
    )
)


@dataclass(frozen=True)
class SpeedColumns:
    """The columns of a benchmark of whole models.

    `tables` are for a terminal: each fits in 80 characters, and they are printed one below another. `file` is for
    Markdown and CSV.
    """

    tables: Sequence[Sequence[Column]]
    file: Sequence[Column]


# Speed, cost, quality and the paper's figures.
SAMPLING = SpeedColumns(
    (
        (
            *(*_METHOD, _SPEED[0], Column("images_per_second_extrapolated", _EXTRAPOLATED, format=".3g"), _SPEED[1]),
            *(_TIMES_SOFTMAX, _LEFT_OUT),
        ),
        (
            *(*_METHOD, Column("latency_seconds", "s/image", format=".3g")),
            Column("latency_seconds_extrapolated", _EXTRAPOLATED, format=".3g"),
            *(*_STATE, *_SHARES),
        ),
        (*_METHOD, _TIMES_OTHER_SOFTMAX, Column("looked_ahead", "look-ahead"), _REDUCED, *_BITS),
        (
            *_METHOD,
            Column("published_images_per_second", "published images/s", format="g"),
            Column("published_seconds_per_image_cpu", "s/image", format="g"),
            Column("published_bits_per_dim", "bits/dim", format="g"),
        ),
    ),
    (
        *_WHO,
        Column("look_ahead", "look-ahead"),
        *_FILE_SPEED,
        Column("images_per_second_extrapolated", "extrapolated images/s", format=".3g"),
        _TIMES_SOFTMAX,
        _TIMES_OTHER_SOFTMAX,
        Column("latency_seconds", "s per image", format=".3g"),
        Column("latency_seconds_extrapolated", "extrapolated s per image", format=".3g"),
        Column("seconds_per_position", "s per position", format=".3g"),
        Column("seconds_per_position_extrapolated", "extrapolated s per position", format=".3g"),
        Column("state_bytes_per_image", "state bytes per image", format=","),
        Column("peak_memory_bytes", "peak memory bytes", format=","),
        *_SHARES,
        *_BITS,
        *_PUBLISHED,
        _LEFT_OUT,
    ),
)
TRAINING = SpeedColumns(
    (
        (*_TRAINING_METHOD, *_SPEED, _TIMES_SOFTMAX, _LEFT_OUT),
        (*_TRAINING_METHOD, Column("seconds_per_step", "step", format=format_milliseconds), _SHARES[0], _REDUCED),
        (*_TRAINING_METHOD, *_BITS),
    ),
    (
        *_WHO,
        *_FILE_SPEED,
        Column("seconds_per_step", "s per step", format=".3g"),
        _TIMES_SOFTMAX,
        _SHARES[0],
        *_BITS,
        Column("repeats", "repeats"),
        _LEFT_OUT,
    ),
)
# The columns of the table that shows time against the number of positions, for all networks.
POSITION_COLUMNS = (
    Column("network", "network", names=True),
    *_METHOD,
    Column("positions", "T", format=",", names=True),
    Column("seconds_per_position", "time per value", format=format_microseconds),
    Column("seconds_per_position_extrapolated", _EXTRAPOLATED, format=format_microseconds),
    _STATE[0],
)
SCALING_COLUMNS = (
    Column("name", "attention", names=True),
    Column("positions", "T", format=",", names=True),
    Column("batch", "batch"),
    Column("seconds_per_sequence", "time", format=format_milliseconds),
    Column("quartiles", "quartiles"),
    _TIMES_SOFTMAX,
    Column("memory_bytes_per_sequence", "memory", format=format_bytes),
    Column("copy_share", "copying", format=format_percent),
    _LEFT_OUT,
)
_EXPONENTS = (
    Column("time_exponent_last_two", "time, last two", format=".2f"),
    Column("memory_exponent_last_two", "memory, last two", format=".2f"),
    Column("time_exponent_all", "time, all", format=".2f"),
    Column("memory_exponent_all", "memory, all", format=".2f"),
)
EXPONENT_COLUMNS = (Column("name", "exponents of", names=True), *_EXPONENTS)
REACH_COLUMNS = (
    Column("name", "attention", names=True),
    Column("longest_positions", "longest T that fits", format=","),
    Column("overtakes_softmax", "overtakes softmax at T"),
)
SCALING_FILE_COLUMNS = (
    *(Column(key) for key in ("name", "attention", "device", "heads", "head_width", "positions", "batch")),
    *(Column(key) for key in ("repeats", "seconds_per_sequence", "seconds_quartile_1", "seconds_quartile_3")),
    *(Column(key) for key in ("times_softmax", "memory_bytes_per_sequence", "peak_memory_bytes", "copy_share")),
    *_EXPONENTS,
    *(Column(key) for key in ("longest_positions", "overtakes_softmax_at", "overtakes_softmax", "left_out")),
)


# Markdown tables keep these columns even if they are empty. An empty column shows that no run has trained these models.
QUALITY = ("bits_per_dim", "images_seen")


def choose_columns(rows: Sequence[Record], columns: Sequence[Column], keep: Sequence[str] = ()) -> list[Column]:
    """Return `columns` without empty ones, except those in `keep`, with titles in the words for the rows' sequences.

    The list is empty if only columns that identify a row are left.
    """
    words = find_words(rows)
    full = [
        replace(column, title=column.title.replace(IMAGES.bits, words.bits).replace(IMAGES.item, words.item))
        for column in columns
        if column.key in keep or any(find_value(row, column.key) is not None for row in rows)
    ]
    return full if any(not column.names for column in full) else []


def find_words(rows: Sequence[Record]) -> Words:
    """What the sequences of `rows` are called: windows if all models are models of bytes."""
    return WINDOWS if all(find_value(row, "item") == WINDOWS.item for row in rows) else IMAGES


def flatten_speed(row: ModelRow) -> dict[str, Any]:
    """Flatten a sampling or training row. Extrapolated figures keep separate columns.

    A row has one speed, either measured or extrapolated; the quartiles belong to this speed.
    """
    low, high = row.speed_quartiles or (None, None)
    whole = asdict(row)
    extrapolated, published = (whole.get(part) or {} for part in ("extrapolated", "published"))

    def per_image_and_value(suffix: str, seconds: float | None) -> dict[str, float | None]:
        return {
            f"latency_seconds{suffix}": seconds if row.batch == 1 else None,
            f"seconds_per_position{suffix}": seconds / row.positions if seconds else None,
        }

    return {
        **whole,
        "quartiles": None if low is None else f"{low:.3g}-{high:.3g}",
        "images_per_second_quartile_1": low,
        "images_per_second_quartile_3": high,
        "images_per_second_extrapolated": extrapolated.get("images_per_second"),
        **per_image_and_value("", whole.get("seconds_per_image")),
        **per_image_and_value("_extrapolated", extrapolated.get("seconds_per_image")),
        "looked_ahead": whole.get("look_ahead") or None,
        **{column.key: published.get(column.key.removeprefix("published_")) for column in _PUBLISHED},
    }


def flatten_growth(rows: Sequence[AttentionRow], exponents: Sequence[Exponents]) -> list[dict[str, Any]]:
    """Flatten rows of time and memory against T, each with the exponents of its mechanism."""
    powers = {found.name: asdict(found) for found in exponents}
    records = []
    for row in rows:
        low, high = row.seconds_per_sequence_quartiles or (None, None)
        shown = None if low is None or high is None else f"{format_milliseconds(low)} - {format_milliseconds(high)}"
        quartiles = {"seconds_quartile_1": low, "seconds_quartile_3": high, "quartiles": shown}
        records.append({**asdict(row), **powers[row.name], **quartiles})
    return records
