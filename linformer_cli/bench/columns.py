"""The columns of benchmark tables. The rows declare how each field is shown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from linformer_cli.report.tables import Column, Record, Shown, find_value, list_columns
from linformer_cli.units import IMAGES, WINDOWS, Words

from .growth import Exponents
from .rows import AttentionRow, SamplingRow, TrainingRow


@dataclass(frozen=True)
class SpeedColumns:
    """The columns of a benchmark of whole models.

    `tables` are for a terminal: each fits in 80 characters, and they are printed one below another. `file` is for
    Markdown and CSV.
    """

    tables: Sequence[Sequence[Column]]
    file: Sequence[Column]


# In one table for all figures, titles have to say more.
_FILE = {
    "images_per_second_extrapolated": Shown("extrapolated images/s", ".3g"),
    "latency_seconds": Shown("s per image", ".3g"),
    "latency_seconds_extrapolated": Shown("extrapolated s per image", ".3g"),
    "seconds_per_position": Shown("s per position", ".3g"),
    "seconds_per_position_extrapolated": Shown("extrapolated s per position", ".3g"),
    "seconds_per_step": Shown("s per step", ".3g"),
    "state_bytes_per_image": Shown("state bytes per image", ","),
    "peak_memory_bytes": Shown("peak memory bytes", ","),
    "published.seconds_per_image_cpu": Shown("published s per image", "g"),
    "published.bits_per_dim": Shown("published bits/dim", "g"),
}
_FILE_SPEED = "precision device images_per_second images_per_second_quartile_1 images_per_second_quartile_3"
SAMPLING = SpeedColumns(
    [
        list_columns(SamplingRow, f"name engine batch {keys}")
        for keys in (
            "images_per_second images_per_second_extrapolated speed_quartiles times_softmax left_out",
            "latency_seconds latency_seconds_extrapolated state_bytes_per_image peak_memory_bytes product_share "
            "copy_share",
            "times_softmax_of_other_engine looked_ahead reduced bits_per_dim images_seen",
            "published.images_per_second published.seconds_per_image_cpu published.bits_per_dim",
        )
    ],
    list_columns(
        SamplingRow,
        f"preset name engine batch look_ahead {_FILE_SPEED} images_per_second_extrapolated times_softmax "
        "times_softmax_of_other_engine latency_seconds latency_seconds_extrapolated seconds_per_position "
        "seconds_per_position_extrapolated state_bytes_per_image peak_memory_bytes product_share copy_share "
        "bits_per_dim images_seen published.images_per_second published.seconds_per_image_cpu published.bits_per_dim "
        "left_out",
        _FILE,
    ),
)
TRAINING = SpeedColumns(
    [
        list_columns(TrainingRow, f"name engine precision batch {keys}")
        for keys in (
            "images_per_second speed_quartiles times_softmax left_out",
            "seconds_per_step product_share reduced",
            "bits_per_dim images_seen",
        )
    ],
    list_columns(
        TrainingRow,
        f"preset name engine batch {_FILE_SPEED} seconds_per_step times_softmax product_share bits_per_dim images_seen "
        "repeats left_out",
        _FILE,
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
EXPONENT_COLUMNS = list_columns(Exponents, f"name {_POWERS}", {"name": Shown("exponents of", names=True)})
REACH_COLUMNS = list_columns(Exponents, "name longest_positions overtakes_softmax")
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


def find_words(rows: Sequence[Record]) -> Words:
    """What the sequences of `rows` are called: windows if all models are models of bytes."""
    return WINDOWS if all(find_value(row, "item") == WINDOWS.item for row in rows) else IMAGES


def join_exponents(rows: Sequence[AttentionRow], exponents: Sequence[Exponents]) -> list[Mapping[str, object]]:
    """Return a record for each row of time and memory against T, with the exponents of its mechanism, for CSV."""
    powers = {found.name: vars(found) for found in exponents}
    keys = [column.key for column in SCALING_FILE_COLUMNS]
    return [{**{key: find_value(row, key) for key in keys}, **powers[row.name]} for row in rows]
