"""Tests that commands refuse or limit huge numbers without counting up to them."""

import pytest
from PIL import Image

from linformer_cli.sampling.decode import Sampler

HUGE = [2**63, 10**20]


@pytest.mark.parametrize("count", HUGE)
def test_huge_counts_of_images_are_refused(lintx, tmp_path, count) -> None:
    out = ["-o", tmp_path / "out.png"]
    for arguments in (["sample", *out], ["complete", tmp_path / "x.png", *out], ["check"]):
        outcome = lintx(*arguments, "-n", count)
        assert outcome.code == 2 and "'-n' / '--count'" in outcome.stderr
        assert len(outcome.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("number", HUGE)
def test_huge_batches_and_grids_are_limited_to_the_images(lintx, run_folder, tmp_path, number) -> None:
    out = tmp_path / "out.png"
    outcome = lintx("sample", run_folder, "-n", 2, "--batch", number, "--columns", number, "-o", out, "--json")
    assert outcome.code == 0 and outcome.document["images"] == 2
    with Image.open(out) as grid:
        assert grid.width > grid.height


@pytest.mark.parametrize("number", HUGE)
def test_a_huge_limit_means_no_limit(lintx, run_folder, number) -> None:
    outcome = lintx("check", run_folder, "-n", 1, "--positions", number, "--json")
    assert outcome.code == 0 and outcome.document["positions"] == 100
    outcome = lintx("eval", run_folder, "--limit", number, "--batch", number, "--json")
    assert outcome.code == 0 and outcome.document["images"] == outcome.document["images_in_split"]


def test_an_interrupted_huge_count_keeps_finished_images(lintx, run_folder, tmp_path, monkeypatch) -> None:
    """The test would take too long if the command built a list of all image numbers."""
    real = Sampler.iter_batches

    def iter_batches(self, *arguments, **options):
        yield next(real(self, *arguments, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(Sampler, "iter_batches", iter_batches)
    outcome = lintx("sample", run_folder, "-n", 2**40, "--batch", 2, "-o", tmp_path / "out.png")
    assert outcome.code == 130 and f"stopped after 2 of {2**40} images" in outcome.stderr
    files = ["--files", tmp_path / "files", "-o", tmp_path / "out.png"]
    assert lintx("sample", run_folder, "-n", 2**40, "--batch", 1, *files).code == 130
    outcome = lintx("sample", run_folder, "-n", 2**40, "--batch", 2, *files)
    assert outcome.code == 130 and f"stopped after 3 of {2**40} images" in outcome.stderr
