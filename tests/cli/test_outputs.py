"""Tests of outputs that cannot be written. The error comes before any work if possible; no other output is lost."""

from pathlib import Path

import pytest

from linformer_cli.bench import sample
from linformer_cli.sampling import decode

QUICK = ["--batch", 1, "--repeats", 1, "--no-memory", "--no-rerun"]
APPROXIMATION = ["bench", "approximation", "--features", 8, "--norms", 1, "--draws", 1, "--positions", 4]
COPY = ["bench", "copy", "--length", 8, "--width", 16, "--updates", 1, "--attention", "linear"]


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    """A path whose parent is a file, not a folder."""
    (tmp_path / "file").write_bytes(b"")
    return tmp_path / "file" / "deep" / "x.png"


@pytest.mark.parametrize(
    "command",
    [
        ["sample", "-n", 1, "-o"],
        ["sample", "-n", 1, "--gif"],
        ["sample", "-n", 1, "--files"],
        ["complete", __file__, "-o"],
        ["bench", "sample", "--plot"],
        ["bench", "train", "--plot"],
        ["bench", "attention", "--plot"],
        ["bench", "copy", "--plot"],
        ["bench", "approximation", "--plot"],
        ["bench", "paper", "--out"],
        ["bench", "gpu", "--out"],
    ],
    ids=lambda command: f"{command[0]}{command[-1]}" if command[0] != "bench" else command[1],
)
def test_an_unwritable_output_is_reported_before_any_work(lintx, blocked, tmp_path, monkeypatch, command) -> None:
    monkeypatch.chdir(tmp_path)
    place = blocked.with_suffix(".gif") if command[-1] == "--gif" else blocked
    # The model does not exist, so a command that opens the model first gives another error.
    model = {"sample": ["nothing"], "complete": ["--checkpoint", "nothing"]}.get(command[0], [])
    outcome = lintx(*command, place, *model)
    assert outcome.code == 1 and outcome.stdout == ""
    (line,) = outcome.stderr.splitlines()
    assert f"cannot write {blocked.parent}" in line and line.endswith("a part of the path is a file, not a folder")


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "sample", "--preset", "tiny", "--attention", "linear", *QUICK],
        ["bench", "train", "--preset", "tiny", "--attention", "linear", "--batch", 1, "--repeats", 1],
        ["bench", "attention", "--attention", "linear", "--positions", 16, "--batch", 1, "--repeats", 1],
        COPY,
        APPROXIMATION,
    ],
    ids=lambda command: command[1],
)
def test_a_plot_on_a_full_disk_does_not_lose_the_table(lintx, full_disk, tmp_path, command) -> None:
    outcome = lintx(*command, "--plot", tmp_path / "plot.png", "--json")
    assert outcome.code == 1 and "no space left on device" in outcome.stderr
    assert outcome.document["rows"]


def test_a_plot_on_a_full_disk_does_not_lose_bits_per_dim(lintx, run_folder, full_disk, tmp_path) -> None:
    command = ["eval", run_folder, "--limit", 2, "--plot", tmp_path / "plot.png"]
    for options, shown in (((), "bits/dim"), (("--json",), '"bits_per_dim"')):
        outcome = lintx(*command, *options)
        assert outcome.code == 1 and "no space left on device" in outcome.stderr
        assert shown in outcome.stdout


def test_runs_that_match_no_row_are_reported_before_any_work(lintx, run_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sample, "run_sampling_bench", None)
    plot = tmp_path / "bits.png"
    outcome = lintx("bench", "sample", "--preset", "tiny", "--runs", run_folder, "--bits-plot", plot, *QUICK)
    assert outcome.code == 2 and "no run in --runs has a model that would be timed" in outcome.stderr
    assert not plot.exists()


def test_two_plots_in_one_file_are_refused_before_any_work(lintx, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = lintx("bench", "sample", "--runs", "nothing", "--plot", "a.png", "--bits-plot", tmp_path / "a.png")
    assert outcome.code == 2 and outcome.stderr.startswith("Error: --plot and --bits-plot name the same file")


@pytest.mark.parametrize("command", [["sample"], ["sample", "--preset", "tiny"], ["train"]])
def test_a_misspelt_mechanism_is_reported_before_any_work(lintx, command) -> None:
    outcome = lintx("bench", *command, "--attention", "sofmax")
    assert outcome.code == 2
    (line,) = outcome.stderr.splitlines()
    assert "unknown attention 'sofmax'" in line and "softmax" in line


@pytest.mark.parametrize(
    "command", [["sample"], ["check"], ["bench", "copy"], ["bench", "approximation"]], ids=lambda command: command[-1]
)
def test_a_seed_beyond_64_bits_is_refused(lintx, monkeypatch, command) -> None:
    monkeypatch.setattr(decode, "Sampler", None)
    outcome = lintx(*command, "--seed", 2**63)
    assert outcome.code == 2 and "--seed" in outcome.stderr and "Traceback" not in outcome.stderr


@pytest.mark.parametrize("option", ["--length", "--width"])
def test_a_copy_task_of_size_zero_is_refused(lintx, option) -> None:
    outcome = lintx("bench", "copy", option, 0)
    assert outcome.code == 2 and option in outcome.stderr
