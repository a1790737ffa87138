"""Tests of the benchmarks from the command line to their tables, files and JSON documents."""

import csv
import json
import os
import re
import signal

import pytest
from loops import loop_over
from machine import FASTEST_ENGINE

from linformer_cli import probe
from linformer_cli.attention.performer import PerformerAttention
from linformer_cli.system.device import Choice

pytestmark = pytest.mark.usefixtures("without_comparison")


@pytest.mark.smoke
def test_bench_sample_times_the_given_mechanisms(lintx, run_folder):
    base = ["bench", "sample", "--checkpoint", run_folder, "--attention", "softmax,linear,few=lsh:rounds=1"]
    base += ["--batch", 1, "--repeats", 1, "--no-memory", "--no-rerun", "--runs", run_folder]
    document = lintx(*base, "--json").document
    assert [(row["name"], row["engine"]) for row in document["rows"]] == [
        ("softmax", FASTEST_ENGINE),
        ("linear", FASTEST_ENGINE),
        ("few", FASTEST_ENGINE),
    ]
    assert document["rows"][2]["attention_options"]["rounds"] == 1
    # The run has linear attention, so the row of linear has the bits/dim of the run.
    bits = [row["bits_per_dim"] is not None for row in document["rows"]]
    assert bits == [False, True, False]
    assert document["rows"][1]["images_seen"] == 24
    table = lintx(*base).stdout
    assert "bits/dim" in table and "s/image" in table and "published" not in table
    lines = lintx(*base, "--format", "csv").stdout.splitlines()
    assert len(lines) == 4 and "bits_per_dim" in lines[0] and "published_images_per_second" in lines[0]


def test_bench_sample_times_presets_with_the_papers_figures(lintx):
    base = ["bench", "sample", "--preset", "mnist-paper", "--attention", "linear", "--batch", 1, "--repeats", 1]
    base += ["--limit", "0.01s", "--no-memory"]
    document = lintx(*base, "--json").document
    (row,) = document["rows"]
    assert row["preset"] == "mnist-paper" and row["published"]["images_per_second"] == 142.8
    assert row["extrapolated"]["of_positions"] == 784
    table = lintx(*base).stdout
    assert table.startswith("mnist-paper\n") and "142.8" in table and "extrapolated" in table


def test_bench_sample_compares_image_sizes(lintx):
    """The last table puts the sizes of a network next to each other."""
    base = ["bench", "sample", "--preset", "tiny,mnist-small", "--image-size", "4,6", "--batch", 1, "--repeats", 1]
    table = lintx(*base, "--attention", "linear,softmax", "--no-memory", "--no-rerun").stdout.split("\n\n")[-1]
    cells = [line.split() for line in table.splitlines()[2:]]
    assert [(*line[:2], line[4]) for line in cells] == [
        (preset, name, positions)
        for preset in ("tiny", "mnist-small")
        for name in ("linear", "softmax")
        for positions in ("16", "36")
    ]
    assert all(line[6] == "µs" for line in cells)


@pytest.mark.smoke
def test_bench_train_times_steps(lintx, run_folder):
    base = ["bench", "train", "--preset", "tiny", "--attention", "linear,softmax", "--batch", "1,2", "--repeats", 1]
    document = lintx(*base, "--json").document
    assert [(row["name"], row["batch"]) for row in document["rows"]] == [
        (name, batch) for batch in (1, 2) for name in ("linear", "softmax")
    ]
    assert all(len(row["samples_seconds"]) == 1 and row["images_per_second"] > 0 for row in document["rows"])
    outcome = lintx(*base, "--format", "md")
    assert outcome.stdout.startswith("| preset") and "bits/dim" in outcome.stdout
    assert "GFLOP/s" in outcome.stderr


