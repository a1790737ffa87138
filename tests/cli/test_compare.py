"""Tests of `lintx compare` from the command line to its table, files and JSON document."""

import csv
import importlib
import os
import shutil
import signal

import pytest
from cli.conftest import NoCapture, run_main

from linformer_cli.errors import DisagreementError
from linformer_cli.system.device import Choice
from linformer_cli.training.learner import Learner

COMPARE = ["compare", "--data", "glyphs", "--image-size", 8, "--preset", "tiny", "--images", 32, "--evaluate-images", 8]
COMPARE += ["--batch", 2, "--repeats", 2]


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A comparison of linear attention and softmax."""
    folder = tmp_path_factory.mktemp("comparison")
    assert run_main((*COMPARE, "--runs", folder, "--attention", "linear,softmax"), NoCapture()).code == 0
    return folder


def copy_runs(finished, folder, *names):
    """Copy finished runs of mechanisms with their grids to `folder`, which is then a comparison of these."""
    for name in names:
        shutil.copytree(finished / name, folder / name)
        shutil.copy(finished / f"{name}.png", folder)


def compare(lintx, runs, *arguments):
    return lintx(*COMPARE, "--runs", runs, *arguments)


def test_compare_trains_each_mechanism_once(lintx, finished, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    copy_runs(finished, tmp_path, "softmax")
    first = compare(lintx, tmp_path, "--attention", "softmax", "--no-train", "--json")
    assert first.code == 0, first.stderr
    outcome = compare(lintx, tmp_path, "--attention", "softmax,linear:chunk=16", "--json")
    assert "softmax: training" not in outcome.stderr and "linear-16: training" in outcome.stderr
    assert "warms up for 100 steps" in outcome.stderr
    rows = outcome.document["rows"]
    assert [row["name"] for row in rows] == ["softmax", "linear-16"]
    assert rows[0] == first.document["rows"][0]
    for row in rows:
        assert row["images"] == 32 and row["missing"] is None and len(row["samples_seconds"]) == 2
        assert len(row["training_samples_seconds"]) == 2 and row["training_images_per_second"] > 0
        assert row["bits_per_dim"] == pytest.approx(8, abs=0.3) and row["validation_images"] == 8
        assert (tmp_path / f"{row['name']}.png").is_file()
    # Existing results are not computed again.
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    table = compare(lintx, tmp_path, "--attention", "softmax,linear:chunk=16", "--no-train")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")} == before
    assert max(map(len, table.stdout.splitlines())) <= 80 and "missing" not in table.stdout
    assert "linear-16" in table.stdout and f"{rows[1]['bits_per_dim']:.3f} +- " in table.stdout
    assert "engine" not in table.stdout
    again = compare(lintx, tmp_path, "--attention", "softmax,linear:chunk=16", "--retime", "--json").document["rows"]
    for old, new in zip(rows, again, strict=True):
        assert new["samples_seconds"] != old["samples_seconds"] and new["bits_per_dim"] == old["bits_per_dim"]
        assert new["training_samples_seconds"] != old["training_samples_seconds"] and len(new["samples_seconds"]) == 2
    refused = compare(lintx, tmp_path, "--retime", "--no-train")
    assert refused.code == 2 and "--retime" in refused.stderr
    both = compare(lintx, tmp_path, "--max-time", "1s")
    assert both.code == 2 and "--images and --max-time" in both.stderr
    plotted = compare(lintx, tmp_path, "--attention", "softmax", "--no-train", "--plot", tmp_path / "all.svg")
    assert plotted.code == 0 and "state per image" in (tmp_path / "all.svg").read_text()
    text = compare(lintx, tmp_path, "--attention", "softmax,linear", "--no-train", "--format", "csv").stdout
    found = list(csv.DictReader(text.splitlines()))
    assert [(row["name"], row["missing"]) for row in found] == [("softmax", ""), ("linear", "not begun")]
    assert not (tmp_path / "linear").exists()


@pytest.mark.smoke
def test_compare_can_measure_speeds_later(lintx, tmp_path):
    """The speeds are those of the first seed, whose run is that of a comparison without --seeds."""
    arguments = ["--attention", "linear,softmax", "--repeats", 0, "--images", 16]
    first, second = compare(lintx, tmp_path, *arguments, "--seeds", 2, "--json").document["rows"]
    assert first["missing"] is second["missing"] is first["difference"] is None and first["group"] is not None
    assert second["difference"] == pytest.approx(second["bits_per_dim"] - first["bits_per_dim"], abs=1e-9)
    assert second["difference_standard_error"] > 0 and (tmp_path / "softmax-seed1" / "last").is_dir()
    table = compare(lintx, tmp_path, *arguments, "--seeds", 2, "--no-train", "--format", "md").stdout
    assert "| difference" in table and "| group" in table and "img/s" not in table and "missing" not in table
    assert f" {second['difference']:+.4f} +- {second['difference_standard_error']:.4f} " in table
    (tmp_path / "softmax" / "validation.json").unlink()
    assert "difference" not in compare(lintx, tmp_path, *arguments, "--no-train").stdout
    arguments = ["--attention", "linear", "--images", 16, "--json"]
    untimed = compare(lintx, tmp_path, *arguments, "--no-train").document["rows"][0]
    assert untimed["missing"] == "training and sampling not timed" and untimed["group"] is None
    timed = compare(lintx, tmp_path, *arguments).document["rows"][0]
    assert timed["missing"] is None and timed["bits_per_dim"] == untimed["bits_per_dim"] != first["bits_per_dim"]
    refused = compare(lintx, tmp_path, "--retime", "--repeats", 0)
    assert refused.code == 2 and "--repeats 0" in refused.stderr


def run_out_of_memory(*given):
    raise MemoryError


def disagree(*given):
    raise DisagreementError("'linear' is not timed: the forms disagree")


@pytest.mark.parametrize(
    ("work", "failure", "reason"),
    [
        ("entries.train_entry", run_out_of_memory, "out of memory"),
        ("entries.draw_samples", run_out_of_memory, "out of memory"),
        ("figures.time_sampling_once", run_out_of_memory, "out of memory"),
        ("entries.draw_samples", disagree, "is not timed"),
    ],
)
def test_compare_continues_past_a_mechanism_that_fails(lintx, finished, tmp_path, monkeypatch, work, failure, reason):
    copy_runs(finished, tmp_path, "softmax")
    module, _, name = work.partition(".")
    module = importlib.import_module(f"linformer_cli.comparison.{module}")
    right = getattr(module, name)

    def fail(entry, *rest):
        return failure() if entry.variant.label == "linear" else right(entry, *rest)

    monkeypatch.setattr(module, name, fail)
    outcome = compare(lintx, tmp_path, "--attention", "linear,softmax", "--json")
    assert outcome.code == 1 and "1 of 2 failed: linear" in outcome.stderr
    broken, whole = outcome.document["rows"]
    assert reason in broken["missing"] and broken["images_per_second"] is None
    assert (broken["bits_per_dim"] is None) == (work == "entries.train_entry")
    assert whole["missing"] is None and whole["images_per_second"] > 0 and whole["samples"] is not None


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_compare_continues_past_a_damaged_run(lintx, finished, tmp_path, file):
    copy_runs(finished, tmp_path, "linear", "softmax")
    (tmp_path / "linear" / "last" / file).write_text("{")
    outcome = compare(lintx, tmp_path, "--attention", "linear,softmax", "--no-train", "--json")
    assert outcome.code == 1 and "1 of 2 failed: linear" in outcome.stderr
    damaged, whole = outcome.document["rows"]
    assert file in damaged["missing"] and whole["missing"] is None


def test_an_interrupted_compare_keeps_its_results(lintx, tmp_path, monkeypatch):
    train_step = Learner.train_step

    def interrupted(self, share):
        if self.task.config.model.attention == "linear" and self.progress.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return train_step(self, share)

    monkeypatch.setattr(Learner, "train_step", interrupted)
    outcome = compare(lintx, tmp_path / "alone", "--attention", "linear", "--plot", tmp_path / "empty.png", "--json")
    assert outcome.code == 130 and "repeat the command to continue" in outcome.stderr
    assert not (tmp_path / "empty.png").exists() and outcome.document["plot"] is None
    assert "nothing was measured that it would show" in outcome.stderr
    outcome = compare(lintx, tmp_path, "--attention", "softmax,linear", "--format", "md")
    assert outcome.code == 130 and "repeat the command to continue" in outcome.stderr
    assert "training and sampling not timed" in outcome.stdout and "step 2 of 2" in outcome.stdout  # no validation
    monkeypatch.setattr(Learner, "train_step", train_step)
    rows = compare(lintx, tmp_path, "--attention", "softmax,linear", "--json").document["rows"]
    assert [row["missing"] for row in rows] == [None, None]
    assert all(row["bits_per_dim"] is not None for row in rows)


def test_compare_chooses_the_precision_for_its_own_network(lintx, tmp_path, monkeypatch):
    """The widths of --config override those of the preset."""
    asked = []
    chosen = Choice("fp32", "requested")
    monkeypatch.setattr("linformer_cli.cli.compare.choose_precision", lambda *given: asked.append(given) or chosen)
    file = tmp_path / "network.toml"
    file.write_text("[model]\nwidth = 24\nfeed_forward = 40\n")
    outcome = compare(
        lintx, tmp_path / "runs", "--attention", "linear", "--config", file, "--device", "cpu", "--no-train"
    )
    assert outcome.code == 0, outcome.stderr
    assert asked == [("auto", "cpu", 24, 40)]
