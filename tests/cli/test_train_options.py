"""What `lintx train` can do besides its defaults, from the command line to the saved run."""

from linformer_cli.checkpoint import read_checkpoint

SMALL = ("--data", "glyphs", "--image-size", "10", "--preset", "tiny", "--steps", "2", "--batch", "4")


def test_muon_and_shift_reach_the_run(lintx, tmp_path):
    run = tmp_path / "run"
    assert lintx("train", *SMALL, "--optimizer", "muon", "--shift", 2, "--out", run).code == 0
    settings = read_checkpoint(run).info.training.settings
    assert (settings.optimizer, settings.shift) == ("muon", 2)
    resumed = lintx("train", "--resume", run, "--steps", 3)
    assert resumed.code == 0 and "finished step 3" in resumed.stderr
    refused = lintx("train", "--resume", run, "--shift", 1)
    assert refused.code == 2 and "drop --shift" in refused.stderr


def test_a_shift_off_the_image_is_refused(lintx, tmp_path):
    outcome = lintx("train", *SMALL, "--shift", 10, "--out", tmp_path / "run")
    assert outcome.code == 2
    assert "train.shift must be less than the 10 pixels of an image, found 10" in outcome.stderr
    assert list(tmp_path.iterdir()) == []
