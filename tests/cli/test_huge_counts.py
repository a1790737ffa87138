"""Numbers beyond any use are refused in one line, and none of them is counted up to."""

import pytest
from PIL import Image

from linformer_cli.sampling.decode import Sampler

HUGE = [2**63, 10**20]


@pytest.mark.parametrize("count", HUGE)
def test_huge_counts_of_images_are_refused(lintx, tmp_path, count) -> None:
    for arguments in (["sample"], ["complete", tmp_path / "x.png"]):
        outcome = lintx(*arguments, "-n", count, "-o", tmp_path / "out.png")
        assert outcome.code == 2 and "'-n' / '--count'" in outcome.stderr
        assert len(outcome.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("number", HUGE)
def test_huge_batches_and_grids_are_as_large_as_needed(lintx, run_folder, tmp_path, number) -> None:
    out = tmp_path / "out.png"
    outcome = lintx("sample", run_folder, "-n", 2, "--batch", number, "--columns", number, "-o", out, "--json")
    assert outcome.code == 0 and outcome.document["images"] == 2
    with Image.open(out) as grid:
        assert grid.width > grid.height


def test_an_interrupted_count_without_end_keeps_what_is_done(lintx, run_folder, tmp_path, monkeypatch) -> None:
    """The numbers of the images are never listed."""
    real = Sampler.iter_batches

    def iter_batches(self, *arguments, **options):
        yield next(real(self, *arguments, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(Sampler, "iter_batches", iter_batches)
    outcome = lintx("sample", run_folder, "-n", 2**40, "--batch", 2, "-o", tmp_path / "out.png")
    assert outcome.code == 130 and f"stopped after 2 of {2**40} images" in outcome.stderr
