"""Tests of the commands with a model whose class is optional: every command works without a class."""

import io
import math
from pathlib import Path

import numpy as np
import pytest
from machine import HAS_LIBRARY
from PIL import Image

from linformer_cli.checkpoint import read_checkpoint
from linformer_cli.config import CLASS_GUIDANCE
from linformer_cli.report.grids import read_png_metadata

SMALL = ("--preset", "tiny", "--steps", "3", "--batch", "4", "--sample-every", "0", "--learning-rate", "0.01")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs") / "optional"


@pytest.fixture
def run(labelled, place, lintx) -> Path:
    if not place.exists():
        outcome = lintx(
            "train", "--data", f"array:{labelled}", "--classes", "--hide-class", 0.5, *SMALL, "--out", place
        )
        assert outcome.code == 0, outcome.stderr
        assert "3 classes, hidden for 0.5 of the training images" in outcome.stderr
        assert "to compare with an unconditional model" not in outcome.stderr
    return place


def test_a_run_records_that_the_class_is_optional(run, labelled, lintx, tmp_path) -> None:
    info = read_checkpoint(run).info
    assert (info.model.classes, info.model.optional_class, info.training.settings.hide_class) == (3, True, 0.5)
    card = (run / "best" / "README.md").read_text(encoding="utf-8")
    assert "conditional on one of 3 classes or on none" in card and "given the class" not in card
    shown = lintx("info", run).stdout
    assert "3, optional" in shown and "given the class" not in shown
    assert lintx("check", run).code == 0
    assert lintx("train", "--resume", run, "--steps", 4).code == 0
    # A new run from this one hides classes, too.
    for begin in (("--config", run / "config.toml"), ("--init-from", run, "--data", f"array:{labelled}")):
        command = ("train", *begin, "--out", tmp_path / "again", "--dry-run", "--json")
        config = lintx(*command).document["config"]
        assert config["model"]["optional_class"] and config["train"]["hide_class"] == 0.5
        config = lintx(*command, "--hide-class", 0).document["config"]
        assert config["model"]["classes"] == 3 and not config["model"]["optional_class"]
        plain = lintx(*command, "--no-classes", "--hide-class", 0).document["config"]["model"]
        assert plain["classes"] == 0 and not plain["optional_class"]
    without = lintx("train", "--init-from", run, "--no-classes", "--dry-run", "--json").document["config"]
    assert without["train"]["hide_class"] == 0


def test_hidden_classes_need_classes(labelled, lintx, tmp_path) -> None:
    np.save(tmp_path / "train-images.npy", np.load(labelled / "train-images.npy"))
    for name, classes, said in (
        (labelled, (), "give --classes"),
        (tmp_path, ("--classes",), "--classes needs images with labels"),
    ):
        command = ("train", "--data", f"array:{name}", *classes, "--hide-class", 0.1, *SMALL, "--out", tmp_path / "run")
        outcome = lintx(*command)
        assert outcome.code == 2 and said in outcome.stderr and outcome.stderr.count("Error") == 1
    for share in (1, -0.1):
        assert lintx("train", "--data", f"array:{labelled}", "--classes", f"--hide-class={share}").code == 2
    assert not (tmp_path / "run").exists()


def decode(png: bytes) -> bytes:
    return Image.open(io.BytesIO(png)).tobytes()


def test_sample_draws_without_a_class_or_with_one(run, lintx, tmp_path) -> None:
    def draw(*options):
        files = tmp_path / "-".join(map(str, options))
        outcome = lintx("sample", run, *options, "-o", tmp_path / "grid.png", "--files", files, "--no-preview")
        assert outcome.code == 0, outcome.stderr
        paths = sorted(files.iterdir())
        return [read_png_metadata(path)["class"] for path in paths], [path.read_bytes() for path in paths], outcome

    found, images, outcome = draw("-n", 3)
    assert found == [None] * 3 and "images without a class; select with --class" in outcome.stderr
    of_one, other, outcome = draw("-n", 3, "--class", 1)
    assert of_one == [1] * 3 and other != images and f"with --guidance {CLASS_GUIDANCE}" in outcome.stderr
    assert draw("-n", 1, "--class", "all")[0] == [0, 1, 2]
    assert draw("-n", 3, "--class", 1, "--guidance", CLASS_GUIDANCE)[1] == other
    for guidance in (1, 9):
        of_one, weighted, outcome = draw("-n", 3, "--class", 1, "--guidance", guidance)
        assert of_one == [1] * 3 and list(map(decode, weighted)) != list(map(decode, other))
        assert "with --guidance" not in outcome.stderr
    refused = lintx("sample", run, "--guidance", 3, "-o", tmp_path / "no.png")
    assert refused.code == 2 and "choose a class with --class" in refused.stderr
    assert not (tmp_path / "no.png").exists()


