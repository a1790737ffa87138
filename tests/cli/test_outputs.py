"""Tests of outputs that cannot be written. The error comes before any work if possible; no other output is lost."""

from pathlib import Path

import pytest
from PIL import Image

from linformer_cli.bench import sample

QUICK = ["--batch", 1, "--repeats", 1, "--no-memory", "--no-rerun"]


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    """A path whose parent is a file, not a folder."""
    (tmp_path / "file").write_bytes(b"")
    return tmp_path / "file" / "deep" / "x.png"


@pytest.mark.parametrize(
    "command",
    [
        *(["sample", "-n", 1, option] for option in ("-o", "--gif", "--files")),
        ["complete", __file__, "-o"],
        *(["bench", name, "--plot"] for name in ("sample", "train", "attention", "copy", "approximation")),
        *(["bench", name, "--out"] for name in ("paper", "gpu")),
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


def test_a_plot_on_a_full_disk_does_not_lose_the_table(lintx, full_disk, tmp_path) -> None:
    """All benchmarks and `lintx compare` show their results in one function."""
    command = ["bench", "copy", "--length", 8, "--width", 16, "--updates", 1, "--attention", "linear"]
    outcome = lintx(*command, "--plot", tmp_path / "plot.png", "--json")
    assert outcome.code == 1 and "no space left on device" in outcome.stderr
    assert outcome.document["rows"]


def test_a_plot_on_a_full_disk_does_not_lose_bits_per_dim(lintx, run_folder, full_disk, tmp_path) -> None:
    command = ["eval", run_folder, "--limit", 2, "--plot", tmp_path / "plot.png"]
    for options, shown in (((), "bits/dim"), (("--json",), '"bits_per_dim"')):
        outcome = lintx(*command, *options)
        assert outcome.code == 1 and "no space left on device" in outcome.stderr
        assert shown in outcome.stdout


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["sample", "-o", "x", "--gif", "./x"], "two outputs have the path 'x'"),
        (["complete", "a.png", "-o", "x", "--gif", "x"], "two outputs have the path 'x'"),
        (["plot", "run", "-o", "x.png", "--samples", "x.png"], "two outputs have the path 'x.png'"),
        (["bench", "sample", "--plot", "x.png", "--bits-plot", "link.png"], "two outputs have the path 'link.png'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_two_outputs_with_one_path_are_refused(lintx, tmp_path, monkeypatch, command, said) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.png").symlink_to("x.png")
    Image.new("L", (8, 8)).save("a.png")
    outcome = lintx(*command)
    assert outcome.code == 2 and said in outcome.stderr and outcome.stderr.count("\n") == 1
    assert not (tmp_path / "x").exists() and not (tmp_path / "x.png").exists()


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="this system has no /dev/null")
def test_several_outputs_may_go_to_a_device(lintx, run_folder) -> None:
    assert lintx("sample", run_folder, "-n", 1, "-o", "/dev/null", "--gif", "/dev/null").code == 0


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (["sample", "--temperature", 0], 2, "--temperature must be above 0"),
        (["sample", "--top-p", 2], 2, "--top-p must be above 0 and at most 1, found 2"),
        (["sample", "--guidance", 1001], 2, "--guidance"),
        (["complete", "a.png", "--top-k", 0], 2, "--top-k must be at least 1"),
        (["complete", "a.png", "--guidance", -1], 2, "--guidance"),
        (["complete", "nosuch.png"], 1, "no image at 'nosuch.png'"),
        (["complete", "broken.png"], 1, "'broken.png' is not an image"),
        (["compress", "--data", "glyphs", "--tile", "-o", "x"], 2, "--tile and --class are for pictures"),
        (["compress", "--data", "glyphs", "--class", 1, "-o", "x"], 2, "--tile and --class are for pictures"),
        (["compress", "-", "a.png", "-", "-o", "x"], 2, "'-' is given twice"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else None,
)
def test_a_mistake_is_found_before_the_model_is_loaded(lintx, tmp_path, monkeypatch, command, code, said) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("L", (8, 8)).save("a.png")
    (tmp_path / "broken.png").write_text("not an image")
    monkeypatch.setattr("linformer_cli.checkpoint.load_weights", None)
    outcome = lintx(*command)
    assert outcome.code == code and said in outcome.stderr and outcome.stderr.count("\n") == 1


@pytest.mark.parametrize("out", [(), ("--out", "here/run")])
def test_a_run_in_an_unwritable_place_is_refused_before_the_images_are_loaded(lintx, tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("linformer_cli.cli.train.load_training_images", None)
    for name in ("runs", "here"):
        (tmp_path / name).write_bytes(b"")
    outcome = lintx("train", "--data", "glyphs", "--preset", "tiny", *out)
    assert outcome.code == 1 and "a part of the path is a file, not a folder" in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_runs_that_match_no_row_are_reported_before_any_work(lintx, run_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sample, "run_sampling_bench", None)
    plot = tmp_path / "bits.png"
    outcome = lintx("bench", "sample", "--preset", "tiny", "--runs", run_folder, "--bits-plot", plot, *QUICK)
    assert outcome.code == 2 and "no run in --runs has a model that would be timed" in outcome.stderr
    assert not plot.exists()
