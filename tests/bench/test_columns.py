"""Tests of the tables and curves that show benchmark rows."""

import io
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from rich.console import Console

from linformer_cli.bench import columns
from linformer_cli.bench.growth import Exponents
from linformer_cli.bench.published import Published
from linformer_cli.bench.rows import AttentionRow, Extrapolated, SamplingRow
from linformer_cli.report.tables import Column, FittedTable, list_columns, render_records

MEASURED = SamplingRow(
    name="linear",
    preset="mnist-paper",
    attention="linear",
    attention_options={},
    engine="step",
    precision="fp32",
    device="cpu",
    batch=1,
    positions=784,
    repeats=1,
    samples_seconds=[0.5],
    images_per_second=2.0,
    images_per_second_quartiles=(1.5, 2.5),
    seconds_per_image=0.5,
    state_bytes=0,
    state_bytes_per_image=0,
    published=Published(0.644, 142.8, 5.5, 7.3),
)
LEFT_OUT = replace(
    MEASURED,
    name="softmax",
    attention="softmax",
    engine="rerun",
    batch=16,
    images_per_second=None,
    images_per_second_quartiles=None,
    seconds_per_image=None,
    published=None,
    left_out="too slow",
)
EXTRAPOLATED = replace(LEFT_OUT, batch=1, left_out=None, extrapolated=Extrapolated(0.25, (0.2, 0.3), 4.0, 4, 784))


def test_models_of_bytes_have_windows_and_bits_per_byte() -> None:
    rows = [replace(MEASURED, item="window", bits_per_dim=2.0, images_seen=7)]
    shown = columns.SAMPLING[0]
    titles = {column.title for column in columns.choose_columns(rows, shown)}
    assert {"windows/s", "s/window", "bits/byte", "windows seen"} <= titles
    assert not any("image" in title or "dim" in title for title in titles)
    assert rows[0].describe() == "mnist-paper, linear (step, fp32), batch 1: 2 windows/s"
    assert b"windows per second" in columns.render_speed(rows, "svg")
    mixed = columns.choose_columns([*rows, MEASURED], shown)
    assert "images/s" in {column.title for column in mixed}


def test_measured_and_extrapolated_figures_have_separate_columns() -> None:
    figures = "latency_seconds latency_seconds_extrapolated seconds_per_position seconds_per_position_extrapolated"
    rows = [MEASURED, EXTRAPOLATED, LEFT_OUT]
    assert [[getattr(row, key) for key in figures.split()] for row in rows] == [
        [0.5, None, 0.5 / 784, None],
        [None, 4.0, None, 4.0 / 784],
        [None] * 4,
    ]
    assert replace(MEASURED, batch=2).latency_seconds is None
    shown = list_columns(SamplingRow, "extrapolated.images_per_second speed_quartiles published.images_per_second")
    table = render_records(rows, shown, "md").splitlines()
    assert [line.replace("|", " ").split() for line in table if "--" not in line] == [
        ["extrapolated", "images/s", "quartiles", "published", "images/s"],
        *(["1.5-2.5", "142.8"], ["0.25", "0.2-0.3"], []),
    ]
    header = "extrapolated_images_per_second,speed_quartiles,published_images_per_second"
    assert render_records([MEASURED], shown, "csv") == f'{header}\n,"[1.5,2.5]",142.8\n'


def test_empty_columns_are_left_out() -> None:
    rows = [MEASURED]
    shown, file = columns.SAMPLING
    keys = {column.key for column in columns.choose_columns(rows, shown)}
    assert {"latency_seconds", "published.images_per_second"} <= keys
    assert not keys & {"extrapolated.images_per_second", "bits_per_dim", "images_seen"}  # bits/dim were not measured
    kept = columns.choose_columns(rows, file, columns.QUALITY)
    assert {"bits_per_dim", "images_seen"} <= {column.key for column in kept}
    assert columns.choose_columns(rows, [*shown[:3], Column("nothing", "nothing")]) == []


def test_speed_is_plotted_by_network_and_method() -> None:
    two = replace(MEASURED, batch=64, images_per_second=30.0, images_per_second_quartiles=(29.0, 31.0))
    text = columns.render_speed([MEASURED, two, EXTRAPOLATED, LEFT_OUT], "svg").decode()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    for words in ("mnist-paper", "linear", "softmax, rerun", "images at once", "64"):
        assert f"<!-- {words} -->" in text
    assert "<!-- 16 -->" not in text  # nothing was measured at 16
    assert "images per second (in a ring: extrapolated)" in text
    text = columns.render_speed([MEASURED, two], "svg").decode()
    assert "<!-- linear -->" in text and "in a ring" not in text


