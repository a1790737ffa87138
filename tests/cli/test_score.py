"""Tests of `lintx score` and of the bits/dim of each image in `lintx eval --per-image`."""

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from linformer_cli.config import ImageShape
from linformer_cli.data.images import load_images
from linformer_cli.data.look import Look


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first four validation images of the run, and three pictures of noise."""
    folder = tmp_path_factory.mktemp("pictures")
    glyphs = load_images("glyphs", "validation", look=Look(ImageShape(height=10, width=10))).images[:4]
    noise = np.random.default_rng(0).integers(0, 256, (3, 10, 10, 1), dtype=np.uint8)
    for name, images in (("glyphs", glyphs), ("noise", noise)):
        (folder / name).mkdir()
        for number, image in enumerate(images):
            Image.fromarray(image[..., 0]).save(folder / name / f"{number}.png")
    return folder


def test_scores_are_those_of_eval_and_the_oddest_come_first(run_folder, pictures, lintx, tmp_path) -> None:
    sheet = tmp_path / "sheet.png"
    found = lintx("score", pictures, "--checkpoint", run_folder, "-o", sheet, "--json").document
    rows = found["pictures"]
    bits = [row["bits_per_dim"] for row in rows]
    assert bits == sorted(bits, reverse=True)
    noise, glyphs = ([row["bits_per_dim"] for row in rows if name in row["picture"]] for name in ("noise", "glyphs"))
    area = np.mean([[one > other for other in glyphs] for one in noise])
    areas = {Path(row["folder"]).name: (row["pictures"], row["area"]) for row in found["folders"]}
    assert areas == {"noise": (3, pytest.approx(area)), "glyphs": (4, pytest.approx(1 - area))}
    evaluated = tmp_path / "images.csv"
    arguments = ("eval", run_folder, "--limit", 4, "--per-image", evaluated, "--against", run_folder, "--json")
    mean = lintx(*arguments).document["bits_per_dim"]
    table = list(csv.DictReader(io.StringIO(evaluated.read_text(encoding="utf-8"))))
    expected = {row["image"]: float(row["bits_per_dim"]) for row in table}
    own = {Path(row["picture"]).stem: row["bits_per_dim"] for row in rows if "glyphs" in row["picture"]}
    assert own == pytest.approx(expected, rel=1e-6)
    assert np.mean([*expected.values()]) == pytest.approx(mean)
    assert all(row["bits_per_dim"] == row["against_bits_per_dim"] for row in table)
    # A row of pictures with their heat maps; there are too few for a second row.
    with Image.open(sheet) as drawn:
        assert drawn.mode == "RGB" and drawn.height > 2 * 60


def test_the_second_model_decides_the_order(run_folder, pictures, lintx, tmp_path) -> None:
    other = tmp_path / "other"
    options = ("--data", "glyphs", "--image-size", 10, "--preset", "tiny", "--steps", 1, "--batch", 4, "--seed", 5)
    assert lintx("train", *options, "--out", other).code == 0
    arguments = ("score", pictures, "--checkpoint", run_folder)
    alone = {row["picture"]: row["bits_per_dim"] for row in lintx(*arguments, "--json").document["pictures"]}
    second = lintx("score", pictures, "--checkpoint", other, "--json").document["pictures"]
    against = {row["picture"]: row["bits_per_dim"] for row in second}
    outcome = lintx(*arguments, "--against", other, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(outcome.stdout)))
    wanted = sorted(alone, key=lambda name: against[name] - alone[name])
    assert wanted != sorted(alone, key=lambda name: -alone[name]), "these pictures do not tell the two orders apart"
    assert [row["picture"] for row in rows] == wanted
    for row in rows:
        assert float(row["difference"]) == pytest.approx(alone[row["picture"]] - against[row["picture"]], abs=1e-9)


def test_what_cannot_be_scored_is_said(run_folder, pictures, lintx, tmp_path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no picture")
    (tmp_path / "empty").mkdir()
    glyph = pictures / "glyphs" / "0.png"
    outcome = lintx("score", glyph, tmp_path / "broken.png", "--checkpoint", run_folder)
    assert outcome.code == 1 and "0.png" in outcome.stdout
    assert "1 of 2 pictures could not be read; the others have figures" in outcome.stderr
    if Path("/dev/full").exists():
        outcome = lintx("score", glyph, "--checkpoint", run_folder, "-o", "/dev/full")
        assert outcome.code == 1 and "0.png" in outcome.stdout and "no space left" in outcome.stderr
    for arguments, code, message in (
        ([tmp_path / "broken.png"], 1, "broken.png' is not an image that Pillow can read"),
        ([tmp_path / "empty"], 1, "empty' has no pictures"),
        ([tmp_path / "missing.png"], 1, "no image at"),
        ([glyph, "--against", run_folder], 2, "--against is the same model"),
        ([glyph, "--against", "cifar10-pixel"], 2, "'cifar10-pixel' is for images of a different size or palette"),
        ([glyph, "--class", "1"], 2, "trained without --classes"),
        ([glyph, "-o", tmp_path / "sheet.jpg"], 2, "-o writes a PNG"),
        ([pictures, "-o", glyph], 2, "0.png' is one of the inputs and would be replaced"),
    ):
        outcome = lintx("score", *arguments, "--checkpoint", run_folder)
        assert (outcome.code, outcome.stdout) == (code, "") and message in outcome.stderr, outcome.stderr
