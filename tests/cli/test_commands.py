"""Tests of every command on a small model, from the command line to files and JSON."""

import csv
import shutil
import signal
import time
import tomllib

import numpy as np
import pytest
from commands import Command, run_command, run_script
from loops import first_fast
from machine import HAS_LIBRARY
from PIL import Image

from linformer_cli import checkpoint_files
from linformer_cli.attention.linear import LinearAttention
from linformer_cli.checkpoint import load_model, read_checkpoint
from linformer_cli.checkpoint_files import DEFAULT_CHECKPOINT
from linformer_cli.data import images, pictures
from linformer_cli.errors import LintxError
from linformer_cli.metrics import COLUMNS
from linformer_cli.report.grids import read_png_metadata

SMALL = ("--data", "glyphs", "--image-size", "10", "--preset", "tiny")  # 10 x 10 images


@pytest.mark.smoke
def test_training_writes_the_documented_folder(run_folder):
    names = {path.name for path in run_folder.iterdir()}
    assert names == {"config.toml", "metrics.csv", "samples", "last", "best", ".lock", "data.json"}
    with open(run_folder / "metrics.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert float(rows[-1]["validation_bits_per_dim"]) == pytest.approx(8, abs=0.3)
    assert (run_folder / "samples" / "step-0000006.png").is_file()


def test_a_run_is_never_overwritten(lintx, run_folder):
    before = (run_folder / "metrics.csv").read_bytes()
    outcome = lintx("train", "--data", "glyphs", "--preset", "tiny", "--steps", "1", "--out", run_folder)
    assert outcome.code == 2 and "exists already" in outcome.stderr
    assert "training and" not in outcome.stderr, "the images were loaded before the error"
    assert (run_folder / "metrics.csv").read_bytes() == before


def test_training_reports_compiled_attention(lintx, tmp_path):
    for attention, compiled in (("linear", HAS_LIBRARY), ("gau", False)):
        outcome = lintx("train", *SMALL, "--attention", attention, "--out", tmp_path / "run", "--dry-run")
        assert ("compiled kernels" in outcome.stderr) == compiled


def test_dry_run_writes_nothing(lintx, tmp_path):
    arguments = ["train", *SMALL, "--out", tmp_path / "run", "--dry-run"]
    document = lintx(*arguments, "--json").document
    assert document["config"]["model"]["attention_options"]["feature_map"] == "elu"
    assert document["parameters"] > 0 and document["seconds_per_step"] > 0
    assert "[model.image]" in lintx(*arguments).stdout
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_continues_and_refuses_other_settings(lintx, tmp_path):
    run = tmp_path / "run"
    assert lintx("train", *SMALL, "--batch", 4, "--steps", 2, "--out", run).code == 0
    outcome = lintx("train", "--resume", run, "--batch", 8)
    assert outcome.code == 2 and "drop --batch" in outcome.stderr
    outcome = lintx("train", "--resume", run, "--attention-option", "chunk=8")
    assert outcome.code == 2 and "drop --attention-option " in outcome.stderr
    outcome = lintx("train", "--resume", run, "--steps", 4, "--json")
    assert outcome.document["steps"] == 4 and outcome.document["images"] == 16
    assert "no step was left" not in outcome.stderr
    assert "no step was left to train; give a larger --steps" in lintx("train", "--resume", run).stderr


def test_training_can_start_from_the_weights_of_another_mechanism(lintx, run_folder, tmp_path):
    source, run = tmp_path / "source", tmp_path / "moved"
    shutil.copytree(run_folder, source)
    arguments = ["train", "--init-from", source, "--attention", "softmax", "--steps", 2, "--batch", 4, "--out", run]
    outcome = lintx(*arguments, "--json")
    lines = outcome.stderr.splitlines()
    assert f"copied 32 tensors from {source / 'best'} (linear attention)" in lines
    assert "newly initialised: none" in lines and "not copied: none" in lines
    # Step 0 is measured before any training.
    with open(run / "metrics.csv", newline="", encoding="utf-8") as file:
        first = next(csv.DictReader(file))
    assert first["step"] == "0" and float(first["validation_bits_per_dim"]) == pytest.approx(8, abs=0.3)
    assert outcome.document["init_from"]["step"] == 6 and outcome.document["attention"] == "softmax"
    assert tomllib.loads((run / "config.toml").read_text())["init_from"]["attention"] == "linear"
    assert "Initialised from" in (run / "last" / "README.md").read_text()
    shutil.rmtree(source)
    outcome = lintx("train", "--resume", run, "--steps", 3, "--json")
    assert outcome.document["steps"] == 3 and "copied" not in outcome.stderr


def test_a_run_can_learn_from_the_predictions_of_others(lintx, run_folder, tmp_path):
    run = tmp_path / "student"
    teachers = ("--distill-from", run_folder, "--distill-from", run_folder / "last")
    base = ("train", *SMALL, "--steps", 1, "--out", run)
    outcome = lintx(*base, *teachers, "--distill-share", 0.25, "--json")
    said = f"learning from {run_folder / 'best'} and {run_folder / 'last'}: their predictions have weight 0.25"
    assert said in outcome.stderr
    assert [teacher["step"] for teacher in outcome.document["distill_from"]] == [6, 6]
    assert lintx("train", "--resume", run, "--steps", 2).code == 0
    outcome = lintx("train", "--resume", run, "--steps", 3, *teachers)
    assert outcome.code == 2 and "drop --distill-from" in outcome.stderr
    outcome = lintx("train", *SMALL, "--steps", 1, "--distill-share", 0.25)
    assert outcome.code == 2 and "name one with --distill-from" in outcome.stderr
    again = lintx("train", "--config", run / "config.toml", "--distill-share", 0.75, "--dry-run", "--json").document
    assert len(again["config"]["distill_from"]) == 2


def test_a_run_whose_weights_cannot_be_copied_leaves_no_folder(lintx, run_folder, tmp_path):
    base = ["train", "--init-from", run_folder, "--steps", 1, "--out", tmp_path / "run"]
    wider = ["--width", 20, "--heads", 3, "--head", "mixture", "--config", tmp_path / "network.toml"]
    (tmp_path / "network.toml").write_text("[model]\nfeed_forward = 48\n")
    outcome = lintx(*base, *wider)
    assert outcome.code == 1 and "none of the 32 tensors" in outcome.stderr
    assert not (tmp_path / "run").exists()
    assert lintx("train", "--resume", run_folder, "--init-from", run_folder).code == 2


@pytest.mark.smoke
def test_sample_writes_a_grid_with_its_settings(lintx, run_folder, tmp_path):
    out, files = tmp_path / "grid.png", tmp_path / "files"
    outcome = lintx("sample", run_folder, "-n", 5, "--batch", 2, "-o", out, "--files", files, "--seed", 7, "--json")
    document = outcome.document
    assert document["images"] == 5 and document["images_per_second"] > 0 and document["state_bytes"] > 0
    assert {"attention", "engine", "precision", "device", "batch", "checkpoint"} <= document.keys()
    assert outcome.stderr.startswith(f"{run_folder / 'best'}: linear attention")
    metadata = read_png_metadata(out)
    assert metadata["seed"] == 7 and metadata["checkpoint_sha256"] == read_checkpoint(run_folder).digest
    assert [path.name for path in sorted(files.iterdir())] == [f"{index:05d}.png" for index in range(5)]
    # Image 3 does not depend on the batch.
    other = tmp_path / "other"
    outcome = lintx("sample", run_folder, "-n", 4, "--batch", 4, "-o", out, "--files", other, "--seed", 7, "--json")
    assert outcome.document["values_per_pass"] == 1
    assert np.array_equal(Image.open(files / "00003.png"), Image.open(other / "00003.png"))


def test_results_hold_the_name_of_a_shipped_model_and_not_its_folder(lintx, run_folder, tmp_path, monkeypatch):
    folder, out = tmp_path / "package" / "checkpoints" / DEFAULT_CHECKPOINT, tmp_path / "grid.png"
    shutil.copytree(run_folder / "last", folder)
    monkeypatch.setattr(checkpoint_files, "__file__", str(tmp_path / "package" / "checkpoint_files.py"))
    for names in ((), (DEFAULT_CHECKPOINT,), (folder,)):
        outcome = lintx("sample", *names, "-n", 1, "-o", out, "--json")
        assert outcome.stderr.startswith(f"{DEFAULT_CHECKPOINT}: linear attention")
        assert outcome.document["checkpoint"] == read_png_metadata(out)["checkpoint"] == DEFAULT_CHECKPOINT
        assert lintx("info", *names, "--json").document["checkpoint"] == DEFAULT_CHECKPOINT
    lintx("train", "--init-from", DEFAULT_CHECKPOINT, *SMALL, "--steps", 1, "--out", tmp_path / "run")
    assert read_checkpoint(tmp_path / "run" / "last").info.training.init_from.checkpoint == DEFAULT_CHECKPOINT


def test_sample_draws_only_the_files_that_are_missing(lintx, run_folder, tmp_path):
    out, files = tmp_path / "grid.png", tmp_path / "files"
    arguments = ["sample", run_folder, "-n", 5, "-o", out, "--files", files, "--json"]
    assert lintx(*arguments).document["drawn"] == 5
    drawn = {path.name: path.read_bytes() for path in files.iterdir()}
    grid = out.read_bytes()
    (files / "00002.png").unlink()
    (files / "00003.png").write_bytes(drawn["00003.png"][:60])
    before = (files / "00001.png").stat().st_mtime_ns
    outcome = lintx(*arguments)
    assert outcome.document["drawn"] == 2 and outcome.document["images"] == 5
    assert f"3 of 5 images are already in {files}" in outcome.stderr
    assert {path.name: path.read_bytes() for path in files.iterdir()} == drawn and out.read_bytes() == grid
    assert (files / "00001.png").stat().st_mtime_ns == before
    outcome = lintx(*arguments)
    assert outcome.document["drawn"] == 0 and out.read_bytes() == grid
    # Another seed gives other images, which do not replace these.
    outcome = lintx(*arguments, "--seed", 1)
    assert outcome.code == 2 and "00000.png' was drawn with seed 0, not 1; choose another folder" in outcome.stderr
    assert {path.name: path.read_bytes() for path in files.iterdir()} == drawn and out.read_bytes() == grid


def test_sample_starts_counting_at_the_number_given_by_first(lintx, run_folder, tmp_path):
    out, files = tmp_path / "grid.png", tmp_path / "files"
    lintx("sample", run_folder, "-n", 4, "-o", out, "--files", files / "all")
    lintx("sample", run_folder, "-n", 2, "--first", 2, "-o", out, "--files", files / "last")
    assert sorted(path.name for path in (files / "last").iterdir()) == ["00002.png", "00003.png"]
    assert (Image.open(files / "last" / "00003.png").tobytes()) == Image.open(files / "all" / "00003.png").tobytes()
    assert lintx("sample", run_folder, "-n", 2, "--first", -1, "-o", out).code == 2


@pytest.mark.parametrize("given", [("--top-k", 1), ("--top-p", 1e-9), ("--temperature", 1e-9)], ids=str)
def test_filters_and_the_seed_reach_the_images(lintx, run_folder, tmp_path, given):
    def draw(name, *options):
        files = tmp_path / name
        lintx("sample", run_folder, "-n", 3, *options, "-o", tmp_path / "x.png", "--files", files)
        return [Image.open(path).tobytes() for path in sorted(files.iterdir())]

    images = draw("all")
    assert len(set(images)) == 3 and len(set(draw("few", *given))) == 1
    assert draw("other", "--seed", 1) != images
    Image.new("L", (10, 10)).save(tmp_path / "p.png")

    def complete(*options):
        command = ("complete", tmp_path / "p.png", "--checkpoint", run_folder, "-n", 3, "-o", tmp_path / "c.png")
        return lintx(*command, *options, "--json").document["rows"][0]["completed_bits_per_dim"]

    assert len(set(complete(*given))) == 1
    assert complete("--seed", 1) != complete()


def test_sample_to_stdout_writes_only_a_png(run_folder):
    code, written, _ = run_command("sample", run_folder, "-n", 1, "-o", "-")
    assert code == 0 and written.startswith(b"\x89PNG") and written.endswith(b"IEND\xaeB`\x82")


@pytest.mark.slow
def test_torchvision_is_not_imported_by_commands_without_a_data_set(run_folder, tmp_path):
    picture, out = str(tmp_path / "picture.png"), str(tmp_path / "x.png")
    Image.new("L", (10, 10)).save(picture)
    commands = [
        ["sample", str(run_folder), "-n", "1", "-o", out],
        ["complete", picture, "--checkpoint", str(run_folder), "-n", "1", "-o", out],
        ["check", str(run_folder), "--positions", "10"],
        ["bench", "sample", "--checkpoint", str(run_folder), "--batch", "1", "--repeats", "1"],
    ]
    script = (
        "import sys; from linformer_cli.cli.app import main\n"
        f"for arguments in {commands!r}:\n"
        "    sys.argv = ['lintx', *arguments]\n"
        "    try: main()\n"
        "    except SystemExit as ended: assert not ended.code\n"
        "    assert 'torchvision' not in sys.modules, arguments"
    )
    code, _, errors = run_script(script)
    assert code == 0, errors


@pytest.mark.smoke
def test_complete_reports_a_broken_picture_and_completes_the_other(lintx, run_folder, tmp_path):
    good, broken, out = tmp_path / "good.png", tmp_path / "broken.png", tmp_path / "out.png"
    Image.fromarray(np.linspace(0, 255, 600).astype(np.uint8).reshape(20, 30)).save(good)
    broken.write_text("not an image")
    files = ("--files", tmp_path / "files")
    base = ("complete", run_folder, good, broken, *files, "-o", out, "--json")
    outcome = lintx(*base, "--keep", "top:3rows", "-n", 2)
    assert outcome.code == 1 and "1 of 2 images" in outcome.stderr
    drawn = [np.asarray(Image.open(path)) for path in sorted((tmp_path / "files").iterdir())]
    assert [image.shape for image in drawn] == [(10, 10)] * 2 and (drawn[0][:3] == drawn[1][:3]).all()
    assert (drawn[0] != drawn[1]).any() and outcome.document["files"] == str(tmp_path / "files")
    refused = lintx(*base, "--seed", 1)
    assert refused.code == 2 and "choose another folder" in refused.stderr
    refused = lintx("complete", run_folder, good, "--checkpoint", "sprites")
    assert refused.code == 2 and "are two models; name one" in refused.stderr
    for missing, said in ((tmp_path / "none", "no checkpoint at"), ("sprits", "did you mean 'sprites'")):
        refused = lintx("complete", missing, good)
        assert refused.code and said in refused.stderr and str(missing) in refused.stderr
    document = outcome.document
    (row,) = document["rows"]
    assert row["known_values"] == 30 and len(row["completed_bits_per_dim"]) == 2
    assert row["kept_bits_per_dim"] > 0 and row["original_rest_bits_per_dim"] > 0
    assert document["failures"][0]["image"] == str(broken)
    assert read_png_metadata(out)["keep"] == "top:3rows"
    out.unlink()
    outcome = lintx("complete", broken, broken, "--checkpoint", run_folder, "-o", out, "--json")
    assert outcome.code == 1 and outcome.stderr.splitlines()[-1].endswith("2 of 2 images could not be read")
    assert outcome.document["out"] is None and not out.exists()


def test_complete_by_default_says_how_to_name_another_model(lintx, run_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("linformer_cli.cli.complete._UNLIKE", 0)
    monkeypatch.setattr(
        "linformer_cli.checkpoint_files.shipped_checkpoints", lambda: {"mnist-deep": run_folder / "best"}
    )
    Image.new("L", (10, 10)).save(tmp_path / "p.png")
    base = ("complete", tmp_path / "p.png", "-n", 1, "-o", tmp_path / "c.png")
    assert f"another model than mnist-deep: lintx complete MODEL {tmp_path / 'p.png'}" in lintx(*base).stderr
    assert "unlike the training images, whose bits/dim" in (named := lintx(*base, "--checkpoint", run_folder).stderr)
    assert "another model" not in named


def test_complete_frames_a_drawing_unless_asked_not_to(lintx, run_folder, tmp_path):
    sheet = Image.new("L", (90, 60), 240)
    sheet.paste(20, (20, 10, 30, 40))
    sheet.save(tmp_path / "drawing.png")
    widths = {}
    for name, options in {
        "framed": (),
        "none": ("--frame", "none"),
        "fit": ("--fit", "pad"),
        "invert": ("--invert",),
    }.items():
        out = tmp_path / f"{name}.png"
        base = ("complete", tmp_path / "drawing.png", "--checkpoint", run_folder, "-n", 1, "-o", out, "--json")
        (row,) = lintx(*base, *options).document["rows"]
        assert any("centred, inverted" in note for note in row["notes"]) == (name == "framed")
        with Image.open(out) as picture:
            widths[name] = picture.width
    assert widths["framed"] > widths["none"] == widths["fit"] == widths["invert"], "the picture itself comes first"


@pytest.mark.parametrize("option", ["-o", "--gif"])
def test_complete_does_not_replace_its_inputs(lintx, run_folder, tmp_path, monkeypatch, option):
    name = "mine.png" if option == "-o" else "mine.gif"
    Image.new("L", (8, 8), 9).save(tmp_path / name)
    before = (tmp_path / name).read_bytes()
    monkeypatch.chdir(tmp_path)
    outcome = lintx("complete", tmp_path / name, "--checkpoint", run_folder, "-o", "out.png", option, name)
    assert outcome.code == 2 and "is one of the inputs" in outcome.stderr
    assert (tmp_path / name).read_bytes() == before and not (tmp_path / "out.png").exists()


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "stopped after 1 of 3 images, which are kept"),
        (LintxError("no room"), 1, "no room"),
    ],
)
def test_complete_keeps_the_finished_pictures_after_a_fault(
    lintx, run_folder, tmp_path, monkeypatch, fault, code, said
):
    names = [tmp_path / f"{number}.png" for number in range(3)]
    for name in names:
        Image.new("L", (10, 10)).save(name)
    real = pictures.load_picture

    def load_picture(path, *settings, **named):
        if path == names[1]:
            raise fault
        return real(path, *settings, **named)

    monkeypatch.setattr(pictures, "load_picture", load_picture)
    out = tmp_path / "out.png"
    outcome = lintx("complete", *names, "--checkpoint", run_folder, "-o", out, "--json")
    assert outcome.code == code and said in outcome.stderr
    assert read_png_metadata(out)["images"] == [str(names[0])] and len(outcome.document["rows"]) == 1
    assert "stopped after" not in lintx("complete", names[1], "--checkpoint", run_folder, "-o", out).stderr


