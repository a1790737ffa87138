"""Tests of `lintx bench speech` from the command line to tables and files."""

import csv
import json
import sys

import pytest
import soundfile
import torch
from cli.conftest import NoCapture, run_main

from linformer_cli.speech.encoder import PRESETS, EncoderSettings

TINY = EncoderSettings(layers=1, heads=2, width=16, stack=3, lstm_layers=1, lstm_cells=8)


SIZES = ["--seeds", 1, "--epochs", 2, "--budget", "10m", "--lengths", "none"]


@pytest.fixture(scope="module", autouse=True)
def tiny_encoders():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "small", TINY)
        yield


@pytest.fixture(scope="module")
def tones(tmp_path_factory):
    """A folder for `speech:DIR`: two speakers say a and b, which are tones."""
    folder = tmp_path_factory.mktemp("tones")
    lines = []
    for speaker in ("ann", "bob"):
        for number, text in enumerate(("a b", "b", "b a")):
            parts = [torch.sin(torch.arange(1_600) * (0.3 if one == "a" else 1.1)) for one in text.split()]
            name = f"{speaker}{number}.wav"
            soundfile.write(str(folder / name), torch.cat(parts).numpy(), 8_000)
            lines.append(f"{name}\t{speaker}\t{text}\n")
    (folder / "transcripts.tsv").write_text("".join(lines))
    return folder


@pytest.fixture
def command(lintx, tones, tmp_path):
    """Provides `command(*arguments)`: the benchmark with tiny encoders, one seed and two epochs."""

    def run(*arguments):
        data = f"speech:{tones}"
        base = ["bench", "speech", "--data", data, "--attention", "softmax,linear", *SIZES, "--out", tmp_path / "out"]
        return lintx(*base, *arguments)

    return run


@pytest.fixture(scope="module")
def trained(tones, tmp_path_factory, tiny_encoders):
    """A folder with two trained encoders."""
    out = tmp_path_factory.mktemp("trained")
    base = ["bench", "speech", "--data", f"speech:{tones}", "--attention", "lsh:rounds=1,mine=linear", *SIZES]
    assert run_main((*base, "--out", out), NoCapture()).code == 0
    return out


def test_the_table_is_printed_and_all_files_are_written(command, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    plot = tmp_path / "curves.svg"
    outcome = command("--plot", plot)
    assert outcome.code == 0, outcome.stderr
    assert "not WSJ" in outcome.stdout.splitlines()[0]
    assert "published" in outcome.stdout and "In the paper: 8.08% and 5.12%" in outcome.stdout
    assert max(map(len, outcome.stdout.splitlines()[:20])) <= 80
    assert "reduced: encoder: 1 layers" in outcome.stderr and "epoch 2: PER softmax " in outcome.stderr
    out = tmp_path / "out"
    assert plot.read_bytes().startswith(b"<?xml")
    assert {file.name for file in out.iterdir()} == {
        *("speech.json", "speech.md", "curves.png", "curves.svg"),
    }
    document = json.loads((out / "speech.json").read_text())
    assert [row["name"] for row in document["rows"]] == ["softmax", "linear"] and document["ended"] == "finished"
    assert document["rows"][1]["published"]["error_rate"] == 0.0808
    assert "not WSJ" in (out / "speech.md").read_text().splitlines()[0]


@pytest.mark.smoke
def test_csv_has_every_point(command):
    outcome = command("--format", "csv")
    rows = list(csv.DictReader(outcome.stdout.splitlines()))
    assert [(row["name"], row["epoch"]) for row in rows] == [
        (name, epoch) for name in ("softmax", "linear") for epoch in "12"
    ]
    assert all("not WSJ" in row["title"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--attention", "rfa:gate=true"], 2, "'rfa' with these options has no bidirectional form"),
        (["--data", "wsj"], 2, "unknown speech data 'wsj'"),
        (["--data", "speech:/nowhere"], 1, "cannot read '/nowhere/transcripts.tsv'"),
        (["--budget", "soon"], 2, "'soon' is not a time"),
        (["--plot", "curves.pdf"], 2, "a plot is a PNG or an SVG"),
    ],
)
def test_a_mistake_gets_one_line(lintx, tmp_path, arguments, code, message):
    outcome = lintx("bench", "speech", "--out", tmp_path / "out", *arguments)
    assert (outcome.code, outcome.stdout) == (code, "")
    assert message in outcome.stderr and len(outcome.stderr.splitlines()) == 1


def test_a_recording_with_too_many_symbols_is_named_before_training(lintx, tmp_path):
    folder = tmp_path / "short"
    folder.mkdir()
    soundfile.write(str(folder / "a.wav"), torch.sin(torch.arange(400)).numpy(), 8_000)
    (folder / "transcripts.tsv").write_text("a.wav\tann\ta b c\na.wav\tbob\ta\n")
    outcome = lintx("bench", "speech", "--data", f"speech:{folder}", "--out", tmp_path / "out")
    assert outcome.code == 1
    assert outcome.stderr.splitlines()[-1].startswith("Error: 'a.wav' has 3 symbols, which need 3 positions of 30 ms")


def test_a_missing_package_says_how_to_install_it(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "jiwer", None)
    outcome = command()
    assert outcome.code == 1
    assert "jiwer does not load" in outcome.stderr and "pip install '.[speech]'" in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1
