"""Tests of `lintx bench copy` from the command line to tables, JSON and a plot."""

import csv
import json
import os
import signal

import pytest

from linformer_cli.bench.copy import CopyRun
from linformer_cli.errors import TrainingError

pytestmark = pytest.mark.usefixtures("without_comparison")
TINY = ["bench", "copy", "--attention", "softmax,few=linear:chunk=4", "--length", 12, "--width", 16, "--every", 2]
TITLE = "copy task, length 12, width 16 (reduced from length 128, width 256)"


@pytest.mark.smoke
def test_json_and_plot_have_every_point_and_say_that_the_task_is_reduced(lintx, tmp_path):
    plot = tmp_path / "deep" / "copy.svg"
    outcome = lintx(*TINY, "--updates", 5, "--plot", plot, "--json")
    assert outcome.code == 0, outcome.stderr
    document = outcome.document
    assert [row["name"] for row in document["rows"]] == ["softmax", "few"]
    for row in document["rows"]:
        assert [point["update"] for point in row["points"]] == [2, 4, 5]
        assert row["loss"] == row["points"][-1]["loss"] and 0 <= row["accuracy"] <= 1
        assert row["reduced"] is True and row["task"] == TITLE and row["seconds_per_update"] > 0
    settings = document["settings"]
    assert (settings["updates"], settings["length"], settings["batch"], settings["reduced"]) == (5, 12, 64, True)
    assert document["ended"] == "finished" and document["environment"]["versions"]["torch"]
    assert document["plot"] == str(plot)
    text = plot.read_text()
    for words in (TITLE, "updates", "loss (nats per predicted symbol)", "softmax", "few"):
        assert f"<!-- {words} -->" in text
    assert "update 2: softmax " in outcome.stderr
    short = lintx(*TINY, "--budget", "0.001s", "--plot", tmp_path / "short.png")  # it ends before the first point
    assert short.code == 0 and "0 of 10,000 updates: the budget was spent" in short.stderr
    assert TITLE in short.stdout and not (tmp_path / "short.png").exists()


def test_every_table_says_that_the_task_is_reduced(lintx, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    tables = {style: lintx(*TINY, "--updates", 4, "--format", style).stdout for style in ("table", "md", "csv")}
    rows = list(csv.DictReader(tables.pop("csv").splitlines()))
    assert [(row["name"], row["update"]) for row in rows] == [(name, n) for name in ("softmax", "few") for n in "24"]
    assert {row["task"] for row in rows} == {TITLE} and {row["reduced"] for row in rows} == {"true"}
    assert max(map(len, tables["table"].splitlines())) <= 80
    for table in tables.values():
        assert table.startswith(TITLE + "\n") and "loss at update" in table and "failed" not in table


def test_recall_shows_accuracy_beside_the_state(lintx):
    tiny = ("--updates", 1, "--length", 8, "--width", 4, "--pairs", 1, "--attention", "softmax,none")
    document = lintx("bench", "recall", *tiny, "--json").document
    assert [row["state_bytes"] > 0 for row in document["rows"]] == [True, False]
    assert document["settings"]["task"] == "recall of 1 pairs, length 8, width 4"


def test_the_exit_code_is_1_if_every_model_fails(lintx, monkeypatch):
    def fail(run):
        raise TrainingError("the loss is NaN")

    monkeypatch.setattr(CopyRun, "update", fail)
    outcome = lintx(*TINY, "--updates", 4, "--json")
    assert outcome.code == 1
    assert "every model failed; the table says why" in outcome.stderr
    assert json.loads(outcome.stdout)["ended"] == "failed"


def test_an_interruption_keeps_what_was_measured(lintx, monkeypatch, tmp_path):
    update = CopyRun.update

    def interrupted(run):
        if run.trainer.progress.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return update(run)

    monkeypatch.setattr(CopyRun, "update", interrupted)
    plot = tmp_path / "copy.png"
    outcome = lintx(*TINY, "--updates", 50, "--plot", plot, "--json")
    assert outcome.code == 130
    assert "Stopped after 3 of 50 updates; their results are shown" in outcome.stderr
    assert outcome.document["ended"] == "interrupted"
    for row in outcome.document["rows"]:
        assert [point["update"] for point in row["points"]] == [2, 3]
    assert plot.exists()
