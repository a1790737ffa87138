"""Tests of options of `lintx train`, from the command line to the saved run."""

import math
import sys
import tomllib

import numpy as np
import pytest
import tomli_w
from loops import loop_over
from PIL import Image

from linformer_cli import probe
from linformer_cli.checkpoint import read_checkpoint
from linformer_cli.report.grids import read_png_metadata
from linformer_cli.system.device import Choice

SMALL = ("--data", "glyphs", "--image-size", "10", "--preset", "tiny", "--steps", "2", "--batch", "4")


def test_muon_and_shift_are_saved_with_the_run(lintx, tmp_path):
    run = tmp_path / "run"
    assert lintx("train", *SMALL, "--optimizer", "muon", "--shift", 2, "--out", run).code == 0
    settings = read_checkpoint(run).info.training.settings
    assert (settings.optimizer, settings.shift) == ("muon", 2)
    resumed = lintx("train", "--resume", run, "--steps", 3)
    assert resumed.code == 0 and "finished step 3" in resumed.stderr
    refused = lintx("train", "--resume", run, "--shift", 1)
    assert refused.code == 2 and "drop --shift" in refused.stderr


def test_a_run_is_saved_in_runs_by_default(lintx, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tried = lintx("train", *SMALL, "--dry-run", "--graph", "--device", "cpu")
    assert tried.code == 0 and "CUDA device, found device cpu; training without a graph" in tried.stderr
    assert lintx("train", *SMALL, "--shift", 10).code == 2
    assert list(tmp_path.iterdir()) == []
    outcome = lintx("train", *SMALL, "--json")
    (run,) = (tmp_path / "runs").iterdir()
    assert outcome.document["run"] == f"runs/{run.name}" and run.name.endswith("-tiny")
    assert f"training in runs/{run.name} from step 0" in outcome.stderr
    assert read_checkpoint(run / "last").info.training.step == 2


def test_a_resumed_run_keeps_its_precision(lintx, tmp_path, monkeypatch):
    run = tmp_path / "run"

    def resolve(auto):
        monkeypatch.setattr(
            probe, "choose_precision", lambda wanted, *_: Choice(auto if wanted == "auto" else wanted, "")
        )

    def found():
        written = tomllib.loads((run / "config.toml").read_text())["train"]
        saved = read_checkpoint(run / "last").info.training.settings
        assert (written["precision"], written["device"]) == (saved.precision, saved.device)
        return saved.precision, saved.device

    resolve("bf16")
    assert lintx("train", *SMALL, "--out", run).code == 0
    assert found() == ("bf16", "auto")
    resolve("fp32")  # as another machine might choose
    assert lintx("train", "--resume", run, "--steps", 3, "--json").document["precision"] == "bf16"
    assert found() == ("bf16", "auto")
    assert lintx("train", "--resume", run, "--steps", 4, "--precision", "fp32").code == 0
    assert found() == ("fp32", "auto")


# Classes


@pytest.fixture(scope="module")
def conditional(labelled, tmp_path_factory):
    """Data with three classes, the folder of a conditional run, and the command that trains the run."""
    data, run = labelled, tmp_path_factory.mktemp("runs") / "conditional"
    arguments = ("--preset", "tiny", "--steps", "3", "--batch", "4", "--sample-every", "0", "--learning-rate", "0.01")
    config = {"model": {"attention": "linear"}, "data": {"name": f"array:{data}"}, "train": {}}
    file = run.parent / "given.toml"
    file.write_text(tomli_w.dumps(config), encoding="utf-8")
    return data, run, ("train", "--config", file, "--classes", *arguments)


@pytest.fixture
def conditional_run(conditional, lintx):
    data, run, arguments = conditional
    if not run.exists():
        outcome = lintx(*arguments, "--out", run)
        assert outcome.code == 0, outcome.stderr
        assert "conditioned on 3 classes: " in outcome.stderr and "add 0.0440 to compare" in outcome.stderr
    return data, run


def test_a_run_keeps_its_classes(conditional_run, lintx, tmp_path):
    data, run = conditional_run
    assert read_checkpoint(run).info.model.classes == 3
    assert "conditional on one of 3 classes" in (run / "best" / "README.md").read_text(encoding="utf-8")
    assert "3, the model is conditional" in lintx("info", run).stdout
    assert lintx("train", "--resume", run, "--steps", 4).code == 0
    refused = lintx("train", "--resume", run, "--no-classes")
    assert refused.code == 2 and "drop --classes" in refused.stderr
    # Without --classes, a new run takes the classes from config.toml or from the --init-from model.
    for begin in (("--config", run / "config.toml"), ("--init-from", run, "--data", f"array:{data}")):
        document = lintx("train", *begin, "--out", tmp_path / "again", "--dry-run", "--json").document
        assert document["config"]["model"]["classes"] == 3 and document["config"]["data"]["labels"]
        document = lintx("train", *begin, "--no-classes", "--out", tmp_path / "again", "--dry-run", "--json").document
        assert document["config"]["model"]["classes"] == 0
    assert lintx("check", run).code == 0


def test_sample_draws_the_requested_classes(conditional_run, lintx, tmp_path):
    _, run = conditional_run

    def draw(*options):
        files = tmp_path / "-".join(map(str, options))
        outcome = lintx("sample", run, *options, "-o", tmp_path / "grid.png", "--files", files, "--no-preview")
        assert outcome.code == 0, outcome.stderr
        found = [read_png_metadata(path)["class"] for path in sorted(files.iterdir())]
        with Image.open(tmp_path / "grid.png") as grid:
            return found, grid.size

    assert draw("-n", 4)[0] == [0, 1, 2, 0]
    assert draw("-n", 2, "--class", 1)[0] == [1, 1]
    several, size = draw("-n", 2, "--class", "2,0")
    assert several == [2, 2, 0, 0]
    rows, tall = draw("-n", 2, "--class", "all")
    assert rows == [0, 0, 1, 1, 2, 2]
    assert tall[0] == size[0] and tall[1] > size[1]  # one row per class
    assert read_png_metadata(tmp_path / "grid.png")["class"] == "all"


@pytest.mark.parametrize("wanted", ["3", "-1", "0,7", "cat", "", "1,"])
def test_a_class_that_does_not_exist_is_refused(conditional_run, lintx, tmp_path, wanted):
    _, run = conditional_run
    outcome = lintx("sample", run, f"--class={wanted}", "-o", tmp_path / "grid.png")
    assert outcome.code == 2 and "--class takes 'all' or classes from 0 to 2" in outcome.stderr
    assert outcome.stderr.strip().splitlines()[-1].startswith("Error: ")


def test_a_model_without_classes_refuses_a_class(run_folder, lintx, tmp_path):
    picture = tmp_path / "picture.png"
    Image.new("L", (10, 10)).save(picture)
    for arguments in (("sample", run_folder), ("complete", picture, "--checkpoint", run_folder)):
        outcome = lintx(*arguments, "--class", 0, "-o", tmp_path / "out.png")
        assert outcome.code == 2 and "was trained without --classes; drop --class 0" in outcome.stderr
    assert not (tmp_path / "out.png").exists()


def test_complete_needs_exactly_one_class(conditional_run, lintx, tmp_path):
    _, run = conditional_run
    picture = tmp_path / "picture.png"
    Image.new("L", (6, 6)).save(picture)
    arguments = ("complete", picture, "--checkpoint", run, "-n", 1, "-o", tmp_path / "out.png")
    for wrong in ((), ("--class", "all"), ("--class", "0,1")):
        outcome = lintx(*arguments, *wrong)
        assert outcome.code == 2 and "name the class of the images, 0 to 2, with --class" in outcome.stderr
    assert "from 0 to 2" in lintx(*arguments, "--class", 3).stderr
    assert lintx(*arguments, "--class", 2, "--json").document["class"] == 2
    assert read_png_metadata(tmp_path / "out.png")["class"] == 2


def test_eval_adds_the_bits_of_the_class(conditional_run, lintx, tmp_path):
    data, run = conditional_run
    arguments = ("eval", run, "--split", "test")
    document = lintx(*arguments, "--json").document
    assert document["classes"] == 3
    added = document["bits_per_dim_with_class"] - document["bits_per_dim"]
    assert added == pytest.approx(math.log2(3) / 36)
    itself = lintx(*arguments, "--against", run, "--json").document["against"]
    assert (itself["difference"], itself["difference_standard_error"]) == (0, 0)
    plain = tmp_path / "plain"
    assert (
        lintx("train", "--init-from", run, "--data", f"array:{data}", "--no-classes", "--steps", 1, "--out", plain).code
        == 0
    )
    found = lintx("eval", plain, *arguments[2:], "--against", run, "--json").document
    assert found["against"]["difference"] == pytest.approx(found["bits_per_dim"] - document["bits_per_dim_with_class"])
    stepped = lintx(*arguments, "--engine", "reference", "--json").document
    assert stepped["bits_per_dim"] == pytest.approx(document["bits_per_dim"], abs=1e-4)
    shown = lintx(*arguments).stdout
    assert "(every value, given the class)" in shown
    assert f"{document['bits_per_dim_with_class']:.4f} +-" in shown and "log2(3)/36 added" in shown
    # Other labels give different bits. Invalid or missing labels give an error.
    for labels, code, said in (
        (np.full(30, 2), 0, ""),
        (np.full(30, 3), 1, "has labels 3 to 3; the model has classes 0 to 2"),
        (None, 1, "has no labels"),
    ):
        np.save(tmp_path / "test-images.npy", np.load(data / "test-images.npy"))
        (tmp_path / "test-labels.npy").unlink(missing_ok=True)
        if labels is not None:
            np.save(tmp_path / "test-labels.npy", labels)
        outcome = lintx(*arguments, "--data", f"array:{tmp_path}", "--json")
        assert outcome.code == code and said in outcome.stderr
        if code == 0:
            assert outcome.document["bits_per_dim"] != document["bits_per_dim"]


def test_training_with_classes_needs_labels(conditional_run, lintx, tmp_path):
    data, _ = conditional_run
    np.save(tmp_path / "train-images.npy", np.load(data / "train-images.npy"))
    outcome = lintx("train", "--data", f"array:{tmp_path}", "--classes", "--steps", 1, "--out", tmp_path / "run")
    assert outcome.code == 2 and "--classes needs images with labels" in outcome.stderr
    assert not (tmp_path / "run").exists()
    # Without classes, images need no labels.
    assert lintx("train", "--data", f"array:{tmp_path}", *SMALL[4:], "--out", tmp_path / "run").code == 0


def draw_icons(folder, count, classes=("a", "b")):
    random = np.random.default_rng(0)
    for number in range(count):
        pixels = np.zeros((8, 8, 4), np.uint8)
        pixels[2:6, 1 + number % 3 : 7] = (*random.choice([0, 90, 250], 3), 255)
        path = folder / classes[number % len(classes)] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)