@pytest.mark.parametrize("auto", ["fp32", "bf16"])
def test_bench_train_times_every_engine_in_every_precision(lintx, monkeypatch, auto):
    """auto is fp32 for the reference engine. Nothing is measured twice."""
    monkeypatch.setattr(probe, "choose_precision", lambda wanted, *_: Choice(auto if wanted == "auto" else wanted, ""))
    base = ["bench", "train", "--preset", "tiny", "--attention", "linear", "--batch", 1, "--repeats", 1]
    outcome = lintx(*base, "--engine", "reference,auto", "--precision", "auto,bf16", "--json")
    found = [(row["engine"] == "reference", row["precision"]) for row in outcome.document["rows"]]
    assert found == [(True, "fp32"), (True, "bf16"), *((False, kind) for kind in dict.fromkeys([auto, "bf16"]))]
    assert "linear (reference, bf16), batch 1: " in outcome.stderr


@pytest.fixture
def little_paper(monkeypatch, tiny_model_config):
    """Makes `bench paper` use tiny networks and sizes."""
    from linformer_cli.bench import attention, paper, sample
    from linformer_cli.bench.measure.peak_memory import PeakMemory
    from linformer_cli.bench.paper import Sizes
    from linformer_cli.bench.sequence_tasks import CopySettings

    monkeypatch.setattr(paper, "preset_network", lambda name: (name, tiny_model_config))
    monkeypatch.setattr(paper, "NETWORKS", ("mnist-paper",))
    monkeypatch.setattr(paper, "METHODS", ("linear", "softmax"))
    monkeypatch.setattr(paper, "choose_sizes", lambda seconds: Sizes((1, 2), 1, {}, lengths=(16, 32)))
    monkeypatch.setattr(paper, "CopySettings", lambda *size, device: CopySettings(8, 16, 2, device=device))
    monkeypatch.setattr(sample, "measure_peak", lambda build, setup, limit: PeakMemory(1000, 0.001))
    monkeypatch.setattr(attention, "measure_peak", lambda build, setup, limit: PeakMemory(9, 0.001))


@pytest.mark.smoke
@pytest.mark.slow
def test_bench_paper_writes_tables_and_figures(lintx, little_paper, tmp_path):
    out = tmp_path / "new" / "paper"
    outcome = lintx("bench", "paper", "--out", out, "--json")
    assert outcome.code == 0, outcome.stderr
    names = {path.name for path in out.iterdir()}
    assert names == {"paper.json", "paper.md"} | {
        f"{name}.{kind}" for name in ("images-per-second", "attention", "copy") for kind in ("png", "svg")
    }
    assert json.loads((out / "paper.json").read_text()) == outcome.document
    assert outcome.document["unfinished"] == []
    assert "142.8" in (out / "paper.md").read_text()
    shown = lintx("bench", "paper", "--out", out, "--format", "md")
    assert "\nExponents\n" in shown.stdout and "loss, nats per symbol" in shown.stdout
    assert f"wrote {out}" in shown.stderr and "reduced: " in shown.stderr
    assert lintx("bench", "paper", "--out", out, "--format", "csv").stdout.count("\n") == 1 + 2 * 3


@pytest.fixture
def little_memory(monkeypatch):
    """A pass takes a KiB per position, and only 64 positions fit."""
    from linformer_cli.bench import attention
    from linformer_cli.bench.measure.peak_memory import PassFailed, PeakMemory

    def measure(build, setup, limit_seconds):
        if setup.positions > 64:
            raise PassFailed("needs more memory than there is")
        return PeakMemory(2**10 * setup.positions * setup.batch, 0.01)

    monkeypatch.setattr(attention, "measure_peak", measure)
    monkeypatch.setenv("COLUMNS", "80")


ATTENTION = ["bench", "attention", "--attention", "softmax,fine=linear:chunk=16", "--repeats", 2]
ATTENTION += ["--positions", "64,32,128"]