def test_eval_measures_without_the_class_or_given_the_class(run, labelled, lintx) -> None:
    arguments = ("eval", run, "--split", "test")
    without, given = (lintx(*arguments, *extra, "--json").document for extra in ((), ("--given-class",)))
    assert (without["classes"], without["given_class"], without["bits_per_dim_with_class"]) == (3, False, None)
    assert (given["classes"], given["given_class"]) == (3, True)
    assert given["bits_per_dim"] != without["bits_per_dim"]
    assert given["bits_per_dim_with_class"] - given["bits_per_dim"] == pytest.approx(math.log2(3) / 36)
    stepped = lintx(*arguments, "--engine", "reference", "--json").document
    assert stepped["bits_per_dim"] == pytest.approx(without["bits_per_dim"], abs=1e-4)
    for extra in ((), ("--given-class",)):
        assert lintx(*arguments, *extra, "--against", run, "--json").document["against"]["difference"] == 0
    assert "given the class" not in lintx(*arguments).stdout
    assert "given the class" in lintx(*arguments, "--given-class").stdout


def test_eval_without_the_class_needs_no_labels(run, labelled, lintx, tmp_path) -> None:
    np.save(tmp_path / "test-images.npy", np.load(labelled / "test-images.npy"))
    arguments = ("eval", run, "--split", "test", "--data", f"array:{tmp_path}")
    assert lintx(*arguments).code == 0
    outcome = lintx(*arguments, "--given-class")
    assert outcome.code == 1 and "has no labels" in outcome.stderr


def test_eval_finds_faults_of_the_second_model_before_any_measurement(
    run, labelled, lintx, tmp_path, monkeypatch
) -> None:
    options = ("--data", f"array:{labelled}", "--classes", *SMALL)
    assert lintx("train", *options, "--out", tmp_path / "classes").code == 0
    np.save(tmp_path / "test-images.npy", np.load(labelled / "test-images.npy"))
    monkeypatch.setattr("linformer_cli.evaluation.bits.measure_nats", None)
    arguments = ("eval", run, "--split", "test", "--data", f"array:{tmp_path}", "--against")
    outcome = lintx(*arguments, tmp_path / "classes")
    assert outcome.code == 1 and "has no labels" in outcome.stderr and "Traceback" not in outcome.stderr
    monkeypatch.setattr("linformer_cli.data.images.load_images", None)
    outcome = lintx(*arguments, "mnist-depe")
    assert outcome.code == 2 and "did you mean 'mnist-deep'?" in outcome.stderr


def test_a_model_without_classes_cannot_be_given_the_class(run_folder, lintx) -> None:
    outcome = lintx("eval", run_folder, "--given-class")
    assert outcome.code == 2 and "drop --given-class" in outcome.stderr


def test_complete_takes_a_class_or_none(run, lintx, tmp_path) -> None:
    picture = tmp_path / "picture.png"
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (6, 6), dtype=np.uint8)).save(picture)
    command = ("complete", picture, "--checkpoint", run, "-n", 2, "-o", tmp_path / "out.png", "--json")
    outcomes = lintx(*command), lintx(*command, "--class", 2)
    assert [f"with --guidance {CLASS_GUIDANCE}" in outcome.stderr for outcome in outcomes] == [False, True]
    without, given = (outcome.document for outcome in outcomes)
    assert (without["class"], given["class"]) == (None, 2)
    rests = [document["rows"][0]["original_rest_bits_per_dim"] for document in (without, given)]
    assert rests[0] != rests[1]
    assert lintx(*command, "--class", "0,1").code == 2
    guided = lintx(*command, "--class", 2, "--guidance", 9).document
    assert [document["guidance"] for document in (without, given, guided)] == [1, CLASS_GUIDANCE, 9]
    completed = [document["rows"][0]["completed_bits_per_dim"] for document in (given, guided)]
    assert completed[0] != completed[1]
    assert guided["rows"][0]["original_rest_bits_per_dim"] == rests[1]
    (tmp_path / "out.png").unlink()
    refused = lintx(*command, "--guidance", 2)
    assert refused.code == 2 and "choose a class with --class" in refused.stderr
    assert not (tmp_path / "out.png").exists()


@pytest.mark.skipif(not HAS_LIBRARY, reason="compressed files need the library")
def test_compressed_files_need_no_class(run, labelled, lintx, tmp_path) -> None:
    pytest.importorskip("constriction")
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    images = np.load(labelled / "test-images.npy")[:3]
    for index, image in enumerate(images):
        Image.fromarray(image).save(pictures / f"{index:05d}.png")
    chosen = ("--data", f"array:{labelled}", "--split", "test", "--limit", 3)
    bits = lintx("eval", run, *chosen, "--precision", "int8", "--engine", "native", "--json").document["bits_per_dim"]
    for source in ((pictures,), chosen):
        out = tmp_path / str(len(source))
        command = ("compress", *source, "-o", tmp_path / "x.lintx", "--checkpoint", run, "--force", "--json")
        assert lintx(*command).document["model_bits_per_dim"] == pytest.approx(bits, abs=1e-5)
        assert lintx("decompress", tmp_path / "x.lintx", "-o", out, "--checkpoint", run).code == 0
        found = np.stack([np.asarray(Image.open(path)) for path in sorted(out.iterdir())])
        np.testing.assert_array_equal(found, images)
    outcome = lintx("compress", pictures, "-o", tmp_path / "y.lintx", "--checkpoint", run, "--class", 1)
    assert outcome.code == 2 and "drop --class" in outcome.stderr