def test_a_folder_of_pictures_is_all_that_train_needs(lintx, tmp_path, monkeypatch):
    monkeypatch.setenv("LINTX_CACHE", str(tmp_path / "cache"))
    draw_icons(tmp_path / "icons", 40)
    run, tiny = tmp_path / "run", ("--preset", "tiny", "--steps", 3, "--batch", 4)
    outcome = lintx("train", tmp_path / "icons", *tiny, "--out", run)
    assert outcome.code == 0, outcome.stderr
    for line in ("2 classes: a (20), b (20)", "expect rough shapes", "peak learning rate 0.002", "at most 3 steps"):
        assert line in outcome.stderr
    info = read_checkpoint(run).info
    assert info.model.image.palette[0] == "#00000000" and info.data.class_names == ("a", "b")
    assert info.model.optional_class and info.training.settings.check_every == 120
    # Every command reads pictures with the checkpoint's look.
    assert lintx("eval", run).code == 0
    out = tmp_path / "out.png"
    assert lintx("sample", run, "--class", "b", "-n", 2, "-o", out).code == 0
    assert "or names (a, b)" in lintx("sample", run, "--class", "c", "-o", out).stderr
    picture = next((tmp_path / "icons" / "a").iterdir())
    assert lintx("complete", picture, "--checkpoint", run, "-o", out).code == 0
    assert lintx("train", "--resume", run, "--steps", 4).code == 0
    assert ": a, b" in lintx("info", run).stdout
    # A model without classes reads classes of any names.
    draw_icons(tmp_path / "others", 20, classes=("c", "d"))
    assert lintx("train", tmp_path / "icons", "--no-classes", *tiny, "--out", tmp_path / "no").code == 0
    assert lintx("eval", tmp_path / "no", "--data", f"folder:{tmp_path / 'others'}").code == 0
    # The weights also start a model of pictures without classes and of another size.
    draw_icons(tmp_path / "more", 20, classes=("",))
    moved = lintx(
        "train", tmp_path / "more", "--init-from", run, "--image-size", 6, "--steps", 1, "--out", tmp_path / "b"
    )
    assert moved.code == 0 and read_checkpoint(tmp_path / "b").info.model.classes == 0, moved.stderr