@pytest.mark.smoke
def test_bench_attention_gives_points_and_exponents(lintx, little_memory, tmp_path):
    plot = tmp_path / "deep" / "scaling.svg"
    outcome = lintx(*ATTENTION, "--json", "--plot", plot)
    document = outcome.document
    found = [(row["name"], row["positions"]) for row in document["rows"]]
    assert found == [(name, length) for name in ("softmax", "fine") for length in (32, 64, 128)]
    for row in document["rows"]:
        if row["positions"] == 128:
            assert row["left_out"] == "needs more memory than there is" and row["peak_memory_bytes"] is None
            continue
        assert row["left_out"] is None and len(row["samples_seconds"]) == 2
        assert row["seconds_per_sequence"] > 0 and row["copy_share"] > 0
        assert row["batch"] == 65_536 // row["positions"]
    assert document["rows"][3]["attention_options"]["chunk"] == 16
    softmax, linear = document["exponents"]
    assert softmax["longest_positions"] == linear["longest_positions"] == 64 and linear[
        "memory_exponent_all"
    ] == pytest.approx(1)
    assert softmax["overtakes_softmax"] is None and linear["overtakes_softmax"] is not None
    assert document["environment"]["versions"]["torch"] and "resident" in document["settings"]["memory"]
    assert "fine, T = 64, batch 1024: " in outcome.stderr and document["plot"] == str(plot)
    text = plot.read_text()
    for words in ("time of a sequence (s)", "peak memory of a sequence (MiB)", "T (positions)", "32"):
        assert f"<!-- {words} -->" in text
    assert re.search(r"<!-- softmax \(-?\d+\.\d\d, 1\.00\) -->", text)  # the slopes of time and memory
    assert lintx(*ATTENTION, "--plot", "scaling.pdf").code == 2
    several = lintx(*ATTENTION, "--batch", "1,16")
    assert several.code == 2 and "--batch takes a whole number above 0, such as 16, or scaled" in several.stderr


@pytest.mark.parametrize("style", ["table", "md", "csv"])
def test_bench_attention_gives_the_reason_for_an_empty_row(lintx, little_memory, style):
    outcome = lintx(*ATTENTION, "--format", style)
    assert outcome.code == 0, outcome.stderr
    words = " ".join(outcome.stdout.replace("|", " ").split())
    assert "fine" in words and "needs more" in words
    assert max(map(len, outcome.stdout.splitlines())) <= 80 or style != "table"
    if style == "csv":
        rows = list(csv.DictReader(outcome.stdout.splitlines()))
        assert [(row["positions"], row["peak_memory_bytes"], row["repeats"]) for row in rows[1:3]] == [
            ("64", str(2**26), "2"),
            ("128", "", "0"),
        ]
        assert rows[0]["time_exponent_last_two"] == ""
    else:
        assert "64 KiB" in words and "Exponents" in words and "longest T" in words and "overtakes" in words


@pytest.mark.parametrize(
    ("command", "rows"),
    [
        (["sample", "--batch", "1,2", "--no-memory"], [1, 1, 1]),
        (["train", "--preset", "tiny", "--batch", "1,2"], [1, 1]),
        (["attention", "--attention", "linear", "--positions", "32,64", "--batch", "1"], [1]),
    ],
)
@pytest.mark.parametrize("shown", ["--json", "--format=md"])
def test_a_stopped_benchmark_shows_its_results(lintx, run_folder, monkeypatch, command, rows, shown):
    """Ctrl-C comes while the first group or length is reported."""
    seen = []

    def stop(row):
        if not seen:
            os.kill(os.getpid(), signal.SIGINT)
        seen.append(row)

    monkeypatch.setattr("linformer_cli.cli.reports.show_row", stop)
    where = ["--checkpoint", run_folder] if command[0] == "sample" else []
    outcome = lintx("bench", *command, *where, "--repeats", 1, shown)
    assert outcome.code == 130
    assert outcome.stderr.splitlines()[-1] == "Stopped; the results so far are shown"
    if shown == "--json":
        assert outcome.document["ended"] == "interrupted"
        assert [row["batch"] for row in outcome.document["rows"]] == rows
    else:
        table = outcome.stdout.partition("\n\n")[0]
        assert table.count("\n|") + table.startswith("|") == 2 + len(rows)


# Random features against softmax