def test_complete_suggests_invert_for_a_white_picture(lintx, run_folder, tmp_path):
    paper = tmp_path / "paper.png"
    Image.new("L", (10, 10), 255).save(paper)
    arguments = ["complete", paper, "--checkpoint", run_folder, "-n", 1, "-o", tmp_path / "out.png"]
    assert "try --invert" in lintx(*arguments).stderr
    assert "hint:" not in lintx(*arguments, "--invert").stderr


@pytest.mark.smoke
def test_eval_reports_bits_per_dim_with_and_without_the_first_value(lintx, run_folder, tmp_path):
    arguments = ["eval", run_folder, "--split", "test", "--limit", 6, "--json"]
    document = lintx(*arguments).document
    assert document["bits_per_dim"] == pytest.approx(8, abs=0.3)
    assert document["bits_per_dim_without_first_value"] != document["bits_per_dim"]
    assert document["images"] == 6 and document["images_in_split"] == 200
    arguments[arguments.index("--limit") + 1] = 1
    one = lintx(*arguments[:-1], "--against", run_folder)
    assert one.code == 0 and "+-" not in one.stdout and "difference           +0.0000  (this model minus" in one.stdout
    assert lintx(*arguments).document["standard_error"] is None  # a single image has no standard error
    np.save(tmp_path / "test-images.npy", np.zeros((2, 8, 8), np.uint8))
    refused = lintx("eval", run_folder, "--data", f"array:{tmp_path}", "--split", "test")
    assert refused.code == 2 and "the model is for images of 10 x 10 x 1" in refused.stderr


