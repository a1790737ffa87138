"""metrics.csv as series: what counts, what is cut short, what is damaged, and what runs are called."""

from pathlib import Path

import pytest

from linformer_cli.errors import DataError, LintxError, UsageError
from linformer_cli.report.metrics import label_runs, load_runs, read_metrics
from linformer_cli.training.run_folder import METRICS

HEADER = ",".join(METRICS)
VALIDATED = "0,0,,,,8.1,0.02,0.5,,"
TRAINED = "20,160,0.001,7.5,1.0,,,2.25,80.0,1000"


def write_run(folder: Path, *rows: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    return folder


def test_a_row_is_of_training_or_of_validation(tmp_path) -> None:
    (run,) = load_runs([write_run(tmp_path / "first", VALIDATED, TRAINED, "40,320,0.002,6.5,1.0,,,4.5,80.0,1000")])
    assert run.label == "first" and run.run == tmp_path / "first"
    assert [(p.step, p.images, p.elapsed_seconds, p.bits_per_dim, p.learning_rate) for p in run.training] == [
        (20, 160, 2.25, 7.5, 0.001),
        (40, 320, 4.5, 6.5, 0.002),
    ]
    assert [(p.step, p.images, p.elapsed_seconds, p.bits_per_dim, p.standard_error) for p in run.validation] == [
        (0, 0, 0.5, 8.1, 0.02)
    ]


def test_a_row_that_was_cut_short_is_left_out(tmp_path) -> None:
    (run,) = load_runs([write_run(tmp_path / "first", TRAINED, "40,320,0.002,6.")])
    assert [point.step for point in run.training] == [20]


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ("20,160,0.001,x,1.0,,,2.25,80.0,1000", "could not convert"),
        ("20,160,0.001,nan,1.0,,,2.25,80.0,1000", "nan is not a finite number"),
        ("20,,0.001,7.5,1.0,,,2.25,80.0,1000", "invalid literal"),
    ],
)
def test_a_damaged_row_is_one_line_with_its_number(tmp_path, row, part, raises_one_line) -> None:
    run = write_run(tmp_path / "first", VALIDATED, row)
    with raises_one_line(DataError, part, "metrics.csv' is damaged in line 3"):
        load_runs([run])


def test_another_table_is_one_line(tmp_path, raises_one_line) -> None:
    (tmp_path / "metrics.csv").write_text("a,b\n1,2\n")
    with raises_one_line(DataError, "has no column 'step'"):
        load_runs([tmp_path])
    (tmp_path / "metrics.csv").write_bytes(b"\xff\xfe\x00")
    with raises_one_line(DataError, "is not a table of metrics"):
        load_runs([tmp_path])


def test_missing_and_empty_metrics_are_one_line(tmp_path, raises_one_line) -> None:
    for missing in (tmp_path, tmp_path / "nowhere"):
        with raises_one_line(UsageError, str(missing), "is not a run: it has no metrics.csv"):
            load_runs([missing])
    with raises_one_line(DataError, "is empty"):
        load_runs([write_run(tmp_path / "first")])
    (tmp_path / "first" / "metrics.csv").write_text("")
    with raises_one_line(DataError, "is empty"):
        load_runs([tmp_path / "first"])


def test_rows_are_read_as_they_are(tmp_path, raises_one_line) -> None:
    file = write_run(tmp_path / "first", TRAINED) / "metrics.csv"
    assert read_metrics(file) == [dict(zip(METRICS, TRAINED.split(","), strict=True))]
    assert read_metrics(tmp_path / "missing.csv") == []
    with raises_one_line(LintxError, "cannot read"):
        read_metrics(tmp_path)


@pytest.mark.parametrize(
    ("runs", "labels"),
    [
        (["runs/a"], ["a"]),
        (["runs/a", "runs/b"], ["a", "b"]),
        (["one/a", "two/a"], ["one/a", "two/a"]),
        (["one/x/a", "two/x/a", "b"], ["one/x/a", "two/x/a", "{here}/b"]),
        (["runs/a/", "runs/./b"], ["a", "b"]),
    ],
)
def test_labels_tell_runs_apart(runs, labels, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = label_runs([Path(run) for run in runs])
    here = "/".join(tmp_path.resolve().parts[-2:])
    assert found == [label.format(here=here) for label in labels]


def test_a_run_is_named_once(tmp_path, monkeypatch, raises_one_line) -> None:
    monkeypatch.chdir(tmp_path)
    with raises_one_line(UsageError, "named twice"):
        label_runs([Path("runs/a"), Path("runs/../runs/a")])