APPROXIMATION = ["bench", "approximation", "--features", "8,16", "--norms", "0.5,1", "--draws", 3, "--positions", 12]
APPROXIMATION += ["--head-width", 4]


@pytest.mark.smoke
def test_bench_approximation_shows_one_of_four_errors(lintx, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    plot = tmp_path / "deep" / "errors.svg"
    document = lintx(*APPROXIMATION, "--plot", plot, "--error", "small-kernel", "--json").document
    assert len(document["rows"]) == 3 * 2 * 2 * 2 and document["plot"] == str(plot)
    assert {row["draws"] for row in document["rows"]} == {3} and document["settings"]["positions"] == 12
    assert "smallest quarter" in plot.read_text() and "norm 0.5 sqrt(K)" in plot.read_text()
    assert lintx(*APPROXIMATION, "--seed", 1, "--json").document["rows"] != document["rows"]
    rows = list(csv.DictReader(lintx(*APPROXIMATION, "--format", "csv").stdout.splitlines()))
    assert [(row["norm"], row["features"], row["feature_map"], row["directions"]) for row in rows[:3]] == [
        ("0.5", "8", "positive", "orthogonal"),
        ("0.5", "8", "positive", "independent"),
        ("0.5", "8", "hyperbolic", "orthogonal"),
    ]
    table = lintx(*APPROXIMATION).stdout
    assert max(map(len, table.splitlines())) <= 80 and f"{float(rows[0]['output_mean']):.2e}" in table


@pytest.mark.parametrize("last", [0, 2])
def test_bench_approximation_keeps_the_finished_draws_after_ctrl_c(lintx, monkeypatch, last):
    redraw = PerformerAttention.on_training_step

    def press(self, draw, seed):
        if draw == last:
            signal.raise_signal(signal.SIGINT)
        redraw(self, draw, seed)

    with monkeypatch.context() as patch:
        patch.setattr(PerformerAttention, "on_training_step", press)
        outcome = lintx(*APPROXIMATION, "--json")
    assert outcome.code == 130
    if last == 0:
        assert outcome.stdout == "" and outcome.stderr.endswith("Stopped before anything was measured\n")
        return
    assert outcome.stderr.splitlines()[-1] == "Stopped after 2 of 3 draws; their results are shown"
    two = lintx(*APPROXIMATION, "--draws", 2, "--json").document
    assert outcome.document["ended"] == "interrupted" and two["rows"] == outcome.document["rows"]


HUGE = 10**20


@loop_over(
    "command",
    [
        *(
            [*words.split(), f"--{option}", HUGE]
            for words, options in {
                "bench sample": "repeats",
                "bench sample --preset tiny": "image-size",
                "bench train": "repeats batch",
                "bench attention": "positions batch heads head-width repeats",
                "bench copy": "updates length width every seed",
                "bench approximation": "features draws positions head-width seed",
                "compare": "images evaluate-images batch repeats seed",
                "plot run --samples grids.png": "grids",
            }.items()
            for option in options.split()
        ),
        ["bench", "sample", "--batch", f"1,{HUGE}"],
        ["bench", "sample", "--limit", f"{HUGE}d"],
        ["bench", "paper", "--budget", f"{HUGE}d"],
    ],
)
def test_absurdly_large_numbers_are_refused_in_one_line(lintx, command):
    outcome = lintx(*command)
    assert outcome.code == 2 and str(HUGE) not in outcome.stdout
    assert len(outcome.stderr.splitlines()) == 1 and "Traceback" not in outcome.stderr
    assert command[-2].strip("-") in outcome.stderr or "a time can be at most 3650 days" in outcome.stderr


def test_bench_attention_leaves_out_heads_that_no_model_can_have(lintx):
    heads = ["--heads", 65_536, "--head-width", 65_536]
    outcome = lintx("bench", "attention", "--positions", 16, "--attention", "linear", *heads, "--json")
    assert outcome.code == 0
    (row,) = outcome.document["rows"]
    assert row["left_out"].startswith("65536 heads of 65536: width: ")