def test_eval_against_another_model_reports_the_difference(lintx, run_folder, tmp_path):
    other = tmp_path / "other"
    settings = ["--data", "glyphs", "--image-size", 10, "--preset", "tiny", "--seed", 5, "--steps", 1, "--out", other]
    assert lintx("train", *settings, "--sample-every", 0, "--evaluate-every", 1000).code == 0
    arguments = ["eval", run_folder, "--split", "test", "--limit", 6]
    mine, rival = (lintx("eval", run, *arguments[2:], "--json").document for run in (run_folder, other))
    found = lintx(*arguments, "--against", other, "--json").document["against"]
    assert found["bits_per_dim"] == rival["bits_per_dim"]
    assert found["difference"] == pytest.approx(mine["bits_per_dim"] - rival["bits_per_dim"], abs=1e-9)
    assert 0 < found["difference_standard_error"] < mine["standard_error"] + rival["standard_error"]
    assert (
        f"{found['difference']:+.4f} +- {found['difference_standard_error']:.4f}"
        in lintx(*arguments, "--against", other).stdout
    )
    refused = lintx(*arguments, "--against", "mnist-deep")
    assert refused.code == 2 and "is for images of a different size" in refused.stderr


def test_commands_that_read_images_report_skipped_files(lintx, run_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("LINTX_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "pictures"
    folder.mkdir()
    for index in range(12):
        Image.new("L", (10, 10), 20 * index).save(folder / f"{index}.png")
    (folder / "broken.png").write_text("not an image")
    data = ("--data", f"folder:{folder}")
    for arguments in (
        ("train", *data, "--image-size", 10, "--preset", "tiny", "--dry-run"),
        ("compare", *data, "--image-size", 10, "--preset", "tiny", "--no-train", "--runs", tmp_path / "runs"),
        ("eval", run_folder, *data),
    ):
        outcome = lintx(*arguments)
        assert outcome.code == 0, outcome.stderr
        assert outcome.stderr.count("1 file skipped: ") == outcome.stderr.count("broken.png") == 1


def test_samples_are_compared_with_training_images(lintx, run_folder, tmp_path, monkeypatch):
    drawn = ("sample", run_folder, "-n", 3, "-o", tmp_path / "x.png", "--nearest", tmp_path / "nearest.png", "--json")
    outcome = lintx(*drawn)
    found = outcome.document["copying"]
    assert found["samples"] == 3 and 0 < found["smallest_distance"] <= found["median_distance"]
    assert "nearest training images: median distance" in outcome.stderr
    with Image.open(tmp_path / "nearest.png") as pairs:
        assert pairs.width > pairs.height  # three columns of two images
    monkeypatch.setenv("LINTX_CACHE", str(tmp_path / "cache"))
    (tmp_path / "pictures").mkdir()
    for index in range(12):
        Image.new("L", (10, 10), 20 * index).save(tmp_path / "pictures" / f"{index}.png")
    data = ("--data", f"folder:{tmp_path / 'pictures'}", "--image-size", 10, "--preset", "tiny", "--steps", 1)
    found = lintx("train", *data, "--sample-images", 4, "--out", tmp_path / "run", "--json").document["copying"]
    assert found["samples"] == 4 and found["held_out_median_distance"] == 10 * 20


def test_samples_are_compared_with_the_images_in_the_data_folder_of_the_run(lintx, tmp_path, monkeypatch):
    roots = []

    def load(_name, _train, root, _origin):
        roots.append(root)
        return np.arange(20 * 36, dtype=np.uint8).reshape(20, 6, 6, 1), np.zeros(20, np.int64)

    monkeypatch.setattr(images, "load_torchvision_set", load)
    data, run = ("--data", "mnist", "--data-dir", tmp_path), tmp_path / "run"
    assert lintx("train", *data, "--preset", "tiny", "--steps", 1, "--sample-every", 0, "--out", run).code == 0
    outcome = lintx("sample", run, "-n", 1, "-o", tmp_path / "x.png", "--nearest", tmp_path / "nearest.png")
    assert outcome.code == 0 and roots == [tmp_path, tmp_path], outcome.stderr


def test_a_run_without_patience_left_says_how_to_continue(lintx, tmp_path):
    still = ("--learning-rate", 1e-30, "--evaluate-every", 1, "--sample-every", 0, "--patience", 2, "--steps", 9)
    outcome = lintx("train", *SMALL, *still, "--out", tmp_path / "run")
    assert outcome.code == 0 and "--resume continues with --patience 0" in outcome.stderr
    assert lintx("train", "--resume", tmp_path / "run", "--json").document["steps"] < 5
    resumed = lintx("train", "--resume", tmp_path / "run", "--patience", 0, "--json")
    assert resumed.document["steps"] == 9 and "ended" not in resumed.stderr


def test_a_run_that_its_time_ends_says_how_far_it_came(lintx, tmp_path):
    outcome = lintx("train", *SMALL, "--steps", 10**6, "--max-time", "1s", "--out", tmp_path / "run")
    assert outcome.code == 0 and "ended by --max-time, 0% of the way to --steps or --epochs" in outcome.stderr


@pytest.mark.smoke
def test_check_passes_a_good_model_and_fails_a_damaged_one(lintx, run_folder, damage_step):
    document = lintx("check", run_folder, "--json").document
    assert document["passed"] and all(row["passed"] for row in document["rows"])

    damage_step(LinearAttention)
    outcome = lintx("check", run_folder, "--json")
    assert outcome.code == 1 and "disagree" in outcome.stderr
    assert outcome.document["passed"] is False
    refused = lintx("bench", "sample", "--checkpoint", run_folder, "--batch", "1", "--repeats", 1)
    assert refused.code == 1 and "is not timed" in refused.stderr


@pytest.mark.smoke
def test_info_describes_the_model_and_env_describes_the_machine(lintx, run_folder):
    document = lintx("info", run_folder, "--json").document
    assert document["model"]["image"] == {"height": 10, "width": 10, "channels": 1, "levels": 256}
    assert "glyphs" in lintx("info", run_folder).stdout
    assert lintx("env", "--json").document["threads"] >= 1


@pytest.mark.smoke
def test_export_rounds_the_weights_and_can_be_loaded(lintx, run_folder, tmp_path):
    out = tmp_path / "small"
    size = lintx("export", run_folder, out, "--dtype", "bf16", "--json").document["weights_bytes"]
    assert size < (run_folder / "best" / "model.safetensors").stat().st_size * 0.6
    assert not (out / "training.safetensors").exists()
    assert load_model(out).parameter_count() == load_model(run_folder).parameter_count()
    assert lintx("export", run_folder, out).code == 2


def test_export_writes_a_program(lintx, run_folder, tmp_path):
    sizes = {}
    for dtype in ("fp32", "bf16", "int8"):
        out = tmp_path / f"{dtype}.lintx"
        document = lintx("export", run_folder, out, "--dtype", dtype, "--json").document
        assert document["program"] == str(out) and document["bytes"] == out.stat().st_size
        sizes[dtype] = document["bytes"]
    assert sizes["int8"] < sizes["bf16"] < sizes["fp32"]
    assert lintx("export", run_folder, tmp_path / "default.lintx").code == 0
    assert (tmp_path / "default.lintx").read_bytes() == (tmp_path / "int8.lintx").read_bytes()
    again = lintx("export", run_folder, tmp_path / "int8.lintx")
    assert again.code == 2 and "exists already; choose another file" in again.stderr
    folder = lintx("export", run_folder, tmp_path / "folder", "--dtype", "int8")
    assert folder.code == 2 and "ends in .lintx" in folder.stderr and not (tmp_path / "folder").exists()


@pytest.mark.parametrize(("number", "code"), first_fast([(signal.SIGINT, 130), (signal.SIGTERM, 143)]))
def test_a_signal_saves_the_run_and_prints_how_to_resume(tmp_path, number, code):
    run = tmp_path / "run"
    options = (*SMALL, "--batch", 4, "--steps", 100_000, "--sample-every", 0)
    with Command("train", *options, "--out", run) as command:
        _wait_until(lambda: (run / "metrics.csv").is_file() and len((run / "metrics.csv").read_text().splitlines()) > 1)
        command.send_signal(number)
        found, _, errors = command.finish()
    assert found == code
    assert f"lintx train --resume '{run}'" in errors and "Traceback" not in errors
    saved = read_checkpoint(run / "last").info
    assert saved.training.step > 0 and saved.training_sha256 is not None


def _wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was never met"
        time.sleep(0.05)
