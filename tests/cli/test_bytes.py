"""Tests of the commands with a model of bytes."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from cli.conftest import NoCapture, run_main
from commands import Command

from linformer_cli.data.byte_windows import ByteWindows

LENGTH = 48
NETWORK = ["--layers", 1, "--width", 16, "--heads", 2, "--head-width", 8, "--feed-forward", 16]
SIZES = ["--length", LENGTH, "--batch", 2, "--steps", 4, "--evaluate-images", 4, "--sample-images", 2]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes("".join(f"line {number}\n" for number in range(1_000)).encode())
    return path


@pytest.fixture(scope="module")
def run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "text"
    assert run_main(("train", "--data", f"bytes:{text}", *NETWORK, *SIZES, "--out", folder), NoCapture()).code == 0
    return folder


def test_training_uses_the_preset_for_bytes_and_speaks_of_windows(lintx, text, tmp_path) -> None:
    outcome = lintx("train", "--data", f"bytes:{text}", *NETWORK, *SIZES, "--out", tmp_path / "run")
    assert outcome.code == 0, outcome.stderr
    assert "166 training and 9 validation windows" in outcome.stderr
    assert "bits/byte over 4 windows" in outcome.stderr and "bits/dim" not in outcome.stderr
    settings = (tmp_path / "run" / "config.toml").read_text()
    assert 'preset = "bytes-small"' in settings and f"length = {LENGTH}" in settings
    assert (tmp_path / "run" / "samples" / "step-0000004.txt").read_text().startswith("--- 0 ---\n")
    assert "bits/byte over 4 windows" in (tmp_path / "run" / "last" / "README.md").read_text()
    resumed = lintx("train", "--resume", tmp_path / "run", "--length", 64)
    assert resumed.code == 2 and "drop --length" in resumed.stderr


def test_longer_windows_are_evaluated_by_position(lintx, run, tmp_path) -> None:
    outcome = lintx("eval", run, "--length", 4 * LENGTH, "--by-position", "--plot", tmp_path / "positions.svg")
    assert outcome.code == 0, outcome.stderr
    assert "bits/byte" in outcome.stdout and "bits/dim" not in outcome.stdout
    assert f"{4 * LENGTH} bytes each" in outcome.stdout and "128 to 191" in outcome.stdout
    assert b"bits/byte" in (tmp_path / "positions.svg").read_bytes()
    document = lintx("eval", run, "--against", run, "--length", 4 * LENGTH, "--json").document
    assert document["against"]["difference"] == 0
    parts = document["by_position"]
    total = sum((part["last"] - part["first"] + 1) * part["bits_per_dim"] for part in parts)
    assert total == pytest.approx(4 * LENGTH * document["bits_per_dim"])
    stepped = lintx("eval", run, "--length", 4 * LENGTH, "--engine", "reference", "--json").document
    assert stepped["bits_per_dim"] == pytest.approx(document["bits_per_dim"], abs=1e-4)


def test_text_is_raw_in_a_pipe_and_begins_with_the_prompt(raw_lintx, run, monkeypatch) -> None:
    once, again = (raw_lintx("sample", run, "-n", 3 * LENGTH, "--prompt", "line\udcff") for _ in range(2))
    assert once.code == 0, once.stderr
    assert once.stdout == again.stdout and len(once.stdout) == 5 + 3 * LENGTH
    assert once.stdout.startswith(b"line\xff")
    assert b"bytes/s" in once.stderr
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"line\xff")))
    assert raw_lintx("sample", run, "-n", 3 * LENGTH, "--prompt", "-").stdout == once.stdout
    assert (
        raw_lintx("sample", run, "-n", 3 * LENGTH, "--first", 1).stdout
        != raw_lintx("sample", run, "-n", 3 * LENGTH).stdout
    )


def test_text_can_be_a_json_document(raw_lintx, run) -> None:
    command = ("sample", run, "-n", 200, "--prompt", "line\udcff")
    raw, document = raw_lintx(*command).stdout, json.loads(raw_lintx(*command, "--json").stdout)
    assert document["text"] == raw.decode(errors="replace")
    assert (document["prompt_bytes"], document["bytes"], document["seed"]) == (5, 200, 0)
    assert "guidance" not in document  # of images with a class only
    assert document["bytes_per_second"] == document["bytes"] / document["seconds"] > 0


def test_a_comparison_has_texts(lintx, text, tmp_path) -> None:
    settings = tmp_path / "small.toml"
    settings.write_text("[model]\nlayers = 1\nwidth = 16\nheads = 2\nhead_width = 8\nfeed_forward = 16\n")
    sizes = ("--length", LENGTH, "--images", 32, "--evaluate-images", 4, "--repeats", 0, "--attention", "linear")
    command = ("compare", "--data", f"bytes:{text}", *sizes, "--config", settings, "--runs", tmp_path)
    (row,) = lintx(*command, "--json").document["rows"]
    assert row["samples"] == str(tmp_path / "linear.txt")
    samples = (tmp_path / "linear.txt").read_text()
    assert samples.startswith("checkpoint_sha256 ") and "\n--- 3 ---\n" in samples
    assert "linear.txt" not in lintx(*command).stderr


def test_text_is_safe_in_a_terminal(raw_lintx, run, monkeypatch) -> None:
    plain = raw_lintx("sample", run, "-n", 200, "--prompt", "a\x1b").stdout
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = raw_lintx("sample", run, "-n", 200, "--prompt", "a\x1b").stdout
    assert plain.startswith(b"a\x1b") and shown.startswith(b"a\\x1b")
    assert all(character.isprintable() or character in "\n\t" for character in shown.decode())


def test_text_without_end_stops_when_the_pipe_is_closed(run) -> None:
    with Command("sample", run, "--engine", "reference", "--precision", "fp32", "-q") as command:
        assert len(command.stdout.read(3 * LENGTH)) == 3 * LENGTH
        command.stdout.close()
        assert command.stderr.read() == b""
        assert command.wait() == 141


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        (("sample", "RUN", "-o", "x.png"), ("-o is for images",)),
        (("sample", "RUN", "-n", 5, "--guidance", 2), ("--guidance is for images",)),
        (("sample", "RUN", "--json"), ("limit the bytes with -n",)),
        (("complete", "x.png", "y.png", "--checkpoint", "RUN"), ("draws bytes, not images", "--prompt TEXT")),
        (("eval", "RUN", "--data", "glyphs"), ("predicts windows, and 'glyphs' has images",)),
        (("eval", "mnist-deep", "--data", "glyphs", "--length", 64), ("--length is for windows of bytes",)),
        (("sample", "mnist-deep", "--prompt", "text"), ("--prompt is for models of bytes",)),
        (("train", "--preset", "bytes-small"), ("--data bytes:PATH",)),
        (("train", "--data", "bytes:RUN/config.toml"), ("--length",)),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(lintx, run, monkeypatch, tmp_path, command, parts) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = lintx(*(str(word).replace("RUN", str(run)) for word in command))
    assert outcome.code in (1, 2)
    last = outcome.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: ") and any(part in last for part in parts), outcome.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_bytes_starts_a_run_with_its_own_length_only(lintx, run, text, tmp_path) -> None:
    outcome = lintx("train", "--init-from", run, "--data", f"bytes:{text}", "--length", 64, "--out", tmp_path / "run")
    assert outcome.code == 2 and outcome.stderr.rstrip().endswith("choose --data or --length to fit")


def test_eval_reads_windows_batch_by_batch(lintx, run, text, monkeypatch) -> None:
    read, counts = ByteWindows.__getitem__, []

    def count(windows: ByteWindows, index: slice) -> np.ndarray:
        found = read(windows, index)
        counts.append(len(found))
        return found

    monkeypatch.setattr(ByteWindows, "__getitem__", count)
    outcome = lintx("eval", run, "--data", f"bytes:{text}", "--split", "train", "--batch", 8)
    assert outcome.code == 0 and sum(counts) == 166 and max(counts) == 8
