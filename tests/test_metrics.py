"""Tests of metrics.csv: which rows are read, which rows a resumed run cuts off, damaged files, and labels of runs."""

import errno
import os
from pathlib import Path

import pytest

from linformer_cli import files as files_module
from linformer_cli import metrics as metrics_module
from linformer_cli.errors import DataError, LintxError, UsageError
from linformer_cli.metrics import (
    COLUMNS,
    MetricsRow,
    append_row,
    create_metrics,
    cut_metrics,
    label_runs,
    load_runs,
    read_metrics,
)

HEADER = ",".join(COLUMNS)
VALIDATED = "0,0,,,,8.1,0.02,0.5,,"
TRAINED = "20,160,0.001,7.5,1.0,,,2.25,80.0,1000"


def write_run(folder: Path, *rows: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    return folder


def test_rows_become_training_and_validation_points(tmp_path) -> None:
    (run,) = load_runs([write_run(tmp_path / "first", VALIDATED, TRAINED, "40,320,0.002,6.5,1.0,,,4.5,80.0,1000")])
    assert run.label == "first" and run.run == tmp_path / "first"
    assert [(p.step, p.images, p.elapsed_seconds, p.bits_per_dim, p.learning_rate) for p in run.training] == [
        (20, 160, 2.25, 7.5, 0.001),
        (40, 320, 4.5, 6.5, 0.002),
    ]
    assert [(p.step, p.images, p.elapsed_seconds, p.bits_per_dim, p.standard_error) for p in run.validation] == [
        (0, 0, 0.5, 8.1, 0.02)
    ]


def test_a_truncated_row_is_left_out(tmp_path) -> None:
    (run,) = load_runs([write_run(tmp_path / "first", TRAINED, "40,320,0.002,6.")])
    assert [point.step for point in run.training] == [20]


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ("20,160,0.001,x,1.0,,,2.25,80.0,1000", "could not convert"),
        ("20,160,0.001,nan,1.0,,,2.25,80.0,1000", "nan is not a finite number"),
        ("20,,0.001,7.5,1.0,,,2.25,80.0,1000", "is not a count"),
    ],
)
def test_a_damaged_row_gives_a_one_line_error_with_its_number(tmp_path, row, part, raises_one_line) -> None:
    run = write_run(tmp_path / "first", VALIDATED, row)
    with raises_one_line(DataError, part, "metrics.csv' is damaged in line 3"):
        load_runs([run])


def test_a_file_without_metrics_gives_a_one_line_error(tmp_path, raises_one_line) -> None:
    (tmp_path / "metrics.csv").write_text("a,b\n1,2\n")
    with raises_one_line(DataError, "has no column 'step'"):
        load_runs([tmp_path])
    (tmp_path / "metrics.csv").write_bytes(b"\xff\xfe\x00")
    with raises_one_line(DataError, "is not a table of metrics"):
        load_runs([tmp_path])


def test_missing_and_empty_metrics_give_a_one_line_error(tmp_path, raises_one_line) -> None:
    for missing in (tmp_path, tmp_path / "nowhere"):
        with raises_one_line(UsageError, str(missing), "is not a run: it has no metrics.csv"):
            load_runs([missing])
    with raises_one_line(DataError, "is empty"):
        load_runs([write_run(tmp_path / "first")])
    (tmp_path / "first" / "metrics.csv").write_text("")
    with raises_one_line(DataError, "is empty"):
        load_runs([tmp_path / "first"])


# Writing and cutting


def write_rows(file: Path, *rows: MetricsRow) -> list[dict[str, str]]:
    create_metrics(file)
    for row in rows:
        append_row(file, row)
    return read_metrics(file)


def row_of(step: int, **values: float) -> MetricsRow:
    return MetricsRow(step=step, images=8 * step, elapsed_seconds=step / 2, **values)  # type: ignore[arg-type]


def test_metrics_that_were_not_measured_have_empty_cells(tmp_path) -> None:
    rows = row_of(3, train_bits_per_dim=0.1 + 0.2), row_of(3, validation_bits_per_dim=1e-9)
    first, second = write_rows(tmp_path / "metrics.csv", *rows)
    assert list(first) == list(COLUMNS)
    assert float(first["train_bits_per_dim"]) == 0.1 + 0.2
    assert first["validation_bits_per_dim"] == second["train_bits_per_dim"] == ""
    assert float(second["validation_bits_per_dim"]) == 1e-9


@pytest.mark.parametrize(("step", "kept"), [(0, 0), (1, 0), (2, 1), (4, 3), (5, 3), (10, 4), (11, 4)])
def test_cutting_removes_the_rows_after_a_step_and_keeps_the_others(tmp_path, step: int, kept: int) -> None:
    file = tmp_path / "metrics.csv"
    before = write_rows(
        file, row_of(2, gradient_norm=1 / 3), row_of(4), row_of(4, validation_bits_per_dim=2.5), row_of(10)
    )
    cut_metrics(file, step)
    assert read_metrics(file) == before[:kept]
    append_row(file, row_of(12))
    assert [row["step"] for row in read_metrics(file)] == [row["step"] for row in before[:kept]] + ["12"]


def test_a_validation_at_the_last_step_is_cut_unless_it_was_saved(tmp_path) -> None:
    file = tmp_path / "metrics.csv"
    before = write_rows(file, row_of(2), row_of(4, gradient_norm=1.0), row_of(4, validation_bits_per_dim=2.5))
    cut_metrics(file, 4, validated=False)
    assert read_metrics(file) == before[:2]


def test_a_missing_file_is_created_when_cut(tmp_path) -> None:
    cut_metrics(tmp_path / "metrics.csv", 1)
    assert (tmp_path / "metrics.csv").read_text().strip() == HEADER


def test_a_full_disk_gives_a_one_line_error(tmp_path, monkeypatch, raises_one_line) -> None:
    def full_disk(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for module in (metrics_module, files_module):
        monkeypatch.setattr(module, "open", full_disk, raising=False)
    file = tmp_path / "metrics.csv"
    for fails in (lambda: append_row(file, row_of(1)), lambda: create_metrics(file)):
        with raises_one_line(LintxError, str(file), "o space left on device"):
            fails()


# Labels


@pytest.mark.parametrize(
    ("runs", "labels"),
    [
        *((["runs/a"], ["a"]), (["runs/a", "runs/b"], ["a", "b"]), (["one/a", "two/a"], ["one/a", "two/a"])),
        (["one/x/a", "two/x/a", "b"], ["one/x/a", "two/x/a", "{here}/b"]),
        (["runs/a/", "runs/./b"], ["a", "b"]),
    ],
)
def test_labels_differ_between_runs(runs, labels, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = label_runs([Path(run) for run in runs])
    here = "/".join(tmp_path.resolve().parts[-2:])
    assert found == [label.format(here=here) for label in labels]
