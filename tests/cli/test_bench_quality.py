"""Tests of `lintx bench quality` from the command line to its tables, picture and JSON document."""

import csv

import numpy as np
import pytest
from PIL import Image

from linformer_cli.bench import quality
from linformer_cli.bench.quality import JudgeRecipe

TINY = JudgeRecipe(channels=4, features=8, updates=20, batch=16)
SMALL = ("--preset", "tiny", "--steps", "3", "--batch", "4", "--sample-every", "0")
KEYS = {"data", "count", "seed", "batch", "guidance", "temperature", "top_k", "top_p", "image", "rows", "classes"} | {
    *("checkpoint", "checkpoint_sha256", "attention", "precision", "device", "engine"),
    *("judge_accuracy", "judge_sha256", "test_images", "settings", "environment"),
}


@pytest.fixture(autouse=True)
def tiny_judge(monkeypatch, tmp_path):
    monkeypatch.setattr(quality, "RECIPE", TINY)
    monkeypatch.setenv("LINTX_CACHE", str(tmp_path / "cache"))


def save_images(folder, side: int = 6, classes: int = 3, count: int = 40, labels: bool = True) -> str:
    """Save random images of `classes` classes and return the name of the data set."""
    folder.mkdir(exist_ok=True)
    for seed, part in enumerate(("train", "test")):
        random = np.random.default_rng(seed)
        np.save(folder / f"{part}-images.npy", random.integers(0, 256, (count, side, side), dtype=np.uint8))
        if labels:
            np.save(folder / f"{part}-labels.npy", np.arange(count) % classes)
    return f"array:{folder}"


@pytest.mark.smoke
def test_glyphs_from_the_model_to_the_picture(lintx, run_folder, tmp_path) -> None:
    picture = tmp_path / "new" / "nearest.png"
    base = ("bench", "quality", run_folder, "-n", 30, "--seed", 3)
    outcome = lintx(*base, "--image", picture, "--json")
    assert outcome.code == 0, outcome.stderr
    document = outcome.document
    assert set(document) == KEYS
    assert (document["data"], document["count"], document["settings"]["features"]) == ("glyphs", 30, 8)
    assert [(row["name"], row["images"]) for row in document["rows"]] == [
        ("samples", 30),
        ("test images", 30),
        ("training images", 30),
    ]
    samples, tested, trained = document["rows"]
    assert samples["bits_per_dim"] > 0 and samples["class_share"] is None and document["classes"] == []
    assert samples["frechet_distance"] > trained["frechet_distance"] > 0 and tested["frechet_distance"] is None
    assert 0 < samples["smallest_distance"] <= samples["nearest_distance"] and trained["nearest_distance"] is None
    with Image.open(picture) as drawn:
        across, down = drawn.size
        assert across == 12 * 10 * 5 + 11 * 2 and down > 4 * 10 * 5
    shown = lintx(*base, "--format", "csv")
    rows = list(csv.DictReader(shown.stdout.splitlines()))
    assert float(rows[0]["frechet_distance"]) == samples["frechet_distance"]  # the same images, and the same judge
    assert "right on all 1,000 test images" not in shown.stdout


def test_a_model_with_classes_draws_every_class(lintx, tmp_path, monkeypatch) -> None:
    data, run = save_images(tmp_path / "data"), tmp_path / "run"
    assert lintx("train", "--data", data, "--classes", *SMALL, "--out", run).code == 0
    base = ("bench", "quality", run, "-n", 32)
    document = lintx(*base, "--json").document
    assert document["count"] == 30 and [row["samples"] for row in document["classes"]] == [10, 10, 10]
    recognised = sum(row["recognised"] for row in document["classes"])
    assert document["rows"][0]["class_share"] == pytest.approx(recognised / 30)
    outcome = lintx(*base, "--format", "md")
    assert "right class" in outcome.stdout and "| class" in outcome.stdout
    assert "right on all 40 test images" in outcome.stderr
    monkeypatch.setattr(quality, "load_judge", None)  # mistakes are reported before any work
    (bare := tmp_path / "part").mkdir()
    unlabelled = save_images(bare)
    (bare / "test-labels.npy").unlink()
    for other, said in (
        (unlabelled, "the judge needs the class of each image"),
        (save_images(tmp_path / "more", classes=4), "the model has 3 classes"),
        (save_images(tmp_path / "larger", side=8), "images of the model's size"),
        (save_images(tmp_path / "few", count=8), "more than 8 are needed"),
        (save_images(tmp_path / "bare", labels=False), "the judge needs the class of each image"),
    ):
        refused = lintx("bench", "quality", run, "--data", other)
        assert refused.code in (1, 2) and said in refused.stderr and refused.stderr.count("Error") <= 1
    few = lintx("bench", "quality", run, "-n", 8)
    assert few.code == 2 and "increase --count" in few.stderr
    (tmp_path / "text").write_bytes(bytes(range(256)) * 8)
    run = tmp_path / "bytes"
    assert lintx("train", "--data", f"bytes:{tmp_path / 'text'}", "--length", 16, *SMALL, "--out", run).code == 0
    outcome = lintx("bench", "quality", run)
    assert outcome.code == 2 and "models of images" in outcome.stderr


def test_guidance_changes_the_samples(lintx, tmp_path, run_folder, monkeypatch) -> None:
    data, run = save_images(tmp_path / "data"), tmp_path / "run"
    assert lintx("train", "--data", data, "--classes", "--hide-class", 0.5, *SMALL, "--out", run).code == 0
    plain, same, guided = (
        lintx("bench", "quality", run, "-n", 30, *extra, "--json").document
        for extra in ((), ("--guidance", 1), ("--guidance", 9))
    )
    assert (same["guidance"], guided["guidance"]) == (1, 9)
    assert plain["rows"] == same["rows"] and plain["rows"][0] != guided["rows"][0]
    # It is refused before a judge is trained, which can take minutes.
    monkeypatch.setattr(quality, "load_judge", None)
    refused = lintx("bench", "quality", run_folder, "--guidance", 2)
    assert refused.code == 2 and "trained with --hide-class" in refused.stderr