def test_the_argument_of_train_must_be_a_folder_of_pictures(lintx, tmp_path):
    assert "there is no folder 'nothing'" in lintx("train", "nothing").stderr
    (tmp_path / "config.toml").touch()
    assert f"to resume a run: lintx train --resume {tmp_path}" in lintx("train", tmp_path).stderr
    (tmp_path / "config.toml").unlink()
    outcome = lintx("train", tmp_path, "--data", "mnist")
    assert outcome.code == 2 and "two data sets" in outcome.stderr
    assert "unexpected argument ''" in lintx("train", "").stderr


def test_a_folder_of_arrays_gets_the_settings_of_pictures(lintx, tmp_path):
    np.save(tmp_path / "train-images.npy", np.zeros((20, 6, 6, 3), np.uint8))
    np.save(tmp_path / "train-labels.npy", np.arange(20) % 2)
    outcome = lintx("train", tmp_path, "--dry-run", "--patience", 0)
    chosen = "--preset colour-pixel, --batch 8, --weight-decay 0.5, at most 8 epochs or 15 min 0 s, classes hidden"
    assert f"chosen: {chosen}" in outcome.stderr


@loop_over("kind", ["folder", "array", "bytes"])
def test_a_run_notices_that_files_have_changed(lintx, tmp_path, kind: str) -> None:
    data, run = tmp_path / kind, tmp_path / f"{kind}-run"
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (40, 8, 8), dtype=np.uint8)
    data.mkdir()
    if kind == "array":
        np.save(data / "train-images.npy", pixels)
    for number, image in enumerate(pixels):
        if kind == "bytes":
            (data / f"{number:02}.txt").write_bytes(image.tobytes())
        elif kind == "folder":
            place = data / "ab"[number % 2]
            place.mkdir(exist_ok=True)
            Image.fromarray(image).save(place / f"{number:02}.bmp")
    size = ["--length", 16] if kind == "bytes" else ["--image-size", 8, "--classes"] if kind == "folder" else []
    begun = lintx("train", "--data", f"{kind}:{data}", "--preset", "tiny", *size, "--steps", 1, "--out", run)
    assert begun.code == 0, begun.stderr
    assert lintx("train", "--resume", run, "--steps", 2).code == 0
    if kind == "array":
        np.save(data / "train-images.npy", pixels[::-1])
    elif kind == "folder":  # the names and the number of all files stay the same
        (data / "a").rename(data / "c")
        (data / "b").rename(data / "a")
        (data / "c").rename(data / "b")
    else:
        (data / "02.txt").write_bytes(pixels[3].tobytes())
    refused = lintx("train", "--resume", run, "--steps", 3)
    assert refused.code == 1 and "has changed since" in refused.stderr, refused.stderr
    accepted = lintx("train", "--resume", run, "--steps", 3, "--accept-changed-data")
    assert accepted.code == 0 and "which is accepted" in accepted.stderr
    assert lintx("train", "--resume", run, "--steps", 4).code == 0


def test_a_log_needs_its_package_and_a_known_name(lintx, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    for logs, code, said in (("wandb", 1, "pip install '.[wandb]'"), ("wand", 2, "did you mean 'wandb'?")):
        outcome = lintx("train", *SMALL, "--log", logs, "--out", tmp_path / "run")
        assert (outcome.code, outcome.stdout) == (code, "") and said in outcome.stderr
        assert len(outcome.stderr.splitlines()) == 1 and list(tmp_path.iterdir()) == []
