"""Tests of rows: the comparison with softmax, the one-line description, and JSON."""

import dataclasses
import json

import pytest

from linformer_cli.bench.rows import AttentionRow, Extrapolated, SamplingRow, compare_with_softmax
from linformer_cli.report.tables import to_json


def build_row(attention: str, *samples: float, engine: str = "native", precision: str = "fp32") -> SamplingRow:
    """Build a row of batch size 1 with these samples."""
    return SamplingRow(
        name=attention,
        attention=attention,
        attention_options={},
        engine=engine,
        precision=precision,
        device="cpu",
        batch=1,
        positions=64,
        preset=None,
        repeats=len(samples),
        samples_seconds=samples,
        images_per_second=1 / sorted(samples)[len(samples) // 2] if samples else None,
        state_bytes=0,
        state_bytes_per_image=0,
        left_out=None if samples else "too slow",
    )


def compare(*rows: SamplingRow) -> list[float | None]:
    return [row.times_softmax for row in compare_with_softmax(rows, [None] * len(rows))]


def test_the_speed_up_is_the_median_over_the_rounds() -> None:
    # Linear is four times as fast in two rounds. In the last round, the machine was busy.
    assert compare(build_row("linear", 1.0, 2.0, 9.0), build_row("softmax", 4.0, 8.0, 9.0)) == [4, 1]


def test_no_row_is_compared_with_a_rerun_or_another_precision_or_network() -> None:
    assert compare(build_row("linear", 1.0), build_row("softmax", 2.0, engine="rerun")) == [None, None]
    assert compare(build_row("linear", 1.0), build_row("softmax", 2.0, precision="bf16")) == [None, 1]
    rows = [build_row("linear", 1.0), build_row("softmax", 8.0), build_row("softmax", 2.0)]
    assert compare_with_softmax(rows, ["small", "large", "small"])[0].times_softmax == 2
    assert compare(build_row("linear", 1.0), build_row("softmax")) == [None, None]
    assert compare(build_row("linear"), build_row("softmax", 1.0)) == [None, 1]


def test_a_row_is_compared_with_softmax_in_its_own_engine() -> None:
    plain, fast = build_row("softmax", 4.0, engine="reference"), build_row("softmax", 2.0)
    linear = [build_row("linear", 1.0, engine="reference"), build_row("linear", 1.0)]
    assert compare(plain, fast, *linear) == [1, 1, 4, 2]


def test_softmax_in_another_engine_is_compared_in_the_same_precision() -> None:
    """Training has no native softmax. int8 has no softmax of its own precision, so it takes the first one."""
    linear = [build_row("linear", 1.0), build_row("linear", 0.5, precision="bf16")]
    softmax = [build_row("softmax", 4.0, engine="parallel")]
    softmax.append(build_row("softmax", 2.0, engine="parallel", precision="bf16"))
    rows = [*linear, build_row("linear", 0.25, precision="int8"), *softmax]
    found = compare_with_softmax(rows, [None] * 5)
    assert [row.times_softmax_of_other_engine for row in found[:3]] == [4, 4, 16]


def test_a_ratio_across_engines_has_its_own_field() -> None:
    rows = [build_row("softmax", 4.0, engine="reference"), build_row("linear", 1.0)]
    rows.append(build_row("softmax", 8.0, engine="rerun"))
    found = compare_with_softmax(rows, [None] * 3)
    assert [row.times_softmax for row in found] == [1, None, None]
    assert [row.times_softmax_of_other_engine for row in found] == [None, 4, 0.5]


def test_a_row_is_described_in_one_line() -> None:
    row = dataclasses.replace(build_row("linear", 0.5), preset="tiny", look_ahead=True)
    assert row.describe() == "tiny, linear (native, fp32, looking ahead), batch 1: 2 images/s"
    softmax = dataclasses.replace(row, name="softmax", attention="softmax", look_ahead=False)
    assert softmax.describe() == "tiny, softmax (native, fp32, cached), batch 1: 2 images/s"
    assert build_row("linear").describe() == "linear (native, fp32), batch 1: left out, too slow"
    partly = dataclasses.replace(
        row,
        preset=None,
        look_ahead=False,
        images_per_second=None,
        extrapolated=Extrapolated(3.0, (2.0, 4.0), 0.3, 8, 64),
    )
    assert partly.describe() == "linear (native, fp32), batch 1: 3 images/s (extrapolated)" and partly.speed == 3.0


def test_measured_rows_and_rows_left_out_have_the_same_json_keys() -> None:
    measured, left_out = (json.loads(to_json(row)) for row in (build_row("linear", 0.5), build_row("linear")))
    assert measured.keys() == left_out.keys() >= {"name", "extrapolated", "bits_per_dim", "look_ahead", "published"}
    assert (left_out["images_per_second"], left_out["left_out"]) == (None, "too slow")


@pytest.mark.parametrize(
    ("seconds", "speed", "described"), [(0.25, 4.0, "250 ms, 2 KiB"), (None, None, "left out, too slow, 2 KiB")]
)
def test_the_speed_of_attention_is_in_sequences_per_second(seconds, speed, described) -> None:
    same = {"name": "a", "attention": "a", "attention_options": {}, "engine": "parallel", "precision": "fp32"}
    sizes = {"device": "cpu", "batch": 2, "positions": 9, "heads": 1, "head_width": 2, "repeats": 0}
    sizes |= {"memory_bytes_per_sequence": 2048, "left_out": "too slow"}
    row = AttentionRow(**same, **sizes, samples_seconds=[], seconds_per_sequence=seconds)
    assert row.speed == speed and row.describe() == f"a, T = 9, batch 2: {described}"
