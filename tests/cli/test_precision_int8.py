"""Tests of `--precision int8`. Commands that sample accept it with the native engine; all others refuse it."""

import pytest
from machine import needs_library
from PIL import Image

INT8 = ("--precision", "int8")


@needs_library
def test_images_do_not_depend_on_the_batch(lintx, run_folder, tmp_path) -> None:
    grids = []
    for batch in (1, 5):
        grid = tmp_path / f"{batch}.png"
        given = ("sample", run_folder, *INT8, "-n", 5, "--batch", batch, "-o", grid, "--no-preview", "--json")
        document = lintx(*given).document
        assert (document["precision"], document["engine"]) == ("int8", "native")
        grids.append(Image.open(grid).tobytes())
    assert grids[0] == grids[1]


@needs_library
def test_complete_and_eval_accept_int8(lintx, run_folder, tmp_path) -> None:
    Image.new("L", (10, 10)).save(tmp_path / "given.png")
    out = ("-o", tmp_path / "out.png", "--checkpoint", run_folder)
    document = lintx("complete", tmp_path / "given.png", *out, *INT8, "--json").document
    assert (document["precision"], document["engine"]) == ("int8", "native")
    found = [
        lintx("eval", run_folder, "--limit", 8, "--engine", "native", *precision, "--json").document
        for precision in (INT8, ())
    ]
    assert [document["precision"] for document in found] == ["int8", "fp32"]
    assert found[0]["bits_per_dim"] != found[1]["bits_per_dim"] == pytest.approx(found[0]["bits_per_dim"], abs=0.05)
    document = lintx(
        "eval", run_folder, "--limit", 8, "--engine", "auto", *INT8, "--against", run_folder, "--json"
    ).document
    assert document["against"]["precision"] == "fp32"
    assert 0 < abs(document["against"]["difference"]) < 0.05


@needs_library
def test_bench_sample_times_int8_in_the_native_engine_only(lintx, run_folder) -> None:
    """Softmax has no re-run in int8. Rows of other engines say that int8 is not supported."""
    given = ("bench", "sample", "--checkpoint", run_folder, "--batch", 3, "--repeats", 1, "--engine", "auto,reference")
    rows = lintx(*given, *INT8, "--json").document["rows"]
    assert {row["precision"] for row in rows} == {"int8"}
    speeds = {(row["attention"], row["engine"]): row["images_per_second"] for row in rows}
    assert speeds.keys() == {
        ("linear", "native"),
        ("softmax", "native"),
        *((name, "reference") for name in ("linear", "softmax")),
    }
    assert all((speed is None) == (engine == "reference") for (_, engine), speed in speeds.items())
    assert all(row["left_out"] == "reference: it does not support int8" for row in rows if row["engine"] == "reference")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ("sample", "--engine", "reference"),
            "engine 'reference' does not support this model here: it does not support int8",
        ),
        (("eval",), "--precision int8 is a format of the sampling engine; add --engine native"),
        (("train",), "'--precision': 'int8' is not one of 'auto', 'fp32', 'bf16'"),
        (("bench", "train"), "unknown precision 'int8'; known: auto, bf16, fp32"),
    ],
    ids=str,
)
def test_unsupported_uses_of_int8_give_a_one_line_error(lintx, command, message) -> None:
    outcome = lintx(*command, *INT8)
    assert outcome.code and message in outcome.stderr.splitlines()[-1] and "Traceback" not in outcome.stderr