def test_every_engine_of_a_mechanism_has_its_own_curve() -> None:
    other = replace(MEASURED, engine="native", images_per_second=3.0)
    for text in (
        columns.render_speed([MEASURED, other, replace(MEASURED, name="rfa")], "svg").decode(),
        columns.render_quality([_trained("linear", 1.2), _trained("linear", 1.2, row=other)], "svg").decode(),
    ):
        assert "<!-- linear, step -->" in text and "<!-- linear, native -->" in text and "<!-- linear -->" not in text
        assert "rfa," not in text
    text = columns.render_speed([MEASURED, replace(MEASURED, precision="bf16")], "svg").decode()
    assert "<!-- linear, step, fp32 -->" in text and "<!-- linear, step, bf16 -->" in text


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ({512: 3, 1024: 3}, "batch 3"),
        ({512: 32, 1024: 16, 16_384: 1}, "batch x T = 16,384"),
        ({512: 32, 1024: 16, 16_384: 1, 65_536: 1}, "batch max(1, 16,384 / T)"),
        ({512: 7, 1024: 5}, "batch 7 to 5"),
    ],
)
def test_growth_is_plotted_per_sequence_and_the_title_gives_the_batch(batches, said) -> None:
    same = {"attention": "linear", "attention_options": {}, "engine": "parallel", "precision": "fp32", "device": "cpu"}
    rows = [
        AttentionRow(
            **same,
            name="linear",
            positions=positions,
            batch=batch,
            heads=1,
            head_width=32,
            repeats=1,
            samples_seconds=[1.0],
            seconds_per_sequence=positions / 1000,
            seconds_per_sequence_quartiles=(positions / 1001, positions / 999),
            memory_bytes_per_sequence=positions * 2**10,
        )
        for positions, batch in batches.items()
    ]
    slow = replace(rows[0], name="slow", seconds_per_sequence=None, seconds_per_sequence_quartiles=None)
    exponents = [
        Exponents(name, None, time, None, memory, None, None, None)
        for name, time, memory in (("linear", 1.0, 0.5), ("slow", None, None))
    ]
    text = columns.render_growth([*rows, slow], exponents, "svg").decode()
    assert f"backward, {said} (slopes: time, memory)" in text
    assert "<!-- linear (1.00, 0.50) -->" in text and "slow" not in text  # slow was not measured


def _trained(name: str, bits: float, seen: int = 8000, row=MEASURED, **changes):
    run = {"bits_per_dim": bits, "bits_per_dim_standard_error": 0.01, "images_seen": seen, "data": "mnist"}
    return replace(row, name=name, **run, **changes)


@pytest.mark.slow
def test_bits_per_dim_are_plotted_against_speed() -> None:
    rows = [_trained("linear", 1.25), _trained("rfa", 1.5, batch=64), MEASURED]
    rows.append(_trained("softmax", 1.0, row=EXTRAPOLATED))
    assert columns.trained_rows([*rows, _trained("x", 1.0, row=LEFT_OUT)]) == [*rows[:2], rows[3]]
    text = columns.render_quality(rows, "svg").decode()
    for words in ("batch 1", "batch 64", "linear", "rfa", "softmax, rerun", "images per second", "bits/dim"):
        assert f"<!-- {words} -->" in text
    assert "validation bits/dim on mnist after 8,000 training images" in text
    # Legend entries show the training images seen if these numbers differ.
    text = columns.render_quality([*rows, _trained("flash", 1.1, 500)], "svg").decode()
    assert "<!-- flash, 500 images -->" in text and "<!-- linear, 8 k images -->" in text
    assert columns.render_quality(rows, "png").startswith(b"\x89PNG")


def test_no_table_is_wider_than_a_terminal() -> None:
    facts = {"name": "retention", "engine": "parallel", "product_share": 0.123, "bits_per_dim": 1.2345}
    facts |= {"images_seen": 15_000_000, "times_softmax": 0.123, "images_per_second_quartiles": (123.4, 234.5)}
    facts |= {"state_bytes_per_image": 2**28, "peak_memory_bytes": 2**34, "copy_share": 0.456}
    row = replace(MEASURED, **facts, reduced="2 of 3 repeats", seconds_per_image=0.123)
    console = Console(width=80, file=io.StringIO())
    console.print(FittedTable([row], columns.choose_columns([row], columns.SAMPLING[0])))
    parts = console.file.getvalue().rstrip().split("\n\n")
    for part in parts:
        *headings, rule, cells = part.splitlines()
        assert len(rule) <= 80 and cells.startswith("retention   parallel") and headings[-1].startswith("attention")
    assert len(parts) > 2


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("speed", [2291.5946457246673, 111.15814943998954, 380.2520802213031, 5.0])
def test_a_single_speed_has_an_axis_around_it(speed: float) -> None:
    """For the first three speeds, matplotlib by itself chooses an axis whose two ends are equal."""
    row = replace(MEASURED, images_per_second=speed, images_per_second_quartiles=(speed, speed))
    assert columns.render_speed([row], "png").startswith(b"\x89PNG")
