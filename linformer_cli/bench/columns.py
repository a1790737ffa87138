"""The columns of benchmark tables. The rows declare how each field is shown."""

from collections.abc import Sequence
from dataclasses import replace

from linformer_cli.report.tables import Column, Record, RecordTable, TableStyle, find_value, list_columns
from linformer_cli.units import IMAGES, WINDOWS, Words
from .growth import Exponents
from .rows import AttentionRow, ModelRow, SamplingRow, TrainingRow

_FILE_SPEED = "precision device images_per_second images_per_second_quartile_1 images_per_second_quartile_3"
_PUBLISHED = "published.images_per_second published.seconds_per_image_cpu published.bits_per_dim"
# The columns for a terminal, and those for Markdown and CSV.
SAMPLING = (
    list_columns(
        SamplingRow,
        "name engine batch images_per_second images_per_second_extrapolated speed_quartiles times_softmax left_out "
        "latency_seconds latency_seconds_extrapolated state_bytes_per_image peak_memory_bytes product_share copy_share "
        f"times_softmax_of_other_engine looked_ahead reduced bits_per_dim images_seen {_PUBLISHED}",
    ),
    list_columns(
        SamplingRow,
        f"preset name engine batch look_ahead {_FILE_SPEED} images_per_second_extrapolated times_softmax "
        "times_softmax_of_other_engine latency_seconds latency_seconds_extrapolated seconds_per_position "
        "seconds_per_position_extrapolated state_bytes_per_image peak_memory_bytes product_share copy_share "
        f"bits_per_dim images_seen {_PUBLISHED} left_out",
    ),
)
TRAINING = (
    list_columns(
        TrainingRow,
        "name engine precision batch images_per_second speed_quartiles times_softmax left_out seconds_per_step "
        "product_share reduced bits_per_dim images_seen",
    ),
    list_columns(
        TrainingRow,
        f"preset name engine batch {_FILE_SPEED} seconds_per_step times_softmax product_share bits_per_dim images_seen "
        "repeats left_out",
    ),
)
# Time against the number of positions, for all networks.
POSITION_COLUMNS = list_columns(
    SamplingRow,
    "network name engine batch positions seconds_per_position seconds_per_position_extrapolated state_bytes_per_image",
)
SCALING_COLUMNS = list_columns(
    AttentionRow,
    "name positions batch seconds_per_sequence seconds_per_sequence_quartiles times_softmax memory_bytes_per_sequence "
    "copy_share left_out",
)
_POWERS = "time_exponent_last_two memory_exponent_last_two time_exponent_all memory_exponent_all"
EXPONENT_COLUMNS = list_columns(Exponents, f"name {_POWERS} longest_positions overtakes_softmax")
SCALING_FILE_COLUMNS = (
    *list_columns(
        AttentionRow,
        "name attention device heads head_width positions batch repeats seconds_per_sequence seconds_quartile_1 "
        "seconds_quartile_3 times_softmax memory_bytes_per_sequence peak_memory_bytes copy_share",
    ),
    *list_columns(Exponents, f"{_POWERS} longest_positions overtakes_softmax_at overtakes_softmax"),
    *list_columns(AttentionRow, "left_out"),
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


def list_speed_tables(
    rows: Sequence[ModelRow], columns: tuple[Sequence[Column], Sequence[Column]], style: TableStyle, title: str = ""
) -> list[RecordTable]:
    """Return the tables of sampling or training: for a terminal, one for each preset, whose name is its title."""
    shown, file = columns
    if style != "table":
        return [RecordTable(rows, file if style == "csv" else choose_columns(rows, file, QUALITY), title)]
    groups = [[row for row in rows if row.preset == preset] for preset in dict.fromkeys(row.preset for row in rows)]
    return [RecordTable(mine, choose_columns(mine, shown), mine[0].preset or "") for mine in groups]


def list_position_times(rows: Sequence[ModelRow]) -> RecordTable:
    """Return the table of how the time per value depends on the number of positions."""

    def method(row: ModelRow) -> tuple[object, ...]:
        return row.network, row.name, row.engine, row.batch

    methods = list(dict.fromkeys(map(method, rows)))
    ordered = sorted(rows, key=lambda row: (methods.index(method(row)), row.positions))
    return RecordTable(ordered, choose_columns(rows, POSITION_COLUMNS))


def list_growth_tables(
    rows: Sequence[AttentionRow], exponents: Sequence[Exponents], style: TableStyle
) -> list[RecordTable]:
    """Return the tables of time and memory against T, and of the exponents. In CSV, all of it is one table."""
    if style == "csv":
        powers = {found.name: vars(found) for found in exponents}
        keys = [column.key for column in SCALING_FILE_COLUMNS]
        records = [{**{key: find_value(row, key) for key in keys}, **powers[row.name]} for row in rows]
        return [RecordTable(records, SCALING_FILE_COLUMNS)]
    return [
        RecordTable(rows, SCALING_COLUMNS, "Time and memory against T"),
        RecordTable(exponents, EXPONENT_COLUMNS, "Exponents"),
    ]


def find_words(rows: Sequence[Record]) -> Words:
    """What the sequences of `rows` are called: windows if all models are models of bytes."""
    return WINDOWS if all(find_value(row, "item") == WINDOWS.item for row in rows) else IMAGES
